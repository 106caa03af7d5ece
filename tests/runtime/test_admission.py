"""Every field of a request, and every value that the claim excludes."""

from __future__ import annotations

import pickle
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from patchkit.errors import ConfigurationError
from patchkit.runtime import admission
from patchkit.runtime.admission import POLICIES, RequestGate, RequestRefusedError
from patchkit.runtime.sampling_fields import FIELDS, STRUCTURES, read_fields

VERSION = "0.32.0"
GOOD = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "stop": [],
    "bad_words": [],
    "min_tokens": 0,
    "max_tokens": 16,
    "logprobs": 0,
    "watermarking": False,
    "_watermarking_skipped": False,
}


def struct(structure: str, values: dict, *, extra: tuple[str, ...] = (), lost: str = ""):
    fields = tuple(f for f in FIELDS[VERSION][structure] if f != lost) + extra
    made = type(structure, (), {"__struct_fields__": fields, "__slots__": (*fields, "__dict__")})()
    for field in fields:
        setattr(made, field, values.get(field))
    return made


def params(**changes):
    return struct("SamplingParams", {**GOOD, **changes})


def request(sampling=None, **changes):
    base = {
        "request_id": "r1",
        "prompt_token_ids": [1, 2],
        "sampling_params": params() if sampling is None else sampling,
        "resumable": False,
        "abort_immediately": False,
    }
    return struct("EngineCoreRequest", {**base, **changes})


def test_what_is_covered_passes():
    gate = RequestGate(VERSION)
    gate.admit(request())
    for changes in (
        {"n": 4},
        {"top_k": -1},
        {"seed": 3},
        {"stop": ["\n"], "stop_token_ids": [2], "ignore_eos": True},
        {"max_tokens": None},
        {"logprobs": -1, "prompt_logprobs": 0},
        {"logit_bias": {}},
    ):
        gate.admit(request(params(**changes)))


EXCLUDED = [
    ("temperature", 0.99),
    ("temperature", 0.0),
    ("temperature", True),
    ("temperature", float("nan")),
    ("top_p", 0.999),
    ("top_k", 50),
    ("min_p", 0.01),
    ("presence_penalty", 0.1),
    ("frequency_penalty", -0.1),
    ("repetition_penalty", 1.1),
    ("logit_bias", {3: 1.0}),
    ("bad_words", ["x"]),
    ("_bad_words_token_ids", [[3]]),
    ("allowed_token_ids", [1]),
    ("allowed_token_ids", []),
    ("min_tokens", 1),
    ("structured_outputs", object()),
    ("extra_args", {"a": 1}),
    ("thinking_token_budget", 10),
    ("repetition_detection", object()),
    ("trace_decode_token_ids", [1]),
    ("watermarking", True),
    ("_watermarking_skipped", True),
    ("logprob_token_ids", [1]),
    ("prompt_logprob_token_ids", [[1]]),
    ("prompt_logprob_start", 0),
    ("n", 0),
    ("max_tokens", 0),
    ("logprobs", "all"),
    ("seed", "x"),
]


@pytest.mark.parametrize(("field", "value"), EXCLUDED, ids=lambda v: str(v)[:20])
def test_each_exclusion_raises_and_names_field_and_value(field, value):
    with pytest.raises(RequestRefusedError) as e:
        RequestGate(VERSION).admit(request(params(**{field: value})))
    (violation,) = e.value.violations
    assert violation.subject == f"SamplingParams.{field}"
    assert violation.found == repr(value)[:200]
    assert isinstance(e.value, ValueError), "the server answers it with a client error"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lora_request", object()),
        ("prompt_embeds", object()),
        ("prompt_token_ids", None),
        ("prompt_token_ids", []),
        ("mm_features", [object()]),
        ("pooling_params", object()),
        ("kv_hints", object()),
        ("resumable", True),
        ("prompt_is_token_ids", [True]),
    ],
)
def test_each_exclusion_of_the_request_raises(field, value):
    with pytest.raises(RequestRefusedError, match=f"EngineCoreRequest.{field}"):
        RequestGate(VERSION).admit(request(**{field: value}))


def test_a_request_without_sampling_parameters_is_refused():
    made = request()
    made.sampling_params = None
    with pytest.raises(RequestRefusedError, match="sampling_params"):
        RequestGate(VERSION).admit(made)


def test_all_violations_come_together():
    wrong = request(params(temperature=0.5, top_p=0.9, top_k=5), lora_request=object())
    with pytest.raises(RequestRefusedError) as e:
        RequestGate(VERSION).admit(wrong)
    assert len(e.value.violations) == 4


def test_every_field_without_a_free_rule_is_excluded_by_some_test():
    tested = {f for f, _ in EXCLUDED}
    free = {
        name
        for name, rule in POLICIES["on_policy"].sampling.items()
        if rule.allowed.startswith("anything")
    }
    assert set(FIELDS[VERSION]["SamplingParams"]) - free - tested == {"prompt_logprobs"}


def test_an_unknown_field_is_refused_whatever_its_value():
    new = struct("SamplingParams", GOOD, extra=("brand_new",))
    with pytest.raises(RequestRefusedError, match=r"SamplingParams\.brand_new"):
        RequestGate(VERSION).admit(request(new))
    attribute = params()
    attribute.smuggled = None
    with pytest.raises(RequestRefusedError, match=r"SamplingParams\.smuggled"):
        RequestGate(VERSION).admit(request(attribute))


