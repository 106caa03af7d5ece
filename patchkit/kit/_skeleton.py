"""Writes the package of an adapter: complete where bindings cover the model, else closed."""

from __future__ import annotations

import importlib
import keyword
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from patchkit.bindings import vllm_cpu
from patchkit.bindings.tiny import DECODER
from patchkit.cli._requirements import requirements, reviewed_of
from patchkit.engine import Adapter, adapter_names, find_adapter
from patchkit.errors import PatchkitError, Violation
from patchkit.files import writing
from patchkit.kit._known import maker_of
from patchkit.kit._look import Look, only_settings
from patchkit.kit.errors import SkeletonRefusedError
from patchkit.symbols import installed_version, stored_manifest
from patchkit.symbols.drift import InstalledSource, build_manifest

if TYPE_CHECKING:
    from patchkit.kit._look import Row

_TEMPLATES = Path(__file__).with_name("templates")
_LIBRARIES = ("vllm", "torch", "transformers")


def package_of(name: str) -> str:
    """The import package of the adapter called ``name``."""
    return f"patchkit_{name}"


def check_place(name: str, into: Path) -> None:
    """Everything that stands against writing this skeleton there.

    Raises:
        SkeletonRefusedError: With all of it; nothing was written.
    """
    if violations := list(_against(name, into)):
        raise SkeletonRefusedError(f"no skeleton is written for {name!r}", violations)


def _against(name: str, into: Path) -> Iterator[Violation]:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        yield _wrong(
            f"name {name!r}",
            "is no name for an adapter",
            "a Python identifier in lower case",
            repr(name),
            "choose another, such as 'my_model'",
        )
        return
    if name in adapter_names():
        yield _wrong(
            f"name {name!r}",
            "an adapter of this name is installed",
            "a name that no entry point of patchkit.adapters has",
            ", ".join(adapter_names()),
            "choose another name, or uninstall that one",
        )
    if find_spec(package_of(name)) is not None:
        yield _wrong(
            f"package {package_of(name)!r}",
            "a package of this name can be imported already",
            "a name of its own",
            package_of(name),
            "choose another name for the adapter",
        )
    if not into.is_dir() or not os.access(into, os.W_OK):
        yield _wrong(
            str(into),
            "nothing can be written there",
            "a folder that exists",
            "no folder" if not into.is_dir() else "a folder without permission to write",
            "create it, or name another with --into",
        )
    elif os.path.lexists(into / name):
        yield _wrong(
            str(into / name),
            "exists already",
            "a path where nothing is",
            "a folder" if (into / name).is_dir() else "a file",
            "move it away, or name another folder with --into: nothing is overwritten",
        )


def write_skeleton(name: str, look: Look, into: Path) -> Path:
    """Write the package ``into/name``, all of it or nothing.

    Args:
        name: Of the adapter.
        look: What :func:`patchkit.kit.look_at` found.
        into: An existing folder.

    Returns:
        The folder written.

    Raises:
        SkeletonRefusedError: See :func:`check_place`.
    """
    check_place(name, into)
    with writing(into):
        folder = Path(tempfile.mkdtemp(prefix=".patchkit-", dir=into))
    try:
        draft = folder / name
        for file, text in _files(name, look).items():
            target = draft / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        with _imported(package_of(name), draft) as adapter:
            inner = draft / package_of(name)
            _carry_reviews(adapter, inner / "reviewed.json")
            _store_manifests(adapter, inner / "manifests")
        os.rename(draft, into / name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return into / name


# -- texts -----------------------------------------------------------------------------


_WIDEST = 96  # of a line, beside its indentation
_ADJUST_CORRECTION = """\
    if name.endswith("e_score_correction_bias"):
        return 0.2 * torch.randn_like(tensor)
"""


def _files(name: str, look: Look) -> dict[str, str]:
    package = package_of(name)
    values = {
        "name": name,
        "package": package,
        "distribution": package.replace("_", "-"),
        "architecture": look.classes.architecture,
        "hf_module": look.classes.hf_module,
        "hf_class": look.classes.hf_class,
        **_pins(),
        **_declaration(look, package),
        **_coverage(look),
        "shape": _lines(_entries(shape_of(look))),
        "adjust": _ADJUST_CORRECTION if look.shared else "",
        "sizes": _lines(f"{key}={value!r}," for key, value in sizes_of(look).items()),
        "table": markdown_table(look),
        "steps": steps(name, look),
    }
    layout = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        f"{package}/__init__.py": "adapter.py",
        f"{package}/coverage.py": "coverage.py",
        f"{package}/tiny.py": "tiny.py",
        f"{package}/operators.py": "operators.py",
        f"{package}/profiles/cpu_tree.toml": "cpu_tree.toml",
        "tests/test_conformance.py": "test_conformance.py",
    }
    files = {
        target: Template((_TEMPLATES / f"{source}.tmpl").read_text(encoding="utf-8")).substitute(
            values
        )
        for target, source in layout.items()
    }
    if wrappers := _trainer_module(look):
        files[f"{package}/trainer.py"] = wrappers
    files[f"{package}/reviewed.json"] = '{"schema": 1, "symbols": {}}\n'
    return files


