"""A guess at the cause, from what the two sides made of equal inputs.

For the first operator that differs everything before it is equal. So each hypothesis
("epsilon is 1e-5", "cosines are bf16", "the norm reads the unrounded sum") can be
computed from the recorded inputs, and asked how many rows of either side it explains. A
cause is named when one hypothesis explains one side and another one the other. Where no
hypothesis can be computed, the size and the distribution of the difference decide, and
the text says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from patchkit.parity.doctor.compare import Cell, Comparison, aligned, aligned_rows, ulp
from patchkit.parity.doctor.recording import HeldTensor, OperatorKey

__all__ = ["KINDS", "Cause", "guess"]

# Kinds of causes, and the sentence that begins an explanation.
KINDS = {
    "dtype": "one side rounds to a coarser dtype",
    "intermediate rounding": "one side rounds in between where the other does not",
    "epsilon": "the two sides add another epsilon",
    "unrounded residual": "one side's norm reads the residual sum before it is rounded",
    "residual rounding": "the residual sum is rounded in another way",
    "cos/sin precision": "cosines and sines have another precision",
    "tie": "experts with equal probabilities are chosen in another order",
    "choice": "other experts are chosen from equal router logits",
    "order of combination": "the experts' outputs are added in another order",
    "combination rounding": "the experts' outputs are rounded before they are added",
    "order of reduction": "the same sum is taken in another order, or rounded in between",
    "transposed weights": "one side holds the weight transposed",
    "stale weights": "one side holds the weight of an earlier policy version",
    "other weights": "the two sides hold other weights",
    "layout": "the same numbers stand in another order",
    "batch shape": "the engine's bits depend on how many tokens it computes together",
    "stale cache": "attention read other keys and values than this run computed",
    "temperature": "one side's log-probabilities are of logits divided by a temperature",
    "scale": "one side's values are the other's times a constant",
    "formula": "the two sides compute something else",
    "not measured": "no values were held, so only the place is known",
}

# What to do about each.
REMEDIES = {
    "dtype": "agree on the dtype of this operator's output and of what it computes in",
    "intermediate rounding": "agree on where this operator rounds, and keep the rest in float32",
    "epsilon": "give both sides the epsilon of the checkpoint's config.json",
    "unrounded residual": "let both norms read the rounded sum (or both the unrounded one)",
    "residual rounding": "round the residual sum once, to the nearest, on both sides",
    "cos/sin precision": "compute cosines and sines in float32 on both sides, and do not let a "
    "mixed-precision policy or a cache cast them",
    "tie": "break ties by the expert's index on both sides (a stable sort)",
    "choice": "compare scoring function, correction bias, groups and top-k of both routers",
    "order of combination": "add the experts' outputs in ascending expert id on both sides",
    "combination rounding": "add the experts' outputs in float32 and round once, on both sides",
    "order of reduction": "use one operator with a fixed order of sums on both sides",
    "transposed weights": "deliver weights through the engine's own reload, with receipts on",
    "stale weights": "deliver this weight again, and enforce receipts so that a missed one is "
    "noticed",
    "other weights": "compare checkpoint, version and receipts of both sides",
    "layout": "look at how this weight or output is packed, split and merged on each side",
    "batch shape": "use an operator whose result for a row depends on that row alone (the "
    "conformance suite tests operators for it)",
    "stale cache": "reset the prefix cache with every weight update, or salt it with the version",
    "temperature": "sample at temperature 1, or replay at the temperature that was sampled at",
    "scale": "look for a scale that one side applies and the other does not",
    "formula": "compare the settings of this operator on both sides",
    "not measured": "run again with --tensors for this operator",
}
# Where to look first when two operators compute something else.
_LOOK_AT = {
    "attention": "kv_cache_dtype, scale, mask, sliding window, soft cap, sinks",
    "logprob": "logprobs_mode, temperature, top-p, penalties",
    "lm_head": "soft cap, scale and dtype of the output layer",
    "embed_tokens": "an embedding scale",
    "experts": "activation, routed scaling factor, shared experts",
    "activation": "the activation function, and which half is the gate",
}

Fetch = Callable[[OperatorKey], "tuple[HeldTensor, HeldTensor] | None"]


Vector = Callable[[OperatorKey], "Tensor | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One explanation.

    Attributes:
        kind: A key of :data:`KINDS`.
        evidence: What speaks for it, in figures.
        look_at: Settings to compare first, where the kind alone does not say it.
        certain: Computed and found to explain the bits, or read off a digest; otherwise
            it is told from the size of the difference.
    """

    kind: str
    evidence: str
    certain: bool
    look_at: str = ""

    @property
    def remedy(self) -> str:
        """What to do."""
        return REMEDIES[self.kind] + (f": {self.look_at}" if self.look_at else "")

    def __str__(self) -> str:
        return f"{self.kind}: {KINDS[self.kind]} ({self.evidence})"

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "means": KINDS[self.kind],
            "evidence": self.evidence,
            "certain": self.certain,
            "remedy": self.remedy,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """The first difference, with its values and what was computed before it."""

    cell: Cell
    a: Tensor
    b: Tensor
    rows: np.ndarray
    wrong: Tensor
    comparison: Comparison
    config: Mapping[str, Any]
    fetch: Fetch
    vector: Vector
    cached: Mapping[int, int]

    def before(self, *ops: str) -> Tensor | None:
        """Trainer's values, at these rows, of an operator of the same layer."""
        for op in ops:
            values = self.values(OperatorKey(self.cell.key.layer, op))
            if values is not None:
                return values
        return None

    def values(self, key: OperatorKey) -> Tensor | None:
        held = self.fetch(key)
        if held is None:
            return None
        _, b = held
        index = {(int(s), int(p)): i for i, (s, p) in enumerate(b.rows)}
        found = [index.get((int(s), int(p))) for s, p in self.rows]
        if any(i is None for i in found):
            return None
        return b.values[torch.tensor(found)]


