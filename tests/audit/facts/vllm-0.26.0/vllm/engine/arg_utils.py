"""Facts about vllm.engine.arg_utils of vllm 0.26.0: no code of it."""

from vllm.plugins import load_general_plugins
