"""How the rollout is cut over GPUs: the part of it that decides bits.

Tensor parallelism cuts the reduced dimension of every row-parallel product.
Each rank rounds its partial result to bf16 before the all-reduce adds them, so a
trainer that wants the same bits cuts at the same places and rounds there too.
Two bf16 numbers have one sum, whichever is added to which; three do not, and the
order that NCCL takes is not documented. Hence two ranks at most.

Where both sides add exactly, none of that matters (:class:`AnyTopology`).
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_RANKS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutTopology:
    """The rollout engine's tensor and expert parallelism.

    Attributes:
        tensor_parallel: Ranks that share each attention layer.
        expert_parallel: Whether those ranks hold whole experts (in contiguous
            blocks of expert ids) instead of slices of every expert.

    Raises:
        ValueError: More than two ranks.
    """

    tensor_parallel: int = 1
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.tensor_parallel <= MOST_RANKS:
            raise ValueError(
                f"tensor_parallel={self.tensor_parallel}: the trainer can match 1 to "
                f"{MOST_RANKS} ranks. With more, the sum depends on the order in which NCCL "
                "adds; use a profile whose bits do not depend on the tensor-parallel size"
            )

    @property
    def exact(self) -> bool:
        """Whether slices are added exactly."""
        return False

    @property
    def slices(self) -> int:
        """Slices of K in a row-parallel product."""
        return self.tensor_parallel

    @property
    def expert_slices(self) -> int:
        """Slices of every expert's intermediate width."""
        return 1 if self.expert_parallel else self.tensor_parallel

    @property
    def expert_blocks(self) -> int:
        """Blocks of expert ids that different ranks hold."""
        return self.tensor_parallel if self.expert_parallel else 1


@dataclass(frozen=True, kw_only=True, slots=True)
class AnyTopology:
    """A rollout that adds exactly: its bits do not depend on its topology.

    Attributes:
        slices: Slices of K in every layer that ranks may share. It decides bits, so
            both sides must have the same; a tensor-parallel size must divide it.
    """

    slices: int

    @property
    def exact(self) -> bool:
        """Whether slices are added exactly."""
        return True

    @property
    def expert_slices(self) -> int:
        """Slices of every expert's intermediate width."""
        return self.slices

    @property
    def expert_blocks(self) -> int:
        """Blocks of expert ids that are added apart: they need not be."""
        return 1