def guess(
    first: Cell,
    comparison: Comparison,
    *,
    config: Mapping[str, Any],
    fetch: Fetch,
    vector: Vector = lambda key: None,
    cached: Mapping[int, int] | None = None,
) -> list[Cause]:
    """Explanations of the first difference, the likeliest first; never none.

    Args:
        first: The first operator that differs.
        comparison: All operators.
        config: The model's ``config.json``.
        fetch: Values of an operator on both sides, where they were held.
        vector: The weight of a norm, which both sides share.
        cached: Tokens of each sequence that came from the engine's prefix cache.
    """
    found = list(_weights(first))
    if first.split:
        found.append(Cause(kind="batch shape", evidence=first.split, certain=True))
    held = fetch(first.key)
    if held is None:
        return found or [
            Cause(kind="not measured", evidence="hold them with --tensors", certain=False)
        ]
    a, b = aligned(*held)
    rows = aligned_rows(*held)
    if a.is_floating_point():
        a, b = a.float(), b.float()
    case = _Case(
        cell=first,
        a=a,
        b=b,
        rows=rows,
        wrong=(a != b).any(-1),
        comparison=comparison,
        config=config,
        fetch=fetch,
        vector=vector,
        cached=cached or {},
    )
    if not bool(case.wrong.any()):
        return found or [
            Cause(
                kind="not measured",
                evidence="the difference did not come back when the values were recorded",
                certain=False,
            )
        ]
    for rule in _rules(first.key.op):
        found += list(rule(case))
    if not any(c.certain for c in found):
        found = [*_by_size(case), *found] if _only_layout(found) else found
    return _ranked(found)


def _only_layout(causes: list[Cause]) -> bool:
    return all(c.kind == "layout" for c in causes)


def _rules(op: str) -> list[Callable[[_Case], Iterator[Cause]]]:
    name = op.rsplit(".", 1)[-1]
    if op.endswith("gate.ids"):
        return [_choice]
    if op.endswith("gate.weights"):
        return [_dtype, _scale]
    if ".rope." in f".{op}":
        return [_rotation, _dtype, _layout]
    if op.endswith(".in"):
        return [_residual, _dtype]
    if name.endswith("norm"):
        return [_norm, _dtype, _layout]
    if name == "attention":
        return [_cached, _dtype, _layout]
    if name in ("experts", "mlp", "feed_forward"):
        return [_combination, _dtype, _layout]
    if name == "logprob":
        return [_log_softmax, _dtype]
    return [_dtype, _layout, _scale]


def _ranked(causes: list[Cause]) -> list[Cause]:
    kinds = set()
    kept = []
    for cause in sorted(causes, key=lambda c: not c.certain):
        if cause.kind not in kinds:
            kinds.add(cause.kind)
            kept.append(cause)
    return kept


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,}"


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).float()


# -- read off digests ---------------------------------------------------------------------


