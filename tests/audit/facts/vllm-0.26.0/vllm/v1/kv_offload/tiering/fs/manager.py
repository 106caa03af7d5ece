"""Facts about vllm.v1.kv_offload.tiering.fs.manager of vllm 0.26.0: no code of it."""

from vllm.v1.kv_offload.tiering.fs.io import load_block
