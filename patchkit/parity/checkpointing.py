"""Activation checkpointing recomputes in the state of its forward.

A checkpointed block runs twice: in the forward, and again during backward, which
usually stands outside ``exact_context()`` and may run in a thread of autograd's
own. Without help, the recompute would take the stock path: non-reentrant
checkpointing raises a CheckpointError where shapes differ, and the reentrant one
silently computes the gradient of another function. Both are bound here to the
state that the thread had when the forward ran, exact or stock.

The declarations of :data:`CHECKPOINT_PATCHES` go into the trainer side of every
adapter. They act outside ``exact_context()`` as well (``always``): a forward on
the stock path must be recomputed on the stock path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patchkit.engine import Patch, State, trainer_switch

_HERE = "patchkit.parity.checkpointing:"
_VERSIONS = ">=2.11,<2.15"


def _non_reentrant(function: str, factory: str, versions: str) -> Patch:
    return Patch(
        symbol=f"torch.utils.checkpoint:{function}",
        action="wrap",
        replacement=_HERE + factory,
        versions=versions,
        reason="the recompute of non-reentrant checkpointing runs in the forward's state",
        consequence="backward outside exact_context() recomputes with stock operators: "
        "CheckpointError, or the gradient of another function",
        until="torch restores context variables in the recompute",
        required=False,
        always=True,
    )


CHECKPOINT_PATCHES = (
    # From 2.14 on the generator of this name only passes its arguments on.
    _non_reentrant("_checkpoint_without_reentrant_generator", "bind_non_reentrant", ">=2.11,<2.14"),
    _non_reentrant(
        "_checkpoint_without_reentrant_generator_impl", "bind_non_reentrant_impl", ">=2.14,<2.15"
    ),
    Patch(
        symbol="torch.utils.checkpoint:CheckpointFunction.forward",
        action="wrap",
        replacement=_HERE + "bind_reentrant",
        versions=_VERSIONS,
        reason="the recompute of reentrant checkpointing runs in the forward's state",
        consequence="backward outside exact_context() silently computes the gradient of the "
        "stock function",
        until="torch restores context variables in the recompute",
        required=False,
        always=True,
    ),
)


def forward_state() -> State:
    """The state to recompute in: this thread's, where unset means stock."""
    switch = trainer_switch()
    state = switch.capture()
    return switch.stock() if state.exact is None else state


def _in_state(function: Callable[..., Any], state: State) -> Callable[..., Any]:
    def recompute(*args: Any, **kwargs: Any) -> Any:
        with state:
            return function(*args, **kwargs)

    return recompute


def bind_non_reentrant(original: Any) -> Any:
    """Factory for ``_checkpoint_without_reentrant_generator``, a generator function.

    torch runs the forward itself and calls ``fn`` only to recompute.
    """
    from torch.utils.checkpoint import _DEFAULT_DETERMINISM_MODE, noop_context_fn

    def _checkpoint_without_reentrant_generator(  # type: ignore[no-untyped-def]
        fn,
        preserve_rng_state=True,
        context_fn=noop_context_fn,
        determinism_check=_DEFAULT_DETERMINISM_MODE,
        debug=False,
        early_stop=True,
        *args,
        **kwargs,
    ):
        bound = _in_state(fn, forward_state())
        yield from original(
            bound,
            preserve_rng_state,
            context_fn,
            determinism_check,
            debug,
            early_stop,
            *args,
            **kwargs,
        )

    return _checkpoint_without_reentrant_generator


def bind_non_reentrant_impl(original: Any) -> Any:
    """Factory for ``_checkpoint_without_reentrant_generator_impl`` of torch 2.14 and later."""
    from torch.utils.checkpoint import _DEFAULT_DETERMINISM_MODE, noop_context_fn

    def _checkpoint_without_reentrant_generator_impl(  # type: ignore[no-untyped-def]
        fn,
        args,
        kwargs,
        *,
        preserve_rng_state=True,
        context_fn=noop_context_fn,
        determinism_check=_DEFAULT_DETERMINISM_MODE,
        debug=False,
        early_stop=True,
        respect_saved_tensors_hooks=None,
    ):
        yield from original(
            _in_state(fn, forward_state()),
            args,
            kwargs,
            preserve_rng_state=preserve_rng_state,
            context_fn=context_fn,
            determinism_check=determinism_check,
            debug=debug,
            early_stop=early_stop,
            respect_saved_tensors_hooks=respect_saved_tensors_hooks,
        )

    return _checkpoint_without_reentrant_generator_impl


def bind_reentrant(original: Any) -> Any:
    """Factory for ``CheckpointFunction.forward``, a static method.

    ``run_function`` runs once here and once in ``backward``, both times in the
    state that holds now.
    """

    def forward(ctx, run_function, preserve_rng_state, *args):  # type: ignore[no-untyped-def]
        return original(ctx, _in_state(run_function, forward_state()), preserve_rng_state, *args)

    return forward
