"""Each exclusion of the engine raises; what cannot be read is excluded, too."""

from __future__ import annotations

import enum
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from profiles import TOML, profile

from patchkit.runtime.engine_gate import (
    RULES,
    UNREADABLE,
    EngineRefusedError,
    check_settings,
    read_settings,
    require_engine,
)

GOOD = {
    "model_config.architectures": ["ToyForCausalLM"],
    "model_config.is_hybrid": False,
    "model_config.is_attention_free": False,
    "model_config.runner_type": "generate",
    "model_config.dtype": "bfloat16",
    "model_config.head_dtype": "bfloat16",
    "model_config.quantization": None,
    "quant_config": None,
    "model_config.logprobs_mode": "raw_logprobs",
    "model_config.generation_config": "vllm",
    "model_config.override_generation_config": {},
    "model_config.logits_processors": None,
    "entry_points.logits_processors": [],
    "model_config.disable_cascade_attn": True,
    "model_config.enforce_eager": True,
    "model_config.max_model_len": 256,
    "model_config.enable_prompt_embeds": False,
    "model_config.enable_trace_replay": False,
    "model_config.return_sampling_mask": False,
    "model_config.trust_remote_code": False,
    "parallel_config.tensor_parallel_size": 2,
    "parallel_config.pipeline_parallel_size": 1,
    "parallel_config.data_parallel_size": 1,
    "parallel_config.decode_context_parallel_size": 1,
    "parallel_config.prefill_context_parallel_size": 1,
    "parallel_config.enable_expert_parallel": False,
    "parallel_config.all2all_backend": "allgather_reducescatter",
    "parallel_config.enable_eplb": False,
    "parallel_config.enable_dbo": False,
    "parallel_config.enable_elastic_ep": False,
    "speculative_config": None,
    "lora_config": None,
    "kv_transfer_config": None,
    "ec_transfer_config": None,
    "diffusion_config": None,
    "watermark_config": None,
    "cache_config.enable_prefix_caching": True,
    "cache_config.cache_dtype": "auto",
    "cache_config.block_size": 32,
    "cache_config.kv_sharing_fast_prefill": False,
    "cache_config.kv_offloading_size": None,
    "scheduler_config.max_num_seqs": 8,
    "scheduler_config.max_num_batched_tokens": 64,
    "scheduler_config.async_scheduling": False,
    "scheduler_config.enable_chunked_prefill": True,
    "scheduler_config.policy": "fcfs",
    "scheduler_config.scheduler_cls": None,
    "compilation_config.mode": "NONE",
    "compilation_config.cudagraph_mode": "NONE",
    "compilation_config.custom_ops": ["none", "+toy"],
    "attention_config.backend": None,
    "kernel_config.moe_backend": "auto",
    "use_v2_model_runner": False,
    "offload_config.uva.cpu_offload_gb": 0.0,
    "weight_transfer_config.backend": "patchkit_file",
}

# What makes each setting wrong; one entry per rule, checked to be complete.
BAD = {
    "model_config.architectures": ["MambaForCausalLM"],
    "model_config.is_hybrid": True,
    "model_config.is_attention_free": True,
    "model_config.runner_type": "pooling",
    "model_config.dtype": "float16",
    "model_config.head_dtype": "float32",
    "model_config.quantization": "fp8",
    "quant_config": "<Fp8Config>",
    "model_config.logprobs_mode": "processed_logprobs",
    "model_config.generation_config": "auto",
    "model_config.override_generation_config": {"temperature": "0.6"},
    "model_config.logits_processors": ["x.Y"],
    "entry_points.logits_processors": ["bias = x:Y"],
    "model_config.disable_cascade_attn": False,
    "model_config.enforce_eager": False,
    "model_config.max_model_len": 257,
    "model_config.enable_prompt_embeds": True,
    "model_config.enable_trace_replay": True,
    "model_config.return_sampling_mask": True,
    "model_config.trust_remote_code": True,
    "parallel_config.tensor_parallel_size": 4,
    "parallel_config.pipeline_parallel_size": 2,
    "parallel_config.data_parallel_size": 2,
    "parallel_config.decode_context_parallel_size": 2,
    "parallel_config.prefill_context_parallel_size": 2,
    "parallel_config.enable_expert_parallel": True,
    "parallel_config.all2all_backend": "deepep_low_latency",
    "parallel_config.enable_eplb": True,
    "parallel_config.enable_dbo": True,
    "parallel_config.enable_elastic_ep": True,
    "speculative_config": "<SpeculativeConfig>",
    "lora_config": "<LoRAConfig>",
    "kv_transfer_config": "<KVTransferConfig>",
    "ec_transfer_config": "<ECTransferConfig>",
    "diffusion_config": "<DiffusionConfig>",
    "watermark_config": "<WatermarkConfig>",
    "cache_config.enable_prefix_caching": False,
    "cache_config.cache_dtype": "fp8",
    "cache_config.block_size": 16,
    "cache_config.kv_sharing_fast_prefill": True,
    "cache_config.kv_offloading_size": 4.0,
    "scheduler_config.max_num_seqs": 9,
    "scheduler_config.max_num_batched_tokens": 65,
    "scheduler_config.async_scheduling": True,
    "scheduler_config.enable_chunked_prefill": False,
    "scheduler_config.policy": "priority",
    "scheduler_config.scheduler_cls": "<type>",
    "compilation_config.mode": "VLLM_COMPILE",
    "compilation_config.cudagraph_mode": "FULL",
    "compilation_config.custom_ops": ["none"],
    "attention_config.backend": "FLASH_ATTN",
    "kernel_config.moe_backend": "triton",
    "use_v2_model_runner": True,
    "offload_config.uva.cpu_offload_gb": 1.0,
    "weight_transfer_config.backend": "nccl",
}

