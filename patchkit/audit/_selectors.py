"""Which of several implementations a version of a package really runs.

A patch may apply and never run: the class is still there, but the version asked about
selects another one. Each entry names the switch and is decided on that version's text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from patchkit.audit._versions import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """One switch between two implementations.

    Attributes:
        package: The package.
        places: Modules, or classes of modules, that run on one side of it only.
        switch: The environment variable that overrides the choice.
        old_value: Its value for the places named here.
        file: The file in which the default is decided.
        off: A pattern in that file that says the other side is the default.
        on: A pattern that says it is not, whatever `off` says.
        since: The first version of which that is known, for versions without text.
        successor: What runs instead.
        unless: When the places named here run all the same.
    """

    package: str
    places: tuple[str, ...]
    switch: str
    old_value: str
    file: str
    off: str
    on: str
    since: str
    successor: str
    unless: str


SELECTORS = (
    Selector(
        package="vllm",
        places=(
            "vllm.v1.worker.gpu_model_runner",
            "vllm.v1.worker.gpu_input_batch",
            "vllm.v1.worker.block_table:BlockTable",
            "vllm.v1.worker.block_table:MultiGroupBlockTable",
            "vllm.v1.sample.sampler",
            "vllm.v1.sample.rejection_sampler",
        ),
        switch="VLLM_USE_V2_MODEL_RUNNER",
        old_value="0",
        file="vllm/config/vllm.py",
        off=r"def use_v2_model_runner\(self\)",
        on=r"def _is_default_v2_model_runner_model\b",
        since="0.30.0",
        successor="vllm.v1.worker.gpu (the V2 model runner)",
        unless="Triton is missing, or a feature is used that V2 does not support",
    ),
    Selector(
        package="vllm",
        places=("vllm.v1.executor.ray_executor",),
        switch="VLLM_USE_RAY_V2_EXECUTOR_BACKEND",
        old_value="0",
        file="vllm/envs.py",
        off=r'os\.getenv\(\s*"VLLM_USE_RAY_V2_EXECUTOR_BACKEND",\s*"1"\s*\)',
        on=r"(?!)",
        since="0.26.0",
        successor="vllm.v1.executor.ray_executor_v2:RayExecutorV2",
        unless="another executor is named explicitly",
    ),
)


def off_path(target: Target, symbol: str, settings: Mapping[str, str]) -> str:
    """Why a symbol is not on the path at a version; empty where it is."""
    module, _, name = symbol.partition(":")
    owner = f"{module}:{name.partition('.')[0]}"
    for selector in SELECTORS:
        if selector.package != target.package or not {module, owner} & set(selector.places):
            continue
        if settings.get(selector.switch) == selector.old_value:
            continue  # the project chooses the old side itself
        if not _is_off(selector, target):
            continue
        return (
            f"{selector.successor} runs instead by default "
            f"({selector.switch}={selector.old_value} selects this one), "
            f"unless {selector.unless}"
        )
    return ""


def _is_off(selector: Selector, target: Target) -> bool:
    """Whether the other side is the default at a version."""
    text = target.text(selector.file)
    if text is not None:
        off, on = re.search(selector.off, text), re.search(selector.on, text)
        return off is not None and on is None
    try:
        return target.source is None and Version(target.version) >= Version(selector.since)
    except InvalidVersion:
        return False
