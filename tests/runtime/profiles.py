"""A profile that is right, and ways to make it wrong."""

from __future__ import annotations

from patchkit.runtime.contract import Machine
from patchkit.runtime.profile import Profile, parse_profile

TOML = """\
[profile]
name = "toy_cpu"
adapter = "toy"
claim = "on_policy"

[model]
architecture = "ToyForCausalLM"
revision = "local"

[topology.rollout]
tensor = 2
expert = 1
pipeline = 1
context = 1
data = 1

[topology.trainer]
tensor = 1
expert = 1
pipeline = 1
context = 1
data = 2

[packages]
vllm = "==0.32.0"
torch = ">=2.13,<2.14"
transformers = "==5.19.*"

[precision]
weights = "bfloat16"
master = "float32"
kv_cache = "auto"
logprobs = "float32"

[sampling]
policy = "on_policy"

[engine]
batch_invariant = false
logprobs_mode = "raw_logprobs"
generation_config = "vllm"
max_model_len = 256
max_num_seqs = 8
max_num_batched_tokens = 64
block_size = 32
prefix_caching = true
chunked_prefill = true
async_scheduling = false
cascade_attention = false
enforce_eager = true
compilation = "none"
cuda_graphs = "none"
custom_ops = ["+toy"]
model_runner = "v1"
attention_backend = "auto"
moe_backend = "auto"
quantization = "none"
speculative_decoding = "none"

[weights]
path = "files"
receipts = "enforce"
caches = "reset"

[environment]
OMP_NUM_THREADS = "1"
"""


def text(**changes: str) -> str:
    """The TOML with ``table__key="new text"`` in place of the old value."""
    lines, table, done = [], "", set()
    for line in TOML.splitlines():
        if line.startswith("["):
            table = line.strip("[]").replace(".", "_")
        key = f"{table}__{line.partition(' ')[0]}"
        if key in changes:
            line = f"{line.partition(' ')[0]} = {changes[key]}"
            done.add(key)
        lines.append(line)
    assert done == set(changes), set(changes) - done
    return "\n".join(lines)


def profile(**changes: str) -> Profile:
    return parse_profile(text(**changes), source="toy.toml")


def machine(**changes: object) -> Machine:
    base: dict = {
        "packages": {"vllm": "0.32.0+cpu", "torch": "2.13.0+cpu", "transformers": "5.19.0"},
        "adapters": ("other", "toy"),
        "model_config": {"architectures": ["ToyForCausalLM"]},
        "environment": {"OMP_NUM_THREADS": "1"},
        "known_fields": ("0.32.0",),
    }
    return Machine(**{**base, **changes})
