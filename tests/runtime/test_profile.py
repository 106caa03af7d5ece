"""Profiles: nothing unknown, nothing by default, everything wrong at once, by line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from profiles import TOML, profile, text

from patchkit.errors import ConfigurationError
from patchkit.runtime.profile import ProfileError, load_profile, parse_profile
from patchkit.runtime.tomllines import find_line, key_lines


def line_of(fragment: str) -> int:
    return next(i for i, x in enumerate(TOML.splitlines(), 1) if x.startswith(fragment))


def test_a_good_one():
    p = profile()
    assert p.name == "toy_cpu"
    assert (
        p.where("engine.max_num_seqs") == f"toy.toml:{line_of('max_num_seqs')} engine.max_num_seqs"
    )
    assert p.engine_environment() == {
        "OMP_NUM_THREADS": "1",
        "VLLM_BATCH_INVARIANT": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    arguments = p.engine_arguments("/m")
    assert arguments["tensor_parallel_size"] == 2
    assert arguments["disable_cascade_attn"] is True
    assert "revision" not in arguments


def test_the_digest_is_that_of_the_content():
    spaced = parse_profile(TOML.replace(" = ", "   =   ") + "\n# a comment\n")
    assert spaced.digest == profile().digest
    assert profile(engine__max_num_seqs="9").digest != profile().digest


@pytest.mark.parametrize(
    ("change", "key", "problem"),
    [
        ({"engine__max_num_seqs": "0"}, "max_num_seqs", "not usable"),
        ({"engine__max_num_seqs": '"8"'}, "max_num_seqs", "not usable"),
        ({"engine__prefix_caching": "1"}, "prefix_caching", "not usable"),
        ({"engine__quantization": '"fp8"'}, "quantization", "not usable"),
        ({"engine__speculative_decoding": '"eagle"'}, "speculative_decoding", "not usable"),
        ({"engine__generation_config": '"auto"'}, "generation_config", "not usable"),
        ({"profile__claim": '"exact"'}, "claim", "not usable"),
        ({"model__revision": '"main"'}, "revision", "not usable"),
        ({"packages__vllm": '"latest"'}, "vllm", "not usable"),
        ({"packages__vllm": '""'}, "vllm", "not usable"),
        ({"precision__logprobs": '"bfloat16"'}, "logprobs =", "not usable"),
        ({"weights__receipts": '"maybe"'}, "receipts", "not usable"),
    ],
)
def test_each_unusable_value_by_line(change, key, problem):
    with pytest.raises(ProfileError) as e:
        profile(**change)
    (v,) = e.value.violations
    assert v.problem == problem
    found = int(v.subject.split(":")[1].split()[0])
    assert abs(found - line_of(key)) == 0 or key == "vllm"


def test_unknown_and_missing_keys_come_together():
    broken = TOML.replace("max_num_seqs", "max_num_seq").replace('caches = "reset"\n', "")
    broken += "[extras]\nx = 1\n"
    with pytest.raises(ProfileError) as e:
        parse_profile(broken, source="toy.toml")
    told = {(v.subject.split(" ")[1], v.problem) for v in e.value.violations}
    assert told == {
        ("engine.max_num_seq", "unknown key"),
        ("engine.max_num_seqs", "missing"),
        ("weights.caches", "missing"),
        ("extras", "unknown key"),
    }
    assert f"toy.toml:{line_of('max_num_seqs')}" in str(e.value)


@pytest.mark.parametrize("name", [k.partition(" ")[0] for k in TOML.splitlines() if "=" in k])
def test_no_key_but_those_of_the_reader_has_a_default(name):
    if name in ("OMP_NUM_THREADS", "torch", "transformers", "vllm"):
        pytest.skip("free tables; the contract asks for their content")
    without = "\n".join(x for x in TOML.splitlines() if x.partition(" ")[0] != name)
    with pytest.raises(ProfileError, match="missing"):
        parse_profile(without)


def test_variables_of_ours_are_not_the_profiles():
    with pytest.raises(ProfileError, match="PATCHKIT_ENABLE"):
        parse_profile(TOML + 'PATCHKIT_ENABLE = "1"\n')


def test_files(tmp_path):
    path = tmp_path / "p.toml"
    path.write_text(TOML)
    assert load_profile(path).source == str(path)
    path.write_text("[profile\n")
    with pytest.raises(ProfileError, match="no TOML"):
        load_profile(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigurationError, match="no UTF-8 text"):
        load_profile(path)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_profile(tmp_path / "never.toml")


@pytest.mark.parametrize("text", ["a = " + "[" * 99999, "a = " + "9" * 5000])
def test_a_text_that_the_parser_cannot_take(text):
    with pytest.raises(ProfileError, match="no TOML"):
        parse_profile(text)


def test_lines_of_keys():
    lines = key_lines('a = 1\n[t."x y"]\nb.c = 2\ns = """\nd = 3\n"""\n  e=4\n[[l]]\nf = 5\n')
    assert lines == {
        ("a",): 1,
        ("t", "x y"): 2,
        ("t", "x y", "b", "c"): 3,
        ("t", "x y", "s"): 4,
        ("t", "x y", "e"): 7,
        ("l",): 8,
        ("l", "f"): 9,
    }
    assert find_line(lines, ("t", "x y", "none")) == 2
    assert find_line(lines, ("none",)) is None


def test_text_helper_changes_what_it_names():
    assert "max_num_seqs = 9" in text(engine__max_num_seqs="9")
