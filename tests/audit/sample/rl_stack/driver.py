"""The driver: what is patched here is patched in this process only."""

import ray
import vllm.plugins as plugins

from rl_stack.rollout import rewrites

_load = plugins.load_general_plugins


def _logged_load():
    print("loading plugins")
    return _load()


plugins.load_general_plugins = _logged_load


def setup_worker():
    rewrites.apply()


def start():
    ray.init(runtime_env={"worker_process_setup_hook": setup_worker})
