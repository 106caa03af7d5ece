"""Semantics, numerics and staleness, told apart on data of which the truth is known.

Tokens are really drawn from distributions over a small vocabulary, and scored by the two
sides as engines and trainers do: the parts planted are the only ones.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

np = pytest.importorskip("numpy")

from patchkit.errors import ConfigurationError  # noqa: E402
from patchkit.parity.doctor.runs import Run, made, read_run  # noqa: E402
from patchkit.parity.doctor.separation import Separation, separate  # noqa: E402
from patchkit.parity.doctor.separation_page import render_separation  # noqa: E402

TOKENS, VOCABULARY = 6000, 64


def log_softmax(z: Any) -> Any:
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def drawn(
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    constant: float = 0.0,
    noise: float = 0.0,
    lags: tuple[int, ...] = (0,),
    drift: float = 0.0,
    entropy: bool = True,
    versions: bool = True,
    seed: int = 0,
) -> tuple[Run, Run]:
    """A rollout and its replay.

    Args:
        temperature: The rollout's; its log-probabilities are of it.
        top_p: The rollout's, with processed log-probabilities.
        constant: Added to the rollout's log-probabilities.
        noise: Spread of both sides' rounding, each.
        lags: Versions by which the policies that draw are older, by turns.
        drift: How far logits move with every version.
        entropy: Whether the runs carry entropies.
        versions: Whether they carry versions (steps otherwise).
        seed: Of everything.
    """
    rng = np.random.default_rng(seed)
    sharpness = rng.uniform(0.5, 3.0, (TOKENS, 1))
    logits = sharpness * rng.normal(size=(TOKENS, VOCABULARY))
    lag = np.resize(np.asarray(lags), TOKENS)
    trainer = log_softmax(logits)
    old = logits + drift * np.sqrt(lag)[:, None] * rng.normal(size=logits.shape)
    policy = log_softmax(old / temperature)
    if top_p < 1:
        order = np.argsort(-policy, -1)
        sorted_p = np.exp(np.take_along_axis(policy, order, -1))
        kept = (np.cumsum(sorted_p, -1) - sorted_p) < top_p
        mask = np.zeros_like(kept)
        np.put_along_axis(mask, order, kept, -1)
        policy = log_softmax(np.where(mask, policy, -1e30))
    token = (policy + rng.gumbel(size=policy.shape)).argmax(-1)
    at = np.arange(TOKENS), token

    def rounding() -> Any:
        return noise * rng.normal(size=TOKENS)

    common: dict[str, Any] = {
        "sequence": np.arange(TOKENS) // 50,
        "position": np.arange(TOKENS) % 50 + 7,
        "token": token,
    }
    if entropy:
        common["entropy"] = -(np.exp(trainer) * trainer).sum(-1)
    ours, theirs = dict(common), dict(common)
    if versions:
        ours["version"], theirs["version"] = 10 - lag, np.full(TOKENS, 10)
    elif len(lags) > 1:
        ours["step"] = theirs["step"] = lag
    rollout = np.minimum(policy[at] + constant + rounding(), 0)
    replay = np.minimum(trainer[at] + rounding(), 0)
    return made("rollout", {**ours, "logprob": rollout}), made(
        "trainer", {**theirs, "logprob": replay}
    )


def separated(**planted: Any) -> Separation:
    return separate(*drawn(**planted))


def test_equal_runs_are_equal() -> None:
    found = separated()
    assert found.equal and found.mismatches == 0 and found.advice == ()
    assert found.groups[0].ratio_mean == 1.0 and found.groups[0].k3 == 0.0


@pytest.mark.parametrize("noise", [1e-6, 1e-3, 3e-2])
def test_rounding_is_numerics(noise: float) -> None:
    found = separated(noise=noise)
    assert found.part("numerical").share > 0.97
    assert found.part("semantic").kind == "none"
    # Two sides that each round with this spread.
    assert found.part("numerical").size == pytest.approx(noise * math.sqrt(2), rel=0.05)
    assert found.part("stale").share == 0
    assert "numerics" in found.verdict and "patchkit doctor --stock" in found.advice[0]


@pytest.mark.parametrize("noise", [0.0, 1e-3, 8e-3])
@pytest.mark.parametrize("constant", [-0.05, -0.4])
def test_an_offset_for_every_token_is_a_constant(constant: float, noise: float) -> None:
    part = separated(constant=constant, noise=noise).part("semantic")
    assert (part.kind, part.share > 0.9) == ("constant", True)
    assert part.value == pytest.approx(-constant, rel=0.05)


@pytest.mark.parametrize("noise", [0.0, 1e-3])
@pytest.mark.parametrize("temperature", [0.7, 0.9, 1.1, 1.4])
def test_a_temperature_is_found_with_its_value(temperature: float, noise: float) -> None:
    part = separated(temperature=temperature, noise=noise).part("semantic")
    assert part.kind == "temperature"
    assert part.value == pytest.approx(temperature, rel=0.05)
    assert part.share > 0.6


def test_a_temperature_is_found_without_entropies_too() -> None:
    found = separated(temperature=0.8, entropy=False)
    part = found.part("semantic")
    # Contexts are sharper or flatter, and nothing stands for that: a rougher estimate.
    assert part.kind == "temperature"
    assert part.value == pytest.approx(0.8, rel=0.2)
    assert any("entropies were not given" in note for note in found.notes)


@pytest.mark.parametrize("noise", [0.0, 1e-4])
@pytest.mark.parametrize("top_p", [0.8, 0.95])
def test_processed_logprobs_are_told_by_their_one_sidedness(top_p: float, noise: float) -> None:
    part = separated(top_p=top_p, noise=noise).part("semantic")
    assert (part.kind, part.share > 0.95) == ("processed", True)
    # What top-p keeps is at least top_p, and at most one token more than that.
    assert top_p - 0.01 <= part.value <= 1


@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_what_grows_with_the_lag_is_staleness(noise: float) -> None:
    found = separated(lags=(0, 1, 2, 4), drift=0.05, noise=noise)
    stale = found.part("stale")
    assert stale.share > 0.9
    assert found.part("semantic").kind == "none"
    by_lag = [g for g in found.groups if g.lag is not None]
    assert [g.name for g in by_lag] == ["lag 0", "lag 1", "lag 2", "lag 4"]
    assert [g.k3 for g in by_lag] == sorted(g.k3 for g in by_lag)
    # A random step of each logit by drift * sqrt(lag) moves KL by about half its variance.
    assert stale.value == pytest.approx(0.05**2 / 2, rel=0.35)


def test_all_three_at_once() -> None:
    found = separated(temperature=0.9, noise=5e-3, lags=(0, 0, 3), drift=0.03)
    assert found.part("semantic").value == pytest.approx(0.9, rel=0.05)
    assert found.part("stale").share > 0.02
    assert found.part("numerical").share > 0.001
    assert sum(p.share for p in found.parts) == pytest.approx(1)
    lag0 = found.groups[1], found.corrected[1]
    assert lag0[1].k3 < 0.2 * lag0[0].k3, "the temperature taken out leaves little"
    assert found.advice[0].startswith("semantics")


def test_a_constant_and_lag_do_not_hide_each_other() -> None:
    found = separated(constant=-0.2, lags=(0, 2), drift=0.1)
    assert found.part("semantic").kind == "constant"
    assert found.part("semantic").value == pytest.approx(0.2, rel=0.05)
    corrected = {g.name: g for g in found.corrected}
    assert corrected["lag 0"].k3 < 1e-6 < corrected["lag 2"].k3


def test_a_wrong_staleness_is_not_made_up_by_sampling() -> None:
    for seed in range(5):
        assert separated(noise=1e-2, lags=(0, 1, 2, 3), seed=seed).part("stale").share == 0


def test_without_versions_growth_over_steps_stands_for_staleness() -> None:
    found = separated(lags=(0, 1, 2, 3), drift=0.1, versions=False)
    assert found.part("stale").kind == "steps" and found.part("stale").share > 0.9
    assert any("steps stands for staleness" in note for note in found.notes)
    nothing = separated(noise=1e-3, versions=False)
    assert "neither versions nor steps" in " ".join(nothing.notes)


def test_a_run_without_tokens_of_lag_zero_says_what_that_costs() -> None:
    found = separated(lags=(2, 4), drift=0.05)
    assert any("smallest lag is 2" in note for note in found.notes)
    assert [g.name for g in found.groups] == ["all", "lag 2", "lag 4"]


def test_the_clip_rate_counts_both_sides_of_the_region() -> None:
    base: dict[str, Any] = {"sequence": [0] * 4, "position": [0, 1, 2, 3]}
    rollout = made("a", {**base, "logprob": [-1.0] * 4})
    ratios = (1.19, 1.21, 0.81, 0.79)
    trainer = made("b", {**base, "logprob": [-1 + math.log(r) for r in ratios]})
    group = separate(rollout, trainer, clip=0.2).groups[0]
    assert group.clipped == 0.5
    assert group.ratio_mean == pytest.approx(1.0)
    assert group.k1 == pytest.approx(-sum(map(math.log, ratios)) / 4)
    assert group.k3 == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 4)


@pytest.mark.parametrize("form", ["jsonl", "lists", "npz"])
def test_runs_are_read_from_files(tmp_path: Path, form: str) -> None:
    run, _ = drawn(noise=1e-3)
    path = tmp_path / ("run.npz" if form == "npz" else "run.jsonl")
    if form == "npz":
        np.savez(path, **run.columns)
    elif form == "jsonl":
        keys = list(run.columns)
        rows = zip(*(run.columns[k].tolist() for k in keys), strict=True)
        path.write_text("".join(json.dumps(dict(zip(keys, r, strict=True))) + "\n" for r in rows))
    else:
        with path.open("w") as file:
            for sequence in np.unique(run.columns["sequence"]):
                here = run.columns["sequence"] == sequence
                line = {k: v[here].tolist() for k, v in run.columns.items() if k != "sequence"}
                file.write(json.dumps({"sequence": int(sequence), **line}) + "\n")
    found = read_run(path)
    assert set(found.columns) == set(run.columns)
    for name, values in run.columns.items():
        assert np.array_equal(found.columns[name], values), name


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"logprob": -1, "sequence": 0}', "lacks position"),
        ('{"logprob": 0.5, "sequence": 0, "position": 1}', "no log-probabilities"),
        ('{"logprob": NaN, "sequence": 0, "position": 1}', "no log-probabilities"),
        ("[1]", "line 1: expected a JSON object"),
        ("{", "cannot be read"),
        ("[" * 99999, "cannot be read"),
        ('{"logprob": -1, "sequence": null, "position": 1}', "no list of numbers"),
        ('{"logprob": [[-1]], "sequence": [[0]], "position": [[1]]}', "no plain fields"),
        ('{"logprob": [-1, -2], "sequence": 0, "position": [1]}', "position has 1 entries"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path: Path, content: str, named: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(content + "\n")
    with pytest.raises(ConfigurationError, match=named):
        read_run(path)


@pytest.mark.parametrize("content", ["", "PK broken"])
def test_damaged_arrays_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.npz"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_run(path)


def test_runs_of_other_tokens_are_refused() -> None:
    a, b = drawn()
    other = dict(b.columns)
    other["token"] = other["token"].copy()
    other["token"][3] += 1
    with pytest.raises(ConfigurationError, match=r"other tokens at sequence 0, position 10"):
        separate(a, made("b", other))
    elsewhere = {**b.columns, "sequence": b.columns["sequence"] + 1000}
    with pytest.raises(ConfigurationError, match=r"no \(sequence, position\) in common"):
        separate(a, made("b", elsewhere))
    with pytest.raises(ConfigurationError, match="occur twice"):
        separate(a, made("b", {**b.columns, "position": b.columns["position"] * 0}))
    newer = {**a.columns, "version": a.columns["version"] + 99}
    with pytest.raises(ConfigurationError, match="rollout first and the trainer second"):
        separate(made("a", newer), b)


def test_tokens_that_one_run_lacks_are_counted() -> None:
    a, b = drawn(noise=1e-3)
    fewer = made("b", {k: v[:-10] for k, v in b.columns.items()})
    found = separate(a, fewer)
    assert (found.tokens, found.unmatched) == (TOKENS - 10, 10)
    same = separate(a, made("b", {k: v[:-10] for k, v in a.columns.items()}))
    assert same.mismatches == 0
    assert not same.equal, "of the ten nothing is known"
    assert "10 that only one run has" in render_separation(same)


def test_the_page_stands_alone_and_says_what_was_found() -> None:
    found = separated(temperature=0.9, noise=1e-3, lags=(0, 1, 2), drift=0.05)
    page = render_separation(found)
    assert "http" not in page.replace("http-equiv", "") and "<link" not in page
    for text in ("temperature", "lag 2", found.verdict.split(";")[0], "<svg"):
        assert text in page


def run_cli(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "patchkit", "doctor", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
        env={**os.environ, **environment},
    )


def test_the_command_separates_two_files(tmp_path: Path) -> None:
    a, b = drawn(constant=-0.3)
    for name, run in (("a", a), ("b", b)):
        np.savez(tmp_path / f"{name}.npz", **run.columns)
    shown = run_cli("--compare", "a.npz", "b.npz", "-o", "page.html", cwd=tmp_path)
    assert shown.returncode == 1, shown.stderr
    assert "the same offset for every token" in shown.stdout and "lag 0" in shown.stdout
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    data = run_cli("--compare", "a.npz", "b.npz", "--json", cwd=tmp_path)
    assert json.loads(data.stdout)["parts"][0]["kind"] == "constant"
    same = run_cli("--compare", "a.npz", "a.npz", cwd=tmp_path)
    assert same.returncode == 0, same.stderr
    before = (tmp_path / "b.npz").read_bytes()
    over = run_cli("--compare", "a.npz", "b.npz", "-o", "b.npz", cwd=tmp_path)
    assert over.returncode == 2 and "one of the runs" in over.stderr
    assert (tmp_path / "b.npz").read_bytes() == before
    missing = run_cli("--compare", "a.npz", "c.npz", cwd=tmp_path)
    assert missing.returncode == 2 and "no such file" in missing.stderr


def test_nothing_is_cut_on_a_narrow_terminal_and_names_are_no_markup(tmp_path: Path) -> None:
    a, b = drawn(constant=-0.3)
    for name, run in (("a", a), ("b[red]", b)):
        np.savez(tmp_path / f"{name}.npz", **run.columns)
    shown = run_cli("--compare", "a.npz", "b[red].npz", cwd=tmp_path, FORCE_COLOR="1", COLUMNS="60")
    assert shown.returncode == 1, shown.stderr
    assert "b[red].npz" in shown.stdout
    assert "…" not in shown.stdout


def test_without_numpy_the_command_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('no numpy here')")
    run = subprocess.run(
        [sys.executable, "-m", "patchkit", "doctor", "--compare", "a.npz", "b.npz"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert run.returncode == 2 and "this needs numpy" in run.stderr, run.stderr