def _weights(cell: Cell) -> Iterator[Cause]:
    for name, how in cell.weights.items():
        kind, certain = "other weights", True
        if how.startswith("the same numbers"):
            # An engine may pack a weight for its kernels; that alone changes no result.
            kind, certain = "layout", False
        elif how == "transposed":
            kind = "transposed weights"
        elif how.startswith("stale"):
            kind = "stale weights"
        yield Cause(kind=kind, evidence=f"{name}: {how}", certain=certain)


# -- told by values -----------------------------------------------------------------------


def _dtype(case: _Case) -> Iterator[Cause]:
    """One side's values are the other's, rounded; or bf16 numbers in a wider dtype."""
    a, b = case.a, case.b
    if not a.is_floating_point():
        return
    for name, values, other in (("rollout", a, b), ("trainer", b, a)):
        coarse = _bf16(values) == values
        if not bool(coarse.all()) or bool((_bf16(other) == other).all()):
            continue
        rounded = _bf16(other) == values
        evidence = f"every value of the {name} is a bf16 number, the other side's are not"
        if bool(rounded.all()):
            evidence = f"the {name}'s values are the other side's rounded to bf16, in every row"
        elif float(rounded.double().mean()) > 0.5:
            evidence += f"; {float(rounded.double().mean()):.0%} are its rounding"
        yield Cause(kind="dtype", evidence=evidence, certain=True)


def _layout(case: _Case) -> Iterator[Cause]:
    a, b = case.a[case.wrong], case.b[case.wrong]
    if torch.equal(a.sort(-1).values, b.sort(-1).values):
        yield Cause(
            kind="layout",
            evidence=f"{_share(len(a), len(a))} differing rows hold the same numbers in "
            "another order",
            certain=True,
        )


def _scale(case: _Case) -> Iterator[Cause]:
    a, b = case.a[case.wrong].double(), case.b[case.wrong].double()
    factor = float((a * b).sum() / (b * b).sum().clamp_min(1e-300))
    if abs(factor - 1) > 0.01 and bool(((a - factor * b).abs() <= 1e-2 * b.abs() + 1e-6).all()):
        yield Cause(
            kind="scale",
            evidence=f"the rollout's values are {factor:.4g} times the trainer's",
            certain=True,
        )


# -- hypotheses ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Explained:
    """How many of the elements that differ a hypothesis reproduces, of each side."""

    names: tuple[str, ...]
    a: int
    b: int


@dataclass(frozen=True, slots=True)
class _Verdict:
    """The hypothesis of each side, and how much it explains."""

    rollout: tuple[str, ...]
    trainer: tuple[str, ...]
    elements: int
    explained: tuple[int, int]

    def told(self, part: int) -> str:
        """``x explains 12 of 12 differing elements of the rollout, y 11 of 12 of …``"""
        a, b = self.explained
        return (
            f"{self.rollout[part]} explains {_share(a, self.elements)} differing elements of the "
            f"rollout, {self.trainer[part]} {_share(b, self.elements)} of the trainer's"
        )

    def differs(self, part: int) -> bool:
        return self.rollout[part] != self.trainer[part]


def _judge(
    case: _Case,
    hypotheses: Iterator[tuple[tuple[str, ...], Tensor]],
    preferred: frozenset[str] = frozenset(),
) -> _Verdict | None:
    """Find what explains each side; None where nothing explains nearly all of it.

    Asked of the differing elements alone: elsewhere the hypotheses may well agree. Of
    several that explain as much, the two that are most alike are taken, and of these
    the ones that a module's own settings name.
    """
    unequal = case.a != case.b
    a, b = case.a[unequal], case.b[unequal]
    found = []
    for names, values in hypotheses:
        v = values[unequal]
        found.append(_Explained(names, int((v == a).sum()), int((v == b).sum())))
    if not found or not len(a):
        return None
    # A sum taken in another order moves some elements, whatever the hypothesis.
    enough, slack = 0.9 * len(a), 0.02 * len(a)
    best_a, best_b = max(e.a for e in found), max(e.b for e in found)
    if best_a < enough or best_b < enough:
        return None
    pairs = [(x, y) for x in found if x.a >= best_a - slack for y in found if y.b >= best_b - slack]

    def unlike(pair: tuple[_Explained, _Explained]) -> tuple[int, int, int]:
        x, y = pair
        differences = sum(i != j for i, j in zip(x.names, y.names, strict=True))
        known = sum(name in preferred for name in (*x.names, *y.names))
        return differences, -known, -(x.a + y.b)

    x, y = min(pairs, key=unlike)
    return _Verdict(x.names, y.names, len(a), (x.a, y.b))