PATHS = [rule.path for rule in RULES]


def test_every_rule_is_in_both_tables_once():
    assert len(PATHS) == len(set(PATHS))
    assert set(PATHS) == set(GOOD) == set(BAD)


def test_a_good_engine_passes():
    assert check_settings(GOOD, profile()) == []


@pytest.mark.parametrize("path", PATHS)
def test_each_exclusion_raises(path):
    (v,) = check_settings({**GOOD, path: BAD[path]}, profile())
    assert path in v.subject
    assert v.found == repr(BAD[path])


@pytest.mark.parametrize("path", PATHS)
def test_what_cannot_be_read_is_refused(path):
    (v,) = check_settings({**GOOD, path: UNREADABLE}, profile())
    assert path in v.subject
    without = {k: x for k, x in GOOD.items() if k != path}
    assert len(check_settings(without, profile())) == 1


@pytest.mark.parametrize("rule", [r for r in RULES if r.since], ids=lambda r: r.path)
def test_older_versions_may_lack_what_they_cannot_do(rule):
    without = {k: x for k, x in GOOD.items() if k != rule.path}
    assert check_settings(without, profile(), version="0.26.0") == []
    assert check_settings(without, profile(), version="0.32.0+cpu")
    assert check_settings({**GOOD, rule.path: BAD[rule.path]}, profile(), version="0.26.0")


@pytest.mark.parametrize("path", ["model_config.is_hybrid", "parallel_config.enable_dbo"])
def test_a_switch_must_be_a_switch(path):
    assert check_settings({**GOOD, path: 0}, profile())


def test_smaller_is_allowed_where_the_profile_states_a_cap():
    smaller = {**GOOD, "scheduler_config.max_num_seqs": 1, "model_config.max_model_len": 10}
    assert check_settings(smaller, profile()) == []
    assert check_settings({**GOOD, "scheduler_config.max_num_seqs": 0}, profile())


def test_all_come_together_and_by_line():
    found = check_settings(BAD, profile())
    assert len(found) == len(RULES)
    line = next(i for i, x in enumerate(TOML.splitlines(), 1) if x.startswith("max_num_seqs"))
    assert any(f"toy.toml:{line} engine.max_num_seqs" in v.subject for v in found)


def nested(settings):
    root = SimpleNamespace()
    for path, value in settings.items():
        *parents, last = path.split(".")
        at = root
        for name in parents:
            if not hasattr(at, name):
                setattr(at, name, SimpleNamespace())
            at = getattr(at, name)
        setattr(at, last, value)
    return root


class Engine:
    """Two workers; one may have got another configuration than the driver."""

    def __init__(self, driver, *workers):
        self.llm_engine = SimpleNamespace(vllm_config=nested(driver))
        self.workers = [nested(w) for w in workers]

    def collective_rpc(self, method):
        assert method == "patchkit_settings"
        return [read_settings(w) for w in self.workers]


