"""Which requests may enter an engine whose log-probabilities are to be proven.

The trainer's log-softmax runs over the whole vocabulary at temperature 1, so a
request may enter only if that is the distribution its tokens are drawn from. The
rules are positive: they say for *every* field of vLLM's request structures which
values are allowed. A field without a rule, or one that the pinned version's list
does not have, is refused whatever its value.

Rules look at the final effective parameters, after the engine merged defaults of
``generation_config`` into them: in the process that accepts requests (the Python
API, the asynchronous engine and the OpenAI-compatible server pass through one
function there) and in the engine core again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from patchkit.errors import ConfigurationError, Violation, ViolationsError
from patchkit.runtime.sampling_fields import FIELDS

__all__ = [
    "POLICIES",
    "Policy",
    "RequestGate",
    "RequestRefusedError",
    "Rule",
    "admit",
    "guard_engine_core",
    "guard_front_end",
    "process_gate",
]


class RequestRefusedError(ViolationsError, ValueError):
    """A request that the claim does not cover.

    Also a ``ValueError``, and where vLLM has a class of its own for mistakes of the
    client, what the front end raises is one of those, too: so a server answers with
    a client error and the list, not with an internal error and nothing.
    """

    def __reduce__(self) -> Any:
        return RequestRefusedError, (self.headline, self.violations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What a field may hold.

    Attributes:
        allowed: The values, in words.
        accepts: The test.
        effect: What another value does, and so why it is refused.
    """

    allowed: str
    accepts: Callable[[Any], bool]
    effect: str = ""


def _exactly(value: float, effect: str) -> Rule:
    # `True == 1`, so the type counts: a bool is no temperature.
    return Rule(
        allowed=repr(value),
        accepts=lambda v: type(v) in (int, float) and v == value,
        effect=effect,
    )


def _absent(effect: str) -> Rule:
    return Rule(allowed="None", accepts=lambda v: v is None, effect=effect)


def _empty(effect: str) -> Rule:
    return Rule(
        allowed="None or empty",
        accepts=lambda v: v is None or (isinstance(v, list | tuple | dict | set) and not v),
        effect=effect,
    )


def _off(effect: str) -> Rule:
    return Rule(allowed="False or None", accepts=lambda v: v is None or v is False, effect=effect)


def _count(low: int, *, optional: bool) -> Rule:
    return Rule(
        allowed=f"an integer from {low}" + (", or None" if optional else ""),
        accepts=lambda v: (v is None and optional) or (type(v) is int and v >= low),
    )


def _any() -> Rule:
    return Rule(allowed="anything: no effect on which token is drawn", accepts=lambda v: True)


_MASKS = "masks tokens, so that what is drawn from is not the whole softmax"
_SHIFTS = "changes logits, so that the trainer's log-softmax is another distribution"

_SAMPLING: dict[str, Rule] = {
    "n": _count(1, optional=False),
    "presence_penalty": _exactly(0.0, _SHIFTS),
    "frequency_penalty": _exactly(0.0, _SHIFTS),
    "repetition_penalty": _exactly(1.0, _SHIFTS),
    "temperature": _exactly(1.0, "scales logits; the trainer replays temperature 1"),
    "watermarking": _off("biases the draw"),
    "top_p": _exactly(1.0, _MASKS),
    "top_k": Rule(
        allowed="0 or -1", accepts=lambda v: type(v) is int and v in (0, -1), effect=_MASKS
    ),
    "min_p": _exactly(0.0, _MASKS),
    "seed": Rule(allowed="None or an integer", accepts=lambda v: v is None or type(v) is int),
    # Stopping rules are functions of the tokens so far: they end a sequence, and
    # change no probability of a token that was drawn.
    "stop": _any(),
    "stop_token_ids": _any(),
    "ignore_eos": _any(),
    "max_tokens": _count(1, optional=True),
    "min_tokens": _exactly(0, "masks EOS and the stop tokens until then"),
    "logprobs": _count(-1, optional=True),
    "prompt_logprobs": _count(-1, optional=True),
    "prompt_logprob_token_ids": _absent("scores other tokens than the prompt's"),
    "prompt_logprob_start": _absent("leaves positions out"),
    "logprob_token_ids": _absent("replaces the reported log-probabilities"),
    "flat_logprobs": _any(),
    "detokenize": _any(),
    "skip_special_tokens": _any(),
    "spaces_between_special_tokens": _any(),
    "include_stop_str_in_output": _any(),
    "output_kind": _any(),
    "stream_interval": _any(),
    "skip_clone": _any(),
    "output_text_buffer_length": _any(),
    "_eos_token_id": _any(),
    "_all_stop_token_ids": _any(),
    "_watermarking_skipped": _off("the engine is built with a watermark"),
    "structured_outputs": _absent(_MASKS),
    "logit_bias": _empty(_SHIFTS),
    "allowed_token_ids": _absent(_MASKS),
    "extra_args": _empty("feeds custom logits processors and connectors"),
    "bad_words": _empty(_MASKS),
    "_bad_words_token_ids": _empty(_MASKS),
    "skip_reading_prefix_cache": _any(),
    "thinking_token_budget": _absent("forces tokens when the budget is spent"),
    "repetition_detection": _absent("is not covered: ends sequences by a rule of its own"),
    "routed_experts_prompt_start": _any(),
    "trace_decode_token_ids": _absent("forces tokens instead of drawing them"),
}