def test_a_gate_for_another_set_of_fields_is_not_built():
    have = FIELDS[VERSION]["SamplingParams"]
    with pytest.raises(RequestRefusedError) as e:
        RequestGate(VERSION, live={"SamplingParams": (*have[1:], "brand_new")})
    assert [v.subject for v in e.value.violations] == [
        "SamplingParams.brand_new",
        "SamplingParams.n",
    ]


def test_a_field_nobody_decided_about(monkeypatch):
    fields = {**FIELDS[VERSION], "SamplingParams": (*FIELDS[VERSION]["SamplingParams"], "later")}
    monkeypatch.setitem(FIELDS, "9.9.9", fields)
    with pytest.raises(RequestRefusedError, match=r"SamplingParams\.later: nobody has decided"):
        RequestGate("9.9.9")


@pytest.mark.parametrize("args", [("0.1.0",), (VERSION, "on-policy")])
def test_unusable_gates(args):
    with pytest.raises(ConfigurationError, match="request gate"):
        RequestGate(args[0], policy=args[1] if len(args) > 1 else "on_policy")


def test_local_version_labels_do_not_matter():
    assert RequestGate(f"{VERSION}+cpu").version == VERSION


def test_greedy_is_a_smoke_policy_and_never_on_policy():
    gate = RequestGate(VERSION, policy="greedy_smoke")
    gate.admit(request(params(temperature=0.0)))
    assert not gate.policy.on_policy
    with pytest.raises(RequestRefusedError):
        gate.admit(request())


def test_the_gate_of_a_process_follows_its_contract(monkeypatch):
    """One engine after another in one process, each under a policy of its own."""
    built = lru_cache(lambda policy: RequestGate(VERSION, policy=policy))
    monkeypatch.setattr(admission, "_installed_gate", built)
    monkeypatch.setenv("PATCHKIT_SAMPLING", "greedy_smoke")
    admission.admit(request(params(temperature=0.0)))
    monkeypatch.setenv("PATCHKIT_SAMPLING", "on_policy")
    with pytest.raises(RequestRefusedError, match="temperature"):
        admission.admit(request(params(temperature=0.0)))
    assert admission.process_gate() is admission.process_gate(), "built once"


def test_both_guards_refuse_before_the_original_runs(monkeypatch):
    monkeypatch.setattr(admission, "process_gate", lambda: RequestGate(VERSION))
    monkeypatch.setattr(admission, "_client_error", lambda: RequestRefusedError)
    calls = []
    front = admission.guard_front_end(lambda r: calls.append("front"))
    core = admission.guard_engine_core(lambda self, r: calls.append("core"))
    bad = request(params(top_k=5))
    for guarded in (lambda r: front(r), lambda r: core(SimpleNamespace(), r)):
        guarded(request())
        with pytest.raises(RequestRefusedError):
            guarded(bad)
    assert calls == ["front", "core"]


@pytest.mark.parametrize("version", sorted(FIELDS))
def test_every_known_version_has_a_gate(version):
    gate = RequestGate(version)
    assert gate.fields == FIELDS[version]
    assert len(gate.fields["SamplingParams"]) >= 37


def test_reading_fields_from_source():
    source = (
        "class A:\n    x: int = 1\n    K: ClassVar[int] = 2\n    def f(self): y: int = 3\n    y = 1"
    )
    assert read_fields(source, "A") == ("x",)
    with pytest.raises(LookupError, match="no class B"):
        read_fields(source, "B")


@pytest.mark.stack
def test_the_front_end_raises_vllms_own_kind_of_client_error(monkeypatch):
    pytest.importorskip("vllm")
    from vllm.exceptions import VLLMClientError

    monkeypatch.setattr(admission, "process_gate", lambda: RequestGate(VERSION))
    with pytest.raises(RequestRefusedError) as e:
        admission.guard_front_end(lambda r: None)(request(params(top_k=5)))
    assert isinstance(e.value, VLLMClientError)
    assert "SamplingParams.top_k" in str(e.value)
    again = pickle.loads(pickle.dumps(e.value))
    assert type(again) is RequestRefusedError
    assert str(again) == str(e.value)


@pytest.mark.stack
def test_the_list_is_the_installed_source_and_class():
    vllm = pytest.importorskip("vllm")
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    gate = RequestGate.for_installed()
    folder = Path(vllm.__file__).parent
    for name, file in STRUCTURES.items():
        assert gate.fields[name] == read_fields((folder / file).read_text(), name)
    real = EngineCoreRequest(
        "r", [1, 2], None, SamplingParams(temperature=1.0, logprobs=0), None, 0.0, None, None, None
    )
    gate.admit(real)
    assert real.sampling_params.sampling_type is not None
    gate.admit(real)
    real.sampling_params.top_p = 0.5
    with pytest.raises(RequestRefusedError, match="top_p"):
        gate.admit(real)


@pytest.mark.stack
def test_a_draw_that_was_decided_before_the_fields_changed():
    """In one process nothing is copied on the way to the core: the engine would draw greedily."""
    pytest.importorskip("vllm")
    from vllm.sampling_params import SamplingParams

    used = SamplingParams(temperature=0.0)
    assert used.sampling_type.name == "GREEDY"
    used.temperature = 1.0
    gate = RequestGate.for_installed()
    (found,) = gate.check_sampling(used)
    assert found.subject == "SamplingParams.sampling_type"
    assert "GREEDY" in found.found
    assert gate.check_sampling(used.clone()) == []