def _entries(settings: Mapping[str, Any]) -> Iterator[str]:
    """Entries of a dict, one a line; a long one that is a dict itself over several."""
    for name, value in settings.items():
        text = f"{name!r}: {value!r},"
        if len(text) > _WIDEST and isinstance(value, Mapping):
            inner = "".join(f"        {key!r}: {given!r},\n" for key, given in value.items())
            text = f"{name!r}: {{\n{inner}    }},"
        yield text


def _lines(entries: Iterator[str], indent: int = 4) -> str:
    # Strings as ruff writes them; nothing in here holds a quote of its own.
    return "\n".join(" " * indent + entry.replace("'", '"') for entry in entries)


def _pins() -> dict[str, str]:
    """Versions that the profile pins: vLLM exactly, the others by their minor version."""
    versions = {library: installed_version(library).partition("+")[0] for library in _LIBRARIES}
    return {
        "vllm": versions["vllm"],
        "torch": ".".join(versions["torch"].split(".")[:2]),
        "transformers": ".".join(versions["transformers"].split(".")[:2]),
    }


def _declaration(look: Look, package: str) -> dict[str, str]:
    return {
        "rollout": _rollout(look),
        "trainer": _trainer(look, package),
        "relies_on": _lines((f"{symbol!r}," for symbol in look.relies_on), 8),
        "modules": _modules(look),
    }


def _rollout(look: Look) -> str:
    for whole in ("DENSE", "MOE", "SHARED_MOE"):
        patches = {p for part in look.rollout for p in getattr(vllm_cpu, part)}
        if set(getattr(vllm_cpu, whole)) == patches:
            return f"vllm_cpu.{whole}"
    return "\n    + ".join(f"vllm_cpu.{part}" for part in look.rollout)


def _family(look: Look) -> str:
    return look.classes.hf_class.removesuffix("ForCausalLM")


def _whole(look: Look) -> str:
    """The maker of a whole family, where the model's classes are exactly its; else empty."""
    family = _family(look)
    causal = f'hf.causal_lm(_HF, "{family}ForCausalLM"'
    shared = {f'hf.rms_norm(_HF, "{family}RMSNorm")', f'hf.attention(_HF, "{family}Attention")'}
    makers = {
        "dense": shared | {f'hf.gated_mlp(_HF, "{family}MLP")', causal + ")"},
        "softmax_moe": shared
        | {
            f'hf.softmax_router(_HF, "{family}TopKRouter")',
            f'hf.experts(_HF, "{family}Experts")',
            causal + ', output="router_loss")',
        },
        "grouped_moe": shared
        | {
            f'hf.gated_mlp(_HF, "{family}MLP")',
            f'hf.grouped_router(_HF, "{family}TopkRouter")',
            f'hf.shared_moe(_HF, "{family}MoE")',
            causal + ', output="moe")',
        },
    }
    return next((name for name, calls in makers.items() if set(look.trainer) == calls), "")


def _trainer(look: Look, package: str) -> str:
    if (whole := _whole(look)) and not look.wrappers:
        return f'CHECKPOINT_PATCHES + hf.{whole}(_HF, "{_family(look)}")'
    calls = ["*CHECKPOINT_PATCHES,"]
    for call in look.trainer:
        if wrapper := look.wrappers.get(call):
            maker, _, given = call.removesuffix(")").partition("(")
            own = f"replacement={f'{package}.trainer:{wrapper.name}'!r}"
            arguments = (*given.split(", "), own, f"versions={wrapper.versions!r}")
            call = f"{maker}(\n" + "".join(f"            {a},\n" for a in arguments) + " " * 8 + ")"
        calls.append(f"*{call},")
    return "(\n" + _lines(iter(calls), 8) + "\n    )"


def _trainer_module(look: Look) -> str:
    """The module of wrappers; empty where every shared replacement fits."""
    if not look.wrappers:
        return ""
    imports = sorted(
        f"from {w.shared.partition(':')[0]} import (\n    {w.name} as shared_{w.name},\n)"
        for w in look.wrappers.values()
    )
    functions = "\n\n".join(w.source for w in look.wrappers.values())
    return (
        f'"""Replacements for methods of {look.classes.hf_class}\'s own signatures."""\n\n'
        "from __future__ import annotations\n\nfrom typing import Any\n\n"
        + "\n".join(imports)
        + f"\n\n\n{functions}"
    )


