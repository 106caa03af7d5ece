"""What the doctor found, as data: for the table, the JSON and the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from patchkit.parity.doctor.causes import Cause
from patchkit.parity.doctor.compare import Cell, Comparison
from patchkit.parity.doctor.layout import label

if TYPE_CHECKING:
    from patchkit.parity.doctor.recording import Recording
    from patchkit.parity.doctor.setup import DoctorSetup
    from patchkit.parity.workload import Rollout

__all__ = ["SCHEMA", "Diagnosis"]

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The result of one examination.

    Attributes:
        pair: "exact" or "stock".
        model: The checkpoint's folder.
        adapter: Its name, and the profile's; empty if none.
        packages: Versions of what ran.
        comparison: All operators.
        causes: Of the first difference, the likeliest first.
        covering: Patches of the adapter at the first difference, per side: symbol, reason
            and consequence.
        sequences: How many were sampled.
        tokens: Rows of both sides: of the engine's forwards, and of the trainer's.
        notes: What could not be recorded.
        bytes_held: Values held, per side.
        workers: Tensor-parallel workers of the engine, and FSDP ranks of the trainer.
    """

    pair: str
    model: str
    adapter: tuple[str, str]
    packages: dict[str, str]
    comparison: Comparison
    causes: list[Cause]
    covering: tuple[list[dict[str, str]], list[dict[str, str]]]
    sequences: int
    tokens: tuple[int, int]
    notes: list[str] = field(default_factory=list)
    bytes_held: tuple[int, int] = (0, 0)
    workers: tuple[int, int] = (1, 1)

    @classmethod
    def of(
        cls,
        setup: DoctorSetup,
        rollout: Recording,
        trainer: Recording,
        rollouts: Sequence[Rollout],
        comparison: Comparison,
        causes: list[Cause],
        covering: tuple[list[Any], list[Any]],
    ) -> Diagnosis:
        return cls(
            pair=setup.settings.pair,
            model=str(setup.model),
            adapter=(
                setup.adapter.name if setup.adapter else "",
                setup.profile.name if setup.profile else "",
            ),
            packages=_versions(),
            comparison=comparison,
            causes=causes,
            covering=([_patch(p) for p in covering[0]], [_patch(p) for p in covering[1]]),
            sequences=len(rollouts),
            tokens=(sum(rollout.step_tokens), sum(trainer.step_tokens)),
            notes=[f"{r.side}: {note}" for r in (rollout, trainer) for note in r.notes],
            bytes_held=(rollout.bytes_held, trainer.bytes_held),
            workers=(setup.settings.tensor_parallel_size, setup.settings.ranks),
        )

    @property
    def equal(self) -> bool:
        return self.comparison.equal

    @property
    def first(self) -> Cell | None:
        return self.comparison.first

    @property
    def verdict(self) -> str:
        """One sentence."""
        cells = self.comparison.cells
        compared = [c for c in cells if c.status != "not compared"]
        rows = sum(c.rows for c in compared)
        if self.first is None:
            if not compared:
                return "Nothing was compared: no operator was seen on both sides"
            left = len(cells) - len(compared)
            one_sided = f"; {left} seen on one side only" if left else ""
            return f"Equal: {len(compared)} operators, {rows:,} rows, every bit{one_sided}"
        different = sum(c.status == "differs" for c in cells)
        return (
            f"The {place(self.first)} is the first of {different} operators that differ (of "
            f"{len(compared)}): {self.first.differing:,} of {self.first.rows:,} rows"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        from patchkit.parity.doctor.recording import AFTER, BEFORE

        return {
            "schema": SCHEMA,
            "equal": self.equal,
            "verdict": self.verdict,
            "pair": self.pair,
            "model": self.model,
            "adapter": self.adapter[0],
            "profile": self.adapter[1],
            "packages": self.packages,
            "tensor_parallel_size": self.workers[0],
            "trainer_ranks": self.workers[1],
            "sequences": self.sequences,
            "tokens": {"rollout": self.tokens[0], "trainer": self.tokens[1]},
            "first": self.first.as_dict() if self.first else None,
            "causes": [c.as_dict() for c in self.causes],
            "covered_by": {"rollout": self.covering[0], "trainer": self.covering[1]},
            "origins": [
                {
                    "operator": o.key.op,
                    "layer": None if o.key.layer in (BEFORE, AFTER) else o.key.layer,
                    "label": label(o.key.op),
                    "rows": o.rows,
                }
                for o in self.comparison.origins
            ],
            "operators": [c.as_dict() for c in self.comparison.cells],
            "notes": self.notes,
            "digest_seconds": {
                "rollout": self.comparison.seconds[0],
                "trainer": self.comparison.seconds[1],
            },
            "bytes_held": {"rollout": self.bytes_held[0], "trainer": self.bytes_held[1]},
        }


def place(cell: Cell) -> str:
    """``post norm of layer 3``."""
    from patchkit.parity.doctor.recording import AFTER, BEFORE

    layer = cell.key.layer
    return cell.label if layer in (BEFORE, AFTER) else f"{cell.label} of layer {layer}"


def _patch(patch: Any) -> dict[str, str]:
    if isinstance(patch, str):
        return {"symbol": patch, "reason": "the adapter's log-probabilities", "consequence": ""}
    return {
        "symbol": patch.identity,
        "reason": patch.reason,
        "consequence": patch.consequence,
    }


def _versions() -> dict[str, str]:
    from patchkit.errors import PatchkitError
    from patchkit.symbols import installed_version

    found = {}
    for package in ("vllm", "torch", "transformers"):
        try:
            found[package] = installed_version(package)
        except PatchkitError:
            found[package] = "not installed"
    return found
