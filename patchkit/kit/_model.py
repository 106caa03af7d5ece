"""Which classes a model's configuration means in vLLM and in transformers.

Decided from the sources of both registries; neither library is imported.
"""

from __future__ import annotations

import ast
import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchkit.kit._sources import module_source
from patchkit.kit.errors import UnknownModelError

_VLLM_MODELS = "vllm.model_executor.models."
_HF_AUTO = "transformers.models.auto."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelClasses:
    """One model in both libraries.

    Attributes:
        config: Content of its ``config.json``.
        architecture: The class that the configuration names.
        model_type: As in the configuration.
        vllm_module: Module of the class that vLLM runs.
        vllm_class: Its name.
        hf_module: Module of the class that transformers builds.
        hf_class: Its name.
    """

    config: Mapping[str, Any]
    architecture: str
    model_type: str
    vllm_module: str
    vllm_class: str
    hf_module: str
    hf_class: str


def model_classes(model: Path) -> ModelClasses:
    """Look a model up.

    Args:
        model: Its folder, or its ``config.json``.

    Raises:
        UnknownModelError: Naming what is missing, and what resembles it.
    """
    config = read_config(model)
    architecture = _architecture(config, model)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise UnknownModelError(
            f"{model}: model_type",
            expected="the model's type, a string",
            found=repr(model_type),
            remedy="use the config.json that transformers wrote",
        )
    vllm_module, vllm_class = _in_vllm(architecture)
    hf_module, hf_class = _in_transformers(model_type, architecture)
    return ModelClasses(
        config=config,
        architecture=architecture,
        model_type=model_type,
        vllm_module=vllm_module,
        vllm_class=vllm_class,
        hf_module=hf_module,
        hf_class=hf_class,
    )


def read_config(model: Path) -> dict[str, Any]:
    """The content of a ``config.json``, named itself or by its folder."""
    file = model / "config.json" if model.is_dir() else model
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnknownModelError(
            str(file),
            expected="a model's config.json, or a folder that holds one",
            found=error.strerror or str(error),
            remedy="name the checkpoint's folder; nothing is downloaded",
        ) from error
    except (ValueError, RecursionError) as error:
        raise UnknownModelError(
            str(file),
            expected="JSON",
            found=str(error),
            remedy="use the config.json that transformers wrote",
        ) from error
    if not isinstance(data, dict):
        raise UnknownModelError(
            str(file),
            expected="a JSON object",
            found=type(data).__name__,
            remedy="use the config.json that transformers wrote",
        )
    return data


def _architecture(config: Mapping[str, Any], model: Path) -> str:
    named = config.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        raise UnknownModelError(
            f"{model}: architectures",
            expected='one class name, such as ["LlamaForCausalLM"]',
            found=json.dumps(named),
            remedy="add the class that the checkpoint was saved from",
        )
    return named[0]


def _in_vllm(architecture: str) -> tuple[str, str]:
    known: dict[str, tuple[str, str]] = {}
    for name, table in _literals(_VLLM_MODELS + "registry"):
        if name in ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS") and isinstance(table, dict):
            known.update(table)
    if architecture not in known:
        raise UnknownModelError(
            f"architecture {architecture!r}",
            expected="a class that the installed vLLM generates text with",
            found=f"none of that name; similar: {_similar(architecture, known)}",
            remedy="install a vLLM that has the model, or correct config.json; a class from the "
            "model's own repository (auto_map) cannot be reviewed",
        )
    module, name = known[architecture]
    return _VLLM_MODELS + module, name


def _in_transformers(model_type: str, architecture: str) -> tuple[str, str]:
    known = _pairs(_HF_AUTO + "modeling_auto", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    if known.get(model_type) != architecture:
        found = known.get(model_type)
        raise UnknownModelError(
            f"model_type {model_type!r}, architecture {architecture!r}",
            expected="a causal language model of the installed transformers",
            found=(
                f"model type {model_type!r} is built as {found}"
                if found
                else f"no such model type; similar: {_similar(model_type, known)}"
            ),
            remedy="install a transformers that has the model, or correct config.json; adapters "
            "are for text models that both libraries know",
        )
    special = _pairs(_HF_AUTO + "auto_mappings", "SPECIAL_MODEL_TYPE_TO_MODULE_NAME")
    folder = special.get(model_type, model_type.replace("-", "_"))
    return f"transformers.models.{folder}.modeling_{folder}", architecture


def _similar(name: str, known: Mapping[str, Any]) -> str:
    return ", ".join(difflib.get_close_matches(name, known, n=3, cutoff=0.5)) or "none"


def _literals(module: str) -> Iterator[tuple[str, Any]]:
    """Module-level names and what literal they are bound to."""
    for node in ast.parse(module_source(module)).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                yield node.targets[0].id, ast.literal_eval(node.value)
            except ValueError:
                continue  # computed; a registry's tables are not


def _pairs(module: str, name: str) -> dict[str, Any]:
    """``name = OrderedDict([(key, value), …])`` as a dictionary."""
    for node in ast.parse(module_source(module)).body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id == name
            and isinstance(node.value, ast.Call)
            and node.value.args
        ):
            return dict(ast.literal_eval(node.value.args[0]))
    raise UnknownModelError(
        f"{module}:{name}",
        expected="the table of models",
        found="no such table in the installed version",
        remedy="use a version of transformers that patchkit knows: `patchkit matrix qwen3_moe`",
    )
