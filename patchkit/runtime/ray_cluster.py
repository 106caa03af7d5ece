"""What a Ray cluster was started with, before a run trusts it.

Ray's workers inherit the environment of the ``ray start`` that made the cluster,
which may be days old and of another shell. A ``runtime_env`` repairs that for the
actors that get one, but not for what runs beside them (helpers, nested tasks,
spawned children of a library). So a cluster has to *be* of the contract's
environment, or the run is refused before an actor exists.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from patchkit.errors import Violation, ViolationsError
from patchkit.runtime.environment import Environment

__all__ = [
    "ClusterEnvironmentError",
    "Node",
    "cluster_violations",
    "observe_nodes",
    "require_cluster_environment",
]


class ClusterEnvironmentError(ViolationsError):
    """A cluster that was started with another environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node as a plain worker on it sees it.

    Attributes:
        host: Its name.
        environment: The worker's variables.
    """

    host: str
    environment: Mapping[str, str]


def observe_nodes(*, timeout_s: float = 60.0) -> list[Node]:
    """Ask a worker without a ``runtime_env`` on every live node; Ray must be connected.

    The number of tasks grows with the number of nodes, once per start of a run.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    probe = ray.remote(num_cpus=0, max_retries=0)(_describe)
    asked = [
        probe.options(
            # What the job gave its workers would hide what the cluster has.
            runtime_env={},
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        ).remote()
        for node in ray.nodes()
        if node["Alive"]
    ]
    return [Node(**answer) for answer in ray.get(asked, timeout=timeout_s)]


def _describe() -> dict[str, Any]:
    return {"host": socket.gethostname(), "environment": dict(os.environ)}


def cluster_violations(environment: Environment, nodes: Iterable[Node]) -> list[Violation]:
    """Every variable that a node has with another value than the contract's.

    patchkit's own variables are left out: they belong to a run and not to a cluster.
    """
    return [
        Violation(
            subject=f"Ray node {node.host}: {name}",
            problem="the cluster was started with another environment",
            expected=value,
            found=node.environment.get(name, "not set"),
            remedy="stop the cluster (`ray stop`) and start it with this variable exported, or "
            "let the run start a cluster of its own",
        )
        for node in nodes
        for name, value in environment.compared.items()
        if not name.startswith("PATCHKIT_") and node.environment.get(name) != value
    ]


def require_cluster_environment(environment: Environment, *, timeout_s: float = 60.0) -> None:
    """Refuse the connected cluster unless every node has the contract's environment.

    Raises:
        ClusterEnvironmentError: Naming every node and variable.
    """
    if found := cluster_violations(environment, observe_nodes(timeout_s=timeout_s)):
        raise ClusterEnvironmentError("this Ray cluster is refused; no actor was started", found)
