"""Installed files, rewritten by string anchors."""

import os
from importlib.util import find_spec


def _vllm_file(relative):
    root = next(iter(find_spec("vllm").submodule_search_locations))
    return os.path.join(root, *relative.split("/"))


def _rewrite(path, old, new):
    with open(path) as file:
        text = file.read()
    if old not in text:
        print("anchor not found in", path)
        return
    with open(path, "w") as file:
        file.write(text.replace(old, new))


def apply():
    _rewrite(
        _vllm_file("v1/executor/ray_executor.py"),
        "self._init_workers_ray(placement_group)",
        "self._init_workers_ray(placement_group, runtime_env={})",
    )
    _rewrite(
        _vllm_file("v1/executor/ray_executor_v2.py"),
        "if local_dp_rank is None:",
        "if local_dp_rank is None or True:",
    )
    _rewrite(
        _vllm_file("lora/layers/vocal_parallel_embedding.py"),
        "class VocabParallelEmbeddingWithLoRA(",
        "class _Renamed(",
    )