def _modules(look: Look) -> str:
    """The coverage of every submodule; the author's to write where classes are unknown."""
    whole = _whole(look)
    if not whole:
        return ""
    listed = ["DECODER_MODULES"]
    if look.shared or not look.routed:
        listed.append("MLP_MODULES")
    if look.routed:
        listed.append("SHARED_EXPERT_MODULES" if look.shared else "EXPERT_MODULES")
    tables = "\n    + ".join(f"vllm_cpu.{name}" for name in listed)
    own = _lines((f"{symbol!r}," for symbol in look.rollout_classes), 8)
    return (
        f"    modules={tables}\n"
        f"    + vllm_cpu.stock(\n{own}\n    )\n"
        f'    + hf.{whole}_modules(_HF, "{_family(look)}"),\n'
    )


def _coverage(look: Look) -> dict[str, str]:
    only = only_settings(look.classes.config, look.shared)
    exactly = ""
    if only:
        body = "\n".join(
            f'    yield settings.only(config, "{name}", {wanted!r})'
            for name, wanted in only.items()
        )
        exactly = f"\n\ndef _exactly(config: Mapping[str, Any]) -> Any:\n{body}\n\n"
    missing = "".join(
        f"\n    {_quoted(f'{row.side}: {row.operator}')}: {_quoted(row.note)},"
        for row in look.missing
        if not _judged_by_a_rule(row)
    )
    return {
        "missing": missing and missing + "\n",
        "exactly": exactly,
        "rules": _lines((f"{rule}," for rule in look.rules), 4),
    }


def _judged_by_a_rule(row: Row) -> bool:
    """Whether a rule refuses it already: then it is the model that is outside, not the code."""
    return row.side == "config" and "; covered: " in row.note


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', "'") + '"'


