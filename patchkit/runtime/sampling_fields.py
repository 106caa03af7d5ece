"""The fields of vLLM's request structures, per version that we know.

Read statically from vLLM's source, never from a running vLLM: a field that a new
version adds must be refused until somebody has decided what it does to the
distribution. ``python -m patchkit.runtime.sampling_fields FOLDER`` prints the
entry of a vLLM source folder.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

__all__ = ["FIELDS", "STRUCTURES", "read_fields"]

# Structure -> file in vLLM that defines it.
STRUCTURES = {
    "SamplingParams": "sampling_params.py",
    "EngineCoreRequest": "v1/engine/__init__.py",
}

_NEWEST: dict[str, dict[str, tuple[str, ...]]] = {
    "0.32.0": {
        "SamplingParams": (
            "n",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "temperature",
            "watermarking",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "stop",
            "stop_token_ids",
            "ignore_eos",
            "max_tokens",
            "min_tokens",
            "logprobs",
            "prompt_logprobs",
            "prompt_logprob_token_ids",
            "prompt_logprob_start",
            "logprob_token_ids",
            "flat_logprobs",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "include_stop_str_in_output",
            "output_kind",
            "stream_interval",
            "skip_clone",
            "output_text_buffer_length",
            "_eos_token_id",
            "_all_stop_token_ids",
            "_watermarking_skipped",
            "structured_outputs",
            "logit_bias",
            "allowed_token_ids",
            "extra_args",
            "bad_words",
            "_bad_words_token_ids",
            "skip_reading_prefix_cache",
            "thinking_token_budget",
            "repetition_detection",
            "routed_experts_prompt_start",
            "trace_decode_token_ids",
        ),
        "EngineCoreRequest": (
            "request_id",
            "prompt_token_ids",
            "mm_features",
            "sampling_params",
            "pooling_params",
            "arrival_time",
            "lora_request",
            "cache_salt",
            "data_parallel_rank",
            "prompt_embeds",
            "prompt_is_token_ids",
            "client_index",
            "current_wave",
            "priority",
            "trace_headers",
            "resumable",
            "external_req_id",
            "reasoning_ended",
            "reasoning_parser_kwargs",
            "abort_immediately",
            "session_id",
            "kv_hints",
        ),
    },
}


# Other versions have the same fields but these, and none besides (read from their sources).
_WITHOUT: dict[str, dict[str, set[str]]] = {
    "0.33.0": {"SamplingParams": set(), "EngineCoreRequest": set()},
    "0.31.0": {"SamplingParams": {"_watermarking_skipped"}, "EngineCoreRequest": set()},
    "0.30.0": {
        "SamplingParams": {
            "_watermarking_skipped",
            "prompt_logprob_start",
            "prompt_logprob_token_ids",
        },
        "EngineCoreRequest": {"kv_hints"},
    },
    "0.28.0": {
        "SamplingParams": {
            "_watermarking_skipped",
            "prompt_logprob_start",
            "prompt_logprob_token_ids",
            "trace_decode_token_ids",
            "watermarking",
        },
        "EngineCoreRequest": {"kv_hints"},
    },
    "0.27.1": {
        "SamplingParams": {
            "_watermarking_skipped",
            "prompt_logprob_start",
            "prompt_logprob_token_ids",
            "trace_decode_token_ids",
            "watermarking",
        },
        "EngineCoreRequest": {"kv_hints", "session_id"},
    },
    "0.26.0": {
        "SamplingParams": {
            "_watermarking_skipped",
            "prompt_logprob_start",
            "prompt_logprob_token_ids",
            "stream_interval",
            "trace_decode_token_ids",
            "watermarking",
        },
        "EngineCoreRequest": {"kv_hints", "session_id"},
    },
}

FIELDS: dict[str, dict[str, tuple[str, ...]]] = {
    **_NEWEST,
    **{
        version: {
            name: tuple(f for f in fields if f not in lost[name])
            for name, fields in _NEWEST["0.32.0"].items()
        }
        for version, lost in _WITHOUT.items()
    },
}


def read_fields(source: str, structure: str) -> tuple[str, ...]:
    """Annotated names in the body of a class, in order."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == structure:
            return tuple(
                statement.target.id
                for statement in node.body
                if isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and "ClassVar" not in ast.unparse(statement.annotation)
            )
    raise LookupError(f"no class {structure} at the top level of this source")


if __name__ == "__main__":
    import json

    folder = Path(sys.argv[1])
    print(
        json.dumps(
            {
                name: read_fields((folder / file).read_text(), name)
                for name, file in STRUCTURES.items()
            },
            indent=4,
        )
    )