def _norm(case: _Case) -> Iterator[Cause]:
    """Epsilon, the sum that the norm reads, and its two roundings."""
    op, layer = case.cell.key.op, case.cell.key.layer
    source = case.before(f"{op}.in", *_products(op))
    if source is None:
        return
    weight = case.vector(case.cell.key)
    if weight is None:
        return
    heads = case.a.shape[-1] // weight.shape[-1]
    sources = {"the rounded sum": source.double()}
    addends = _addends(case, OperatorKey(layer, f"{op}.in"))
    if addends is not None:
        sources["the unrounded sum"] = addends[0].double() + addends[1].double()
    own: list[float] = [f["eps"] for f in case.cell.facts if isinstance(f.get("eps"), float)]
    epsilons = sorted({*own, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-12, 0.0})

    def hypotheses() -> Iterator[tuple[tuple[str, ...], Tensor]]:
        for where, x in sources.items():
            split = x.view(len(x), heads, -1)
            mean = split.square().mean(-1, keepdim=True)
            for eps in epsilons:
                normal = (split * torch.rsqrt(mean + eps)).float()
                twice = _bf16(_bf16(normal) * weight)
                once = _bf16(normal * weight)
                yield (where, f"{eps:g}", "two roundings"), twice.reshape(len(x), -1)
                yield (where, f"{eps:g}", "one rounding"), once.reshape(len(x), -1)

    verdict = _judge(case, hypotheses(), frozenset(f"{eps:g}" for eps in own))
    if verdict is None:
        return
    if verdict.differs(1):
        yield Cause(kind="epsilon", evidence=verdict.told(1), certain=True)
    if verdict.differs(0):
        yield Cause(kind="unrounded residual", evidence=verdict.told(0), certain=True)
    if verdict.differs(2):
        yield Cause(kind="intermediate rounding", evidence=verdict.told(2), certain=True)


def _products(op: str) -> tuple[str, ...]:
    parent, _, name = op.rpartition(".")
    dot = f"{parent}." if parent else ""
    return (f"{dot}{name.removesuffix('_norm')}_proj",) if name.endswith("_norm") else ()


def _addends(case: _Case, key: OperatorKey) -> tuple[Tensor, Tensor] | None:
    """The residual before, and what the block between added to it.

    Accepted only if their rounded sum is what one of the sides has: a model that puts
    a norm between them is not this case.
    """
    cells = case.comparison.cells
    place = next((i for i, c in enumerate(cells) if c.key == key), None)
    if place is None:
        return None
    width = cells[place].shapes[1]
    residuals = [c for c in cells[:place] if c.key.op.endswith(".in") and c.shapes[1] == width]
    blocks = [
        c for c in cells[:place] if c.shapes[1] == width and not c.key.op.endswith((".in", "norm"))
    ]
    if not residuals or not blocks:
        return None
    residual, block = case.values(residuals[-1].key), case.values(blocks[-1].key)
    both = case.values(key)
    if residual is None or block is None or both is None:
        return None
    summed = _bf16(residual + block)
    agrees = ((summed == both).double().mean(-1) > 0.98).double().mean()
    return (residual, block) if float(agrees) > 0.9 else None


def _residual(case: _Case) -> Iterator[Cause]:
    """How the residual sum was rounded."""
    addends = _addends(case, case.cell.key)
    if addends is None:
        return
    total = addends[0].double() + addends[1].double()
    exact = total.float()
    truncated = (exact.view(torch.int32) & -65536).view(torch.float32)

    def hypotheses() -> Iterator[tuple[tuple[str, ...], Tensor]]:
        yield ("the sum rounded to the nearest bf16 number",), _bf16(exact)
        yield ("the sum cut off after the bits of bf16",), truncated
        yield ("the sum kept in float32",), exact

    verdict = _judge(case, hypotheses())
    if verdict is not None and verdict.differs(0):
        yield Cause(kind="residual rounding", evidence=verdict.told(0), certain=True)
        return
    yield Cause(
        kind="residual rounding",
        evidence="equal addends, and sums that differ in "
        f"{_share(int(case.wrong.sum()), len(case.wrong))} rows",
        certain=False,
    )


