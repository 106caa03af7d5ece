"""A Ray cluster of this process's environment, until standard input closes."""

from __future__ import annotations

import sys

import ray

context = ray.init(
    address="local",
    num_cpus=3,
    include_dashboard=False,
    object_store_memory=200 * 1024**2,
    log_to_driver=False,
)
print(context.address_info["address"], flush=True)
sys.stdin.read()
ray.shutdown()
