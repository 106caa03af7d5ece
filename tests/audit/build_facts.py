"""Writes the trees of facts that the sample project is judged against.

A tree has the names, signatures, decorators and imports of what the sample project
patches, and stands in for a release of vLLM: bodies are not in it, only digests and
fingerprints of them, so that what changed there changes here.

    python tests/audit/build_facts.py WHEEL_0_26 WHEEL_0_32
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

from audit_sample import EXPECTED

from patchkit.audit._versions import Target, open_target
from patchkit.symbols import Symbol, SymbolFacts

FACTS = Path(__file__).parent / "facts"
# What decides which implementation runs, and classes that replacements derive from.
ALSO = (
    "vllm.config.vllm:VllmConfig.use_v2_model_runner",
    "vllm.config.vllm:VllmConfig._is_default_v2_model_runner_model",
    "vllm.model_executor.layers.linear:ReplicatedLinear",
    "vllm.v1.core.sched.scheduler:Scheduler.__init__",
    "vllm.lora.layers.vocal_parallel_embedding:VocabParallelEmbeddingWithLoRA.set_lora",
    "vllm.lora.layers.vocab_parallel_embedding:VocabParallelEmbeddingWithLoRA.set_lora",
    "vllm.lora.layers.vocal_parallel_embedding:VocabParallelEmbeddingWithLoRA.forward",
    "vllm.lora.layers.vocab_parallel_embedding:VocabParallelEmbeddingWithLoRA.forward",
)
# Lines that are looked for as text.
LINES = {
    "vllm/v1/executor/ray_executor.py": ("self._init_workers_ray(placement_group)",),
    "vllm/v1/executor/ray_executor_v2.py": ("if local_dp_rank is None:",),
    "vllm/lora/layers/vocal_parallel_embedding.py": ("class VocabParallelEmbeddingWithLoRA(",),
    "vllm/lora/layers/vocab_parallel_embedding.py": ("class VocabParallelEmbeddingWithLoRA(",),
    "vllm/envs.py": ('os.getenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "1")',),
}


def build(wheel: str) -> None:
    """Write the tree of one version."""
    target = open_target(wheel)
    root = FACTS / f"vllm-{target.version}"
    wanted = {t for t, *_ in EXPECTED if ":" in t and t.startswith("vllm.")}
    wanted |= {new for *_, new in EXPECTED if new and ":" in new}
    wanted |= set(ALSO)
    modules: dict[str, dict[str, SymbolFacts]] = defaultdict(dict)
    imports: dict[str, list[str]] = defaultdict(list)
    for name in sorted(wanted):
        facts = target.facts(name)
        if facts is None or facts.inherited_from or facts.reexport_of:
            continue
        symbol = Symbol.parse(name)
        modules[symbol.module][symbol.qualname] = facts
        if facts.kind == "function":
            for alias in target.aliases(name)[:6]:
                module, _, local = alias.partition(":")
                imports[module].append(
                    f"from {symbol.module} import {symbol.name}"
                    + (f" as {local}" if local != symbol.name else "")
                )
    for file, lines in LINES.items():
        module = file[: -len(".py")].replace("/", ".")
        text = target.text(file)
        if text is not None:
            modules[module].setdefault("", None)  # type: ignore[arg-type]
            for line in lines:
                if line in text or re.search(re.sub(r"\\ ", r"\\s*", re.escape(line)), text):
                    imports[module].append(f"# {line}")
    modules["vllm"] = {}
    metadata = root / f"vllm-{target.version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {target.version}\n", "utf-8")
    for module in sorted({*modules, *imports}):
        _write(root, target, module, modules.get(module, {}), imports.get(module, []))


def _write(
    root: Path,
    target: Target,
    module: str,
    symbols: dict[str, SymbolFacts],
    lines: list[str],
) -> None:
    assert target.source is not None
    file = target.source.source.modules()[module]
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    text = [f'"""Facts about {module} of {target.label}: no code of it."""', "", *lines]
    classes: dict[str, list[str]] = {}
    for name, facts in sorted(symbols.items()):
        if not name:
            continue
        owner, _, last = name.rpartition(".")
        if facts.kind == "class":
            classes.setdefault(name, [])
        elif owner:
            classes.setdefault(owner, []).extend(_definition(last, facts, "    "))
        else:
            text += _definition(last, facts, "")
    for name, members in classes.items():
        text += [f"class {name}:", *(members or ["    pass"])]
    path.write_text("\n".join(text) + "\n", "utf-8")


def _definition(name: str, facts: SymbolFacts, indent: str) -> list[str]:
    if facts.kind == "attribute":
        value = facts.value or ""
        whole = value and not value.startswith("<") and "…" not in value
        return [f"{indent}{name} = {value if whole else repr(facts.body_digest)}"]
    word = "async def" if facts.is_async else "def"
    lines = [f"{indent}@{d}" for d in facts.decorators if d in ("staticmethod", "classmethod")]
    pieces = [facts.sketch[i : i + 6] for i in range(0, len(facts.sketch), 6)]
    lines.append(f"{indent}{word} {name}{facts.signature}:")
    lines.append(f"{indent}    return {facts.body_digest!r}, {', '.join(map(repr, pieces))}")
    return lines


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        build(argument)
