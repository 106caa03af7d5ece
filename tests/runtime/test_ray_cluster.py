"""A cluster's environment is judged variable by variable, node by node."""

from __future__ import annotations

import pytest

from patchkit.runtime.environment import Environment
from patchkit.runtime.ray_cluster import Node, cluster_violations

CONTRACT = Environment(
    {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PATCHKIT_ENABLE": "1", "RUN": "/here"},
    private=frozenset({"RUN"}),
)
RIGHT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "RUN": "/elsewhere", "HOME": "/root"}


def test_a_cluster_of_the_same_environment_passes_without_the_runs_own_variables() -> None:
    assert cluster_violations(CONTRACT, [Node(host="a", environment=RIGHT)]) == []


@pytest.mark.parametrize(
    ("change", "named", "found"),
    [
        ({"OMP_NUM_THREADS": "8"}, "OMP_NUM_THREADS", "8"),
        ({"TORCHDYNAMO_DISABLE": None}, "TORCHDYNAMO_DISABLE", "not set"),
    ],
)
def test_another_value_names_node_and_variable(
    change: dict[str, str | None], named: str, found: str
) -> None:
    seen = {k: v for k, v in {**RIGHT, **change}.items() if v is not None}
    nodes = [Node(host="a", environment=RIGHT), Node(host="b", environment=seen)]
    (violation,) = cluster_violations(CONTRACT, nodes)
    assert violation.subject == f"Ray node b: {named}"
    assert (violation.expected, violation.found) == ("1", found)
    assert "ray stop" in violation.remedy


def test_everything_wrong_on_every_node_is_told() -> None:
    nodes = [Node(host=h, environment={}) for h in "abc"]
    assert len(cluster_violations(CONTRACT, nodes)) == 6