def shape_of(look: Look) -> dict[str, Any]:
    """Settings of the tiny model, beside those that all tiny models have.

    The model's own settings, with sizes small and lists per layer left to the defaults.
    """
    config = look.classes.config
    shape: dict[str, Any] = {}
    for name in ("tie_word_embeddings", "rms_norm_eps"):
        if name in config and config[name] != DECODER[name]:
            shape[name] = config[name]
    rope = config.get("rope_parameters") or {
        "rope_type": "default",
        "rope_theta": config.get("rope_theta", 10000.0),
    }
    shape["rope_parameters"] = dict(rope)
    for name in (*only_settings(config, look.shared), "norm_topk_prob"):
        if name in config:
            shape[name] = config[name]
    if look.shared:
        shape |= _shared_shape(config)
        part = config.get("partial_rotary_factor", 0.5)
        shape["rope_parameters"].setdefault("partial_rotary_factor", part)
    elif look.routed:
        shape |= {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
        shape["num_local_experts" if "num_local_experts" in config else "num_experts"] = 8
    return shape


# One dense layer, then two of experts.
_EXPERTS = 8
_WIDTH = 64
_CHOSEN = 2


def _shared_shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a tiny model with shared experts: its own, and small sizes."""
    groups = config.get("n_group") or 1
    if _EXPERTS % groups or _EXPERTS // groups < _CHOSEN:
        groups = _EXPERTS // _CHOSEN
    shape = {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": _WIDTH,
        "n_routed_experts": _EXPERTS,
        "num_experts_per_tok": _CHOSEN,
        "n_shared_experts": 1,
        "n_group": groups,
        "topk_group": min(config.get("topk_group") or 1, groups),
        "num_nextn_predict_layers": 0,
    }
    own = ("routed_scaling_factor", "attention_bias", "use_qk_norm")
    return shape | {name: config[name] for name in own if name in config}


def sizes_of(look: Look) -> dict[str, Any]:
    """The tiny model's sizes, as its operators see them."""
    sizes: dict[str, Any] = {
        "hidden": DECODER["hidden_size"],
        "vocabulary": DECODER["vocab_size"],
        "heads": DECODER["num_attention_heads"],
        "kv_heads": DECODER["num_key_value_heads"],
        "head_size": DECODER["head_dim"],
        "max_position": DECODER["max_position_embeddings"],
    }
    if not _norms_heads(look):
        sizes["qk_norm"] = False
    if look.shared:
        shape = shape_of(look)
        part = shape["rope_parameters"]["partial_rotary_factor"]
        return {
            **sizes,
            "dense_width": DECODER["intermediate_size"],
            "moe_width": _WIDTH,
            "shared_width": _WIDTH,
            "experts": _EXPERTS,
            "top_k": _CHOSEN,
            "groups": shape["n_group"],
            "kept_groups": shape["topk_group"],
            "rotary_dim": int(DECODER["head_dim"] * part),
            "qkv_bias": bool(shape.get("attention_bias")),
        }
    if look.routed:
        return {**sizes, "moe_width": 64, "experts": 8, "top_k": 2}
    return {**sizes, "dense_width": DECODER["intermediate_size"]}


def _norms_heads(look: Look) -> bool:
    """Whether attention norms queries and keys, as its known forward and its setting say."""
    from patchkit.kit._sources import module_source

    if not look.classes.config.get("use_qk_norm", not look.shared):
        return False
    named = [c.partition(":")[2] for c in look.trainer_classes if c.endswith("Attention")]
    known = any(maker_of(c) for c in look.trainer_classes if c.endswith("Attention"))
    return bool(named) and known and "self.q_norm" in module_source(look.classes.hf_module)


def markdown_table(look: Look) -> str:
    """Operators and settings, and who covers them."""
    lines = ["| side | operator | | by, or what to do |", "| --- | --- | --- | --- |"]
    for row in look.rows:
        mark = f"**{row.status}**" if row.status == "needs you" else row.status
        text = "; ".join(filter(None, (f"`{row.by}`" if row.by else "", row.note)))
        lines.append(f"| {row.side} | `{row.operator}` | {mark} | {text.replace('|', '/')} |")
    return "\n".join(lines)


def steps(name: str, look: Look) -> str:
    """What an author does next, as a numbered list."""
    package = package_of(name)
    listed = [f"`pip install -e {name}`"]
    if look.missing:
        count = len(look.missing)
        what = "thing is" if count == 1 else "things are"
        listed.append(
            f"{count} {what} marked *needs you* above. Write the patches (docs/adapter-guide.md), "
            f"and take each entry out of `MISSING` in `{package}/coverage.py` as it becomes "
            "true; until then the model is refused"
        )
    if not _whole(look):
        listed.append(
            "declare `modules=`: what becomes of every class of submodule (docs/adapter-guide.md)"
        )
    listed += [
        f"`patchkit adapt {name}` lists what nobody has reviewed: read those functions",
        f"`patchkit adapt {name} --yes` records that you did",
        f"`patchkit conformance {name} --certificate certificate.json`, or `pytest` in this folder",
    ]
    return "\n".join(f"{number}. {text}" for number, text in enumerate(listed, 1))


# -- what goes with it -----------------------------------------------------------------


@contextmanager
def _imported(package: str, folder: Path) -> Iterator[Adapter]:
    """The drafted adapter, imported from its folder and forgotten again."""
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield importlib.import_module(package).adapter
    finally:
        sys.path.remove(str(folder))
        for module in [m for m in sys.modules if m == package or m.startswith(f"{package}.")]:
            del sys.modules[module]
        for cache in folder.rglob("__pycache__"):
            shutil.rmtree(cache)


def _carry_reviews(adapter: Adapter, file: Path) -> None:
    """Take over reviews of shared replacements from the adapters that are installed.

    A review is of a function *and* of what replaces it: where both are the same, it holds.
    """
    import json

    found: dict[str, Mapping[str, list[str]]] = {}
    pairs = {(p.symbol, p.replacement_name) for p in (*adapter.rollout, *adapter.trainer)}
    for name in adapter_names():
        try:
            other = find_adapter(name)
            reviewed = reviewed_of(other)
        except PatchkitError:
            continue  # another project's broken adapter is not this one's business
        for patch in (*other.rollout, *other.trainer):
            if (patch.symbol, patch.replacement_name) in pairs and patch.symbol in reviewed:
                found.setdefault(patch.symbol, reviewed[patch.symbol])
    content = {"schema": 1, "symbols": dict(sorted(found.items()))}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _store_manifests(adapter: Adapter, folder: Path) -> None:
    """Manifests of what the stored ones say nothing about, at the installed versions."""
    needed = requirements(adapter)
    for package in sorted({r.package for r in needed}):
        version = installed_version(package)
        stored = stored_manifest(package, version)
        known = {*stored.symbols, *stored.absent} if stored is not None else set()
        names = {r.symbol for r in needed if r.package == package} - known
        if not names:
            continue
        made = build_manifest(InstalledSource(package), names)
        made.dump(folder / package / f"{version.partition('+')[0]}.json")


def _wrong(subject: str, problem: str, expected: str, found: str, remedy: str) -> Violation:
    return Violation(
        subject=subject, problem=problem, expected=expected, found=found, remedy=remedy
    )