def _rotation(case: _Case) -> Iterator[Cause]:
    """Precision of cosines and sines, for rotations over the whole head in two halves."""
    op = case.cell.key.op
    parent, which = op.split(".rope.")
    x = case.before(f"{parent}.{which}_norm", f"{parent}.{which}_proj")
    rope = case.config.get("rope_parameters") or case.config.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or case.config.get("rope_theta")
    heads = case.config.get("num_attention_heads", 0)
    size = case.config.get("head_dim") or case.config.get("hidden_size", 0) // max(1, heads)
    part = rope.get("partial_rotary_factor") or case.config.get("partial_rotary_factor") or 1.0
    start = torch.from_numpy(case.rows[:, 1] == 0)
    at_zero = bool((start & case.wrong).any())
    if x is not None and theta and size and x.shape[-1] % size == 0:
        tables = _rotations(x, case.rows[:, 1], float(theta), int(size), int(size * part))
        verdict = _judge(case, tables)
        if verdict is not None and verdict.differs(0):
            more = "" if at_zero else "; at position 0, where they are exact, nothing differs"
            yield Cause(kind="cos/sin precision", evidence=verdict.told(0) + more, certain=True)
            return
        if verdict is not None and verdict.differs(1):
            yield Cause(kind="intermediate rounding", evidence=verdict.told(1), certain=True)
            return
    if not at_zero and bool(start.any()):
        yield Cause(
            kind="cos/sin precision",
            evidence="nothing differs at position 0, where cosines and sines are exact; it may "
            "also be where the products are rounded",
            certain=False,
        )


def _rotations(
    x: Tensor, positions: np.ndarray, theta: float, size: int, rotated: int
) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    exponent = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    angle = torch.from_numpy(positions).float()[:, None] * (1.0 / theta**exponent)[None]
    heads, half = x.view(len(x), -1, size), rotated // 2
    first, second, rest = heads[..., :half], heads[..., half:rotated], heads[..., rotated:]
    for name, round_table in (("a float32 table", lambda t: t), ("a bf16 table", _bf16)):
        cos, sin = round_table(angle.cos())[:, None], round_table(angle.sin())[:, None]
        for how, inner in (
            ("one rounding", lambda t: t),
            ("every product rounded to bf16", _bf16),
        ):
            turned = torch.cat(
                [
                    inner(first * cos) - inner(second * sin),
                    inner(second * cos) + inner(first * sin),
                    rest,
                ],
                -1,
            )
            yield (name, how), _bf16(turned).reshape(len(x), -1)


def _choice(case: _Case) -> Iterator[Cause]:
    """Whether the experts exchanged are equally probable."""
    layer, op = case.cell.key.layer, case.cell.key.op.removesuffix(".ids")
    logits = case.values(OperatorKey(layer, op))
    count = int(case.wrong.sum())
    if logits is None:
        yield Cause(
            kind="choice",
            evidence=f"{_share(count, len(case.wrong))} rows; the router's logits were not held",
            certain=False,
        )
        return
    exact = near = 0
    widest = 0.0
    for row in case.wrong.nonzero()[:, 0].tolist():
        ours, theirs = set(case.a[row].tolist()), set(case.b[row].tolist())
        mine = logits[row, sorted(ours - theirs)].sort().values
        other = logits[row, sorted(theirs - ours)].sort().values
        if len(mine) != len(other) or not len(mine):
            continue
        gap = float((mine.double() - other.double()).abs().max())
        widest = max(widest, gap)
        exact += gap == 0
        near += 0 < gap <= 4 * float(ulp(other, "float32").max())
    if exact + near >= 0.9 * count:
        text = f"in {_share(exact, count)} rows the exchanged experts' logits are equal to the bit"
        if near:
            text += f", in {near:,} within 4 units of the last place"
        yield Cause(kind="tie", evidence=text, certain=exact >= 0.9 * count)
        return
    yield Cause(
        kind="choice",
        evidence=f"{_share(count, len(case.wrong))} rows choose experts whose logits differ by "
        f"up to {widest:.3g}: another score, bias, group or mask decides",
        certain=False,
    )


# A few float32 terms added in another order differ in their last bit, which moves one
# bf16 number in some tens of thousands; what is rounded to bf16 before moves many.
_REORDERED = 0.03