_REQUEST: dict[str, Rule] = {
    "request_id": _any(),
    "prompt_token_ids": Rule(
        allowed="token ids",
        accepts=lambda v: v is not None and len(v) > 0,
        effect="is compared by token ids, so they must be there",
    ),
    "mm_features": _empty("is no text; the replay has only token ids"),
    "sampling_params": Rule(
        allowed="sampling parameters", accepts=lambda v: v is not None, effect="decides the draw"
    ),
    "pooling_params": _absent("asks for no generation"),
    "arrival_time": _any(),
    "lora_request": _absent("runs other weights than the policy's"),
    "cache_salt": _any(),
    "data_parallel_rank": _any(),
    "prompt_embeds": _absent("replaces tokens, which the replay needs"),
    "prompt_is_token_ids": _absent("replaces tokens, which the replay needs"),
    "client_index": _any(),
    "current_wave": _any(),
    "priority": _any(),
    "trace_headers": _any(),
    "resumable": _off("grows a prompt while it runs"),
    "external_req_id": _any(),
    "reasoning_ended": _any(),
    "reasoning_parser_kwargs": _any(),
    "abort_immediately": _any(),
    "session_id": _any(),
    "kv_hints": _absent("can fetch KV entries that another version of the weights made"),
}

# What vLLM itself stores on a SamplingParams beside its fields (cached properties).
_ATTRIBUTES = frozenset({"sampling_type"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A set of rules for one kind of claim.

    Attributes:
        name: For messages and the artifact.
        on_policy: Whether tokens drawn under it are samples of the policy.
        sampling: Rules for ``SamplingParams``.
        request: Rules for ``EngineCoreRequest``.
    """

    name: str
    on_policy: bool
    sampling: Mapping[str, Rule]
    request: Mapping[str, Rule]


POLICIES: dict[str, Policy] = {
    "on_policy": Policy(name="on_policy", on_policy=True, sampling=_SAMPLING, request=_REQUEST),
    # Deterministic, for smoke tests: the most likely token is no sample.
    "greedy_smoke": Policy(
        name="greedy_smoke",
        on_policy=False,
        sampling={**_SAMPLING, "temperature": _exactly(0.0, "draws at random")},
        request=_REQUEST,
    ),
}


class RequestGate:
    """Checks requests against one policy and one vLLM version's fields.

    Args:
        version: vLLM's version; its fields must be known.
        policy: Name in :data:`POLICIES`.
        live: What the installed classes really have, ``{"SamplingParams": fields}``;
            a difference from the known version is refused here.
    """

    def __init__(
        self,
        version: str,
        *,
        policy: str = "on_policy",
        live: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        from packaging.version import Version

        if policy not in POLICIES:
            raise ConfigurationError(
                f"request gate: unknown policy {policy!r}; there are {', '.join(POLICIES)}"
            )
        self.policy = POLICIES[policy]
        self.version = Version(version).public
        if self.version not in FIELDS:
            raise ConfigurationError(
                f"request gate: the fields of vLLM {self.version} are not known, only those of "
                f"{', '.join(FIELDS)}. Add them with `python -m patchkit.runtime.sampling_fields "
                "FOLDER` and decide about each new one in patchkit/runtime/admission.py"
            )
        self.fields = FIELDS[self.version]
        violations = [
            v
            for structure, rules in self._rules().items()
            for v in self._undecided(structure, rules)
        ]
        for structure, present in (live or {}).items():
            violations += self._foreign(structure, present)
        if violations:
            raise RequestRefusedError(
                f"request gate for vLLM {self.version} cannot be built", violations
            )

    @classmethod
    def for_installed(cls, policy: str = "on_policy") -> RequestGate:
        """The gate of the vLLM in this process (imports it)."""
        import vllm
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        return cls(
            vllm.__version__,
            policy=policy,
            live={
                "SamplingParams": SamplingParams.__struct_fields__,
                "EngineCoreRequest": EngineCoreRequest.__struct_fields__,
            },
        )

    def check_sampling(self, params: Any) -> list[Violation]:
        """Everything about sampling parameters that the claim does not cover."""
        found = list(self._foreign("SamplingParams", type(params).__struct_fields__))
        for name, value in getattr(params, "__dict__", {}).items():
            if name not in _ATTRIBUTES:
                found.append(self._violation(f"SamplingParams.{name}", "no such field", value))
            # The engine goes by what was cached, whatever became of the fields since.
            elif value != (now := vars(type(params))[name].func(params)):
                found.append(
                    Violation(
                        subject=f"SamplingParams.{name}",
                        problem="was computed before its fields were changed, and decides the draw",
                        expected=repr(now),
                        found=repr(value)[:200],
                        remedy="build new parameters instead of changing used ones",
                    )
                )
        return found + list(self._values("SamplingParams", self.policy.sampling, params))

    def check_request(self, request: Any) -> list[Violation]:
        """The same for a whole request, its sampling parameters included."""
        found = list(self._foreign("EngineCoreRequest", type(request).__struct_fields__))
        found += self._values("EngineCoreRequest", self.policy.request, request)
        if request.sampling_params is not None:
            found += self.check_sampling(request.sampling_params)
        return found

    def admit(self, request: Any) -> None:
        """Refuse a request with everything that is wrong with it."""
        if violations := self.check_request(request):
            raise RequestRefusedError(
                f"request {request.request_id} refused under policy {self.policy.name}", violations
            )

    # -- rules -------------------------------------------------------------------------

    def _rules(self) -> dict[str, Mapping[str, Rule]]:
        return {
            "SamplingParams": self.policy.sampling,
            "EngineCoreRequest": self.policy.request,
        }

    def _undecided(self, structure: str, rules: Mapping[str, Rule]) -> Iterator[Violation]:
        for name in self.fields[structure]:
            if name not in rules:
                yield self._violation(
                    f"{structure}.{name}", "nobody has decided what it does", "no rule"
                )

    def _foreign(self, structure: str, present: Sequence[str]) -> Iterator[Violation]:
        known = self.fields[structure]
        if tuple(present) == known:  # every request asks
            return
        for name in present:
            if name not in known:
                yield self._violation(
                    f"{structure}.{name}", f"not a field of vLLM {self.version}", "present"
                )
        for name in known:
            if name not in present:
                yield self._violation(
                    f"{structure}.{name}", f"missing, though vLLM {self.version} has it", "absent"
                )

    def _values(self, structure: str, rules: Mapping[str, Rule], item: Any) -> Iterator[Violation]:
        for name in self.fields[structure]:
            value = getattr(item, name, None)
            rule = rules[name]
            if not rule.accepts(value):
                yield Violation(
                    subject=f"{structure}.{name}",
                    problem=rule.effect or "not covered",
                    expected=rule.allowed,
                    found=repr(value)[:200],
                    remedy=f"set it to {rule.allowed}; if it came from the model's "
                    'generation_config, build the engine with generation_config="vllm"',
                )

    def _violation(self, subject: str, problem: str, value: object) -> Violation:
        return Violation(
            subject=subject,
            problem=problem,
            expected=f"a field of vLLM {self.version} with a rule",
            found=repr(value)[:200],
            remedy="pin the vLLM version of the profile, or decide about the field",
        )


def process_gate() -> RequestGate:
    """The gate of this process; its policy is ``PATCHKIT_SAMPLING``, ``on_policy`` if unset."""
    return _installed_gate(os.environ.get("PATCHKIT_SAMPLING") or "on_policy")


# By policy: a process may run one engine under a contract, and another under the next.
_installed_gate = lru_cache(RequestGate.for_installed)


def admit(request: Any) -> None:
    """Refuse a request that this process's gate does not cover."""
    process_gate().admit(request)


# -- patch points; declared in patchkit.runtime.patches -----------------------------------


def guard_front_end(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap ``InputProcessor.assign_request_id``: every finished request passes it."""

    def assign_request_id(request: Any) -> None:
        try:
            admit(request)
        except RequestRefusedError as e:
            raise _client_error()(e.headline, e.violations) from None
        return original(request)

    return assign_request_id


@lru_cache(maxsize=1)
def _client_error() -> type[RequestRefusedError]:
    """Our refusal as vLLM's own kind of client error, where it has one."""
    from vllm import exceptions

    base = getattr(exceptions, "VLLMValidationError", None)
    if base is None or issubclass(base, ValueError):
        return RequestRefusedError  # versions that look for ValueError
    return type(
        "RequestRefusedError", (RequestRefusedError, base), {"parameter": None, "value": None}
    )


def guard_engine_core(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``EngineCore.preprocess_add_request``: the engine's own entrance."""

    def preprocess_add_request(self: Any, request: Any) -> Any:
        admit(request)
        return original(self, request)

    return preprocess_add_request