def test_a_setting_that_was_accepted_and_not_forwarded():
    lost = {**GOOD, "model_config.disable_cascade_attn": False}
    with pytest.raises(EngineRefusedError) as e:
        require_engine(Engine(GOOD, GOOD, lost), profile())
    (v,) = e.value.violations
    assert v.subject.startswith("worker 1: model_config.disable_cascade_attn")
    assert require_engine(Engine(GOOD, GOOD, GOOD), profile())


@pytest.mark.parametrize("answers", [[], [GOOD], [GOOD] * 3])
def test_every_worker_has_to_answer(answers):
    with pytest.raises(EngineRefusedError, match="not every worker said"):
        require_engine(Engine(GOOD, *answers), profile())


def test_a_logits_processor_that_is_only_installed_is_refused(tmp_path, monkeypatch):
    """vLLM loads it into every sampler, and its configuration does not mention it."""
    info = tmp_path / "bias-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bias\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.logits_processors]\nbias = x:Y\n")
    assert require_engine(Engine(GOOD, GOOD, GOOD), profile())
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EngineRefusedError, match=r"what is drawn from(?s:.)*bias = x:Y") as e:
        require_engine(Engine(GOOD, GOOD, GOOD), profile())
    assert len(e.value.violations) == 3, "the driver's and each worker's"


def test_reading_is_plain_and_never_raises():
    class Mode(enum.Enum):
        NONE = 0

    class Moody:
        @property
        def is_hybrid(self):
            raise RuntimeError("not now")

    config = nested({"compilation_config.mode": Mode.NONE, "lora_config": object()})
    config.model_config = Moody()
    settings = read_settings(config)
    assert settings["compilation_config.mode"] == "NONE"
    assert settings["lora_config"] == "<object>"
    assert settings["model_config.is_hybrid"] == UNREADABLE
    assert settings["cache_config.block_size"] == UNREADABLE


@pytest.mark.stack
def test_against_the_installed_vllm(tmp_path):
    """What the profile's arguments become in a real configuration."""
    pytest.importorskip("vllm")
    code = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from patchkit_adapters.qwen3_moe.tiny import make_tiny_model
from profiles import profile
from patchkit.runtime.engine_gate import check_settings, read_settings
from patchkit.runtime.sync import register_backend
from vllm.engine.arg_utils import EngineArgs
register_backend()
p = profile(model__architecture='"Qwen3MoeForCausalLM"')
model = make_tiny_model(Path({str(tmp_path)!r}))
def found(**changes):
    arguments = {{**p.engine_arguments(str(model)), "skip_tokenizer_init": True, **changes}}
    settings = read_settings(EngineArgs(**arguments).create_engine_config())
    return [v.subject for v in check_settings(settings, p)]
from typing import get_args
from vllm.config import parallel
def exchange(name):
    built = parallel.ParallelConfig(
        tensor_parallel_size=2, enable_expert_parallel=True, all2all_backend=name
    )
    own = dict(good, **{{"parallel_config.all2all_backend": built.all2all_backend}})
    return built.all2all_backend, [(v.subject, v.problem) for v in check_settings(own, p)]
arguments = {{**p.engine_arguments(str(model)), "skip_tokenizer_init": True}}
good = read_settings(EngineArgs(**arguments).create_engine_config())
print("RESULT", json.dumps([found(), found(enable_prefix_caching=False, generation_config="auto",
                                         max_num_seqs=9, tensor_parallel_size=1),
                            found(all2all_backend="deepep_low_latency"),
                            {{n: exchange(n) for n in get_args(parallel.All2AllBackend)}}]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=200,
        env={
            **os.environ,
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ALL2ALL_BACKEND": "deepep_high_throughput",  # this version does not obey it
        },
    )
    lines = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    good, bad, deepep, exchanges = json.loads(lines[0].removeprefix("RESULT "))
    assert good == []
    assert len(bad) == 4, bad
    assert [s for s in deepep if "parallel_config.all2all_backend" in s] == deepep != []
    assert {"deepep_high_throughput", "deepep_low_latency", "deepep_v2"} <= set(exchanges)
    for name, (resolved, violations) in exchanges.items():
        if name in ("allgather_reducescatter", "naive", "pplx"):  # vLLM replaces the last two
            assert (resolved, violations) == ("allgather_reducescatter", [])
        else:
            ((subject, problem),) = violations
            assert "parallel_config.all2all_backend" in subject
            assert f"all-to-all backend {name} (" in problem