def _combination(case: _Case) -> Iterator[Cause]:
    """Sums over experts: only the order of few terms, so few elements move, by one step."""
    if any(not how.startswith("the same numbers") for how in case.cell.weights.values()):
        return
    a, b = case.a[case.wrong], case.b[case.wrong]
    unequal = a != b
    steps = (a.double() - b.double()).abs() / ulp(b, case.cell.dtypes[1])
    elements = float(unequal.double().mean())
    largest = float(steps[unequal].max())
    if largest > 4:
        return
    kind = "order of combination"
    if elements > _REORDERED:
        kind = "combination rounding"
    text = (
        f"{elements:.2%} of the elements of differing rows moved, by at most {largest:.2g} units "
        "of the last place; routing, inputs and weights are equal"
    )
    yield Cause(kind=kind, evidence=text, certain=False)


def _cached(case: _Case) -> Iterator[Cause]:
    """Only sequences that began with cached keys and values differ."""
    wrong = case.wrong.numpy()
    differing = {int(s) for s in case.rows[wrong, 0]}
    compared = {int(s) for s in case.rows[:, 0]}
    hit = {s for s, tokens in case.cached.items() if tokens}
    fresh = compared - hit
    if differing and differing <= hit and (fresh or len(differing) > 1):
        tokens = sum(case.cached[s] for s in differing)
        yield Cause(
            kind="stale cache",
            evidence=f"only sequences whose first tokens came from the prefix cache differ "
            f"({len(differing)} of {len(hit)}; {tokens:,} cached tokens), none of the "
            f"{len(fresh)} others",
            certain=bool(fresh),
        )


def _log_softmax(case: _Case) -> Iterator[Cause]:
    """From equal logits: computed in bf16, or of another distribution."""
    yield from _dtype(case)
    yield from _tempered(case)
    difference = (case.a - case.b).double()[case.wrong]
    if float(difference.abs().max()) > 5e-2:
        one_sided = bool((difference > 0).all() or (difference < 0).all())
        yield Cause(
            kind="formula",
            evidence="equal logits, and log-probabilities that differ by up to "
            f"{float(difference.abs().max()):.3g}"
            + (", always in one direction: raw against processed" if one_sided else ""),
            certain=False,
            look_at=_LOOK_AT["logprob"],
        )


_ROWS_TRIED = 64


def _tempered(case: _Case) -> Iterator[Cause]:
    """Whether one temperature turns the trainer's log-probabilities into the rollout's."""
    logits = case.values(OperatorKey(case.cell.key.layer, "lm_head"))
    if logits is None:
        return
    rows = case.wrong.nonzero()[:_ROWS_TRIED, 0]
    z, a, b = logits[rows].double(), case.a[rows].double(), case.b[rows].double()
    token = (z.log_softmax(-1) - b).abs().argmin(-1, keepdim=True)

    def error(temperature: float) -> float:
        found = (z / temperature).log_softmax(-1).gather(-1, token)
        return float((found - a).abs().mean())

    best = min((0.2 + 0.01 * i for i in range(281)), key=error)
    for step in (1e-3, 1e-4, 1e-5):
        best = min((best + step * i for i in range(-10, 11)), key=error)
    if abs(best - 1) > 1e-3 and error(best) < 1e-4 < 0.01 * error(1.0) + 1e-4:
        yield Cause(
            kind="temperature",
            evidence=f"log-softmax of the logits divided by {best:.4g} gives the rollout's values "
            f"to {error(best):.1e} on average, where {error(1.0):.2g} separated them",
            certain=True,
        )


def _by_size(case: _Case) -> Iterator[Cause]:
    """Nothing computed explains it: tell from how large the difference is."""
    if not case.a.is_floating_point():
        yield Cause(kind="choice", evidence="integers differ", certain=False)
        return
    a, b = case.a[case.wrong].double(), case.b[case.wrong].double()
    unequal = a != b
    coarse = "bfloat16" if "bfloat16" in case.cell.dtypes else case.cell.dtypes[1]
    steps = (a - b).abs() / ulp(b.float(), coarse)
    largest = float(steps[unequal].max())
    elements = float(unequal.double().mean())
    told = (
        f"{elements:.1%} of the elements of differing rows, by at most {largest:.2g} units of "
        f"the last place of {coarse} at the row's size"
    )
    if largest <= 8:
        yield Cause(kind="order of reduction", evidence=told, certain=False)
    else:
        look_at = _LOOK_AT.get(case.cell.key.op.rsplit(".", 1)[-1], "")
        yield Cause(kind="formula", evidence=told, certain=False, look_at=look_at)
