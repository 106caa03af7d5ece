"""What the rollout engine makes of an output."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from patchkit.parity.rollout_engine import RolloutEngine
from patchkit.runtime.versions import TrajectoryRefusedError


def engine(**labels) -> RolloutEngine:
    made = RolloutEngine.__new__(RolloutEngine)
    made.llm, made.sync = SimpleNamespace(**labels), SimpleNamespace(version=3)
    return made


def output(**labels):
    completion = SimpleNamespace(token_ids=[5], logprobs=[{5: SimpleNamespace(logprob=-1.0)}])
    vars(completion).update(labels)
    return SimpleNamespace(outputs=[completion], num_cached_tokens=0)


def test_an_engine_that_labels_has_to_say_which_weights_drew_a_token():
    """A label under another name must not look like a version without labels."""
    labels = engine(update_weight_version=print)
    span = SimpleNamespace(version="2", start=0, end=1)
    assert labels._rollout(0, [1], output(weight_versions=[span]), 3).start_version == 2
    for unlabelled in (output(), output(weight_versions=None), output(versions=[span])):
        with pytest.raises(TrajectoryRefusedError, match="does not say which weights"):
            labels._rollout(0, [1], unlabelled, 3)
    assert engine()._rollout(0, [1], output(), 3).start_version == 3, "the driver knows"
