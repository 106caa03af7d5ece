"""Which implementations of operators a profile uses, and whether they are admitted here.

An implementation is a package that says of itself, in constants that are read from its
source, what it implements (``IMPLEMENTS``), on which device (``DEVICE``) and by which
trials it is admitted (``CASES``). What was seen stands beside it in
``admissions.json``: per device, versions and digest of the sources. Nothing in here
imports torch.
"""

from __future__ import annotations

import ast
import ctypes
import json
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchkit.errors import ConfigurationError
from patchkit.runtime.canonical import digest_of
from patchkit.symbols import find_facts, installed_version
from patchkit.symbols.errors import PackageNotInstalledError
from patchkit.symbols.source import normal_digest

if TYPE_CHECKING:
    from patchkit.engine import Adapter

__all__ = [
    "REFERENCE",
    "Implementation",
    "Standing",
    "candidate",
    "find_implementation",
    "hardware",
    "releases_now",
    "standing_of",
    "used_implementations",
]

REFERENCE = "patchkit.providers"
# They compute nothing of a model.
_OWN = ("patchkit.engine", "patchkit.runtime", "patchkit.symbols")
RECORD = "admissions.json"
SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """A package with operators of its own.

    Attributes:
        module: The package.
        implements: The module whose operators it has. Those of :data:`REFERENCE` can be
            chosen one by one; what reproduces another library's is used as a whole.
        device: ``cpu`` or ``cuda``.
        cases: Reference to a function that yields its trials.
        folder: Where it lies.
    """

    module: str
    implements: str
    device: str
    cases: str
    folder: Path

    @property
    def digest(self) -> str:
        """Of its sources, and of those of the reference that it uses or stands in for.

        Comments, docstrings and layout do not count.
        """
        own = [self.module, *_modules_of(self.module, self.folder)]
        defined = [
            module
            for operator in self.operators()
            if (module := _defining(self.implements, operator)) is not None
        ]
        return digest_of(
            {
                module: normal_digest(file.read_text(encoding="utf-8"))
                for module in sorted(
                    _closure([*own, *defined], self.implements) - {self.implements}
                )
                if (file := _file(module)) is not None
            }
        )

    @property
    def record(self) -> Path:
        """The file of its admissions."""
        return self.folder / RECORD

    def operators(self) -> tuple[str, ...]:
        """The names in its ``__all__`` but for classes: an operator's arguments, not operators."""
        names = _constants(self.folder / "__init__.py").get("__all__", ())
        return tuple(name for name in names if not _is_class(self.module, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Whether an implementation may be used on this machine.

    Attributes:
        digest: Of its sources now.
        operators: Those of :data:`REFERENCE` that it can take the place of.
        expected: What a fitting admission would say.
        found: What the record says instead; empty where it is admitted.
    """

    digest: str
    operators: tuple[str, ...] = ()
    expected: str = ""
    found: str = ""

    @property
    def admitted(self) -> bool:
        return not self.found


def find_implementation(module: str) -> Implementation | None:
    """The implementation of that name; None where it is a module like any other."""
    folder = _folder(module)
    if folder is None or b"IMPLEMENTS" not in (folder / "__init__.py").read_bytes():
        return None  # most are: not even parsed
    constants = _constants(folder / "__init__.py")
    wanted = [constants.get(name) for name in ("IMPLEMENTS", "DEVICE", "CASES")]
    if not all(isinstance(value, str) for value in wanted):
        return None
    implements, device, cases = map(str, wanted)
    return Implementation(
        module=module, implements=implements, device=device, cases=cases, folder=folder
    )


def candidate(module: str, *, device: str, cases: str) -> Implementation | None:
    """A package on trial that does not yet say of itself what it is; None if there is none."""
    folder = _folder(module)
    if folder is None or not (folder / "__init__.py").is_file():
        return None
    return Implementation(
        module=module, implements=REFERENCE, device=device, cases=cases, folder=folder
    )


def hardware(device: str) -> str:
    """What bits may depend on: the processor's model, or the GPU's."""
    if device == "cpu":
        return _field(Path("/proc/cpuinfo"), "model name") or platform.machine()
    folders = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    # A container may hide the folder, and has NVIDIA's own library then.
    models = sorted({_field(folder, "Model") for folder in folders} - {""}) or _nvml_names()
    return " and ".join(models)


def _nvml_names() -> list[str]:
    """Names of the GPUs by NVIDIA's management library, which makes no CUDA context."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if library.nvmlInit_v2():
        return []
    try:
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
        names = set()
        for number in range(count.value):
            device, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
            if not (
                library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device))
                or library.nvmlDeviceGetName(device, name, len(name))
            ):
                names.add(name.value.decode())
        return sorted(names)
    finally:
        library.nvmlShutdown()


def releases_now(device: str) -> dict[str, str]:
    """The libraries whose kernels an implementation calls, as they are installed."""
    packages = ("torch",) if device == "cpu" else ("torch", "triton", "vllm")
    found = {}
    for package in packages:
        try:
            found[package] = installed_version(package)
        except PackageNotInstalledError:
            continue
    return found


def versions_now(device: str) -> dict[str, str]:
    """The same by their minor version, which is what a record is valid for.

    A pre-release is none of its version's releases, and stands for itself alone.
    """
    from packaging.version import Version

    found = {package: Version(version) for package, version in releases_now(device).items()}
    return {
        package: v.public if v.is_prerelease else f"{v.major}.{v.minor}"
        for package, v in found.items()
    }


def standing_of(implementation: Implementation) -> Standing:
    """Compare an implementation with its record, for this machine.

    Raises:
        ConfigurationError: The record cannot be read.
    """
    digest = implementation.digest
    here = {
        "hardware": hardware(implementation.device),
        "versions": versions_now(implementation.device),
        "digest": digest,
    }
    found = [{key: entry[key] for key in here} for entry in load_record(implementation.record)]
    operators = implementation.operators() if implementation.implements == REFERENCE else ()
    if here in found:
        return Standing(digest=digest, operators=operators)
    return Standing(
        digest=digest,
        operators=operators,
        expected=_told(here),
        found=" or ".join(_told(entry) for entry in found) or "no admission at all",
    )


def load_record(path: Path) -> list[dict[str, Any]]:
    """The admissions in a record.

    Raises:
        ConfigurationError: It is damaged, or of another schema.
    """
    if not path.is_file():
        return []
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        entries: list[dict[str, Any]] = data["admissions"]
        for entry in entries:
            entry["hardware"], entry["digest"], dict(entry["versions"])
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise ConfigurationError(
            f"{path}: not a record of admissions ({error}); write it with `patchkit admit`"
        ) from error
    if data.get("schema") != SCHEMA:
        raise ConfigurationError(
            f"{path}: schema {data.get('schema')!r}, and this patchkit knows {SCHEMA}: update it"
        )
    return entries


def used_implementations(adapter: Adapter, profile: str) -> tuple[str, ...]:
    """Implementations that the patches of a profile import, however indirectly.

    Their modules' imports are followed through the adapter's own package and through
    patchkit's bindings; wherever they lead to, an implementation is noticed. The
    reference itself is not among them.
    """
    pending = [
        reference.partition(":")[0]
        for reference in _references(adapter, profile)
        if isinstance(reference, str)
    ]
    roots = {module.partition(".")[0] for module in pending} | {"patchkit"}
    seen, found = set(), set()
    while pending:
        module = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        if (package := _package_of(module)) is not None:
            found.add(package)
        elif module.partition(".")[0] in roots and not module.startswith(_OWN):
            pending += _imports(module)
    return tuple(sorted(found))


def _package_of(module: str) -> str | None:
    """The implementation that a module belongs to: it, or a package around it."""
    while module:
        if find_implementation(module) is not None:
            return module
        module = module.rpartition(".")[0]
    return None


def _references(adapter: Adapter, profile: str) -> Iterator[object]:
    for patch in (*adapter.rollout, *adapter.trainer):
        if not patch.profiles or profile in patch.profiles:
            yield patch.replacement
    yield adapter.logprobs


def _imports(module: str) -> Iterator[str]:
    """Modules that a module's source imports; names that are modules themselves included."""
    file = _file(module)
    if file is None:
        return
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield source
            for alias in node.names:
                if _file(f"{source}.{alias.name}") is not None:
                    yield f"{source}.{alias.name}"


def _file(module: str) -> Path | None:
    top, *inner = module.split(".")
    try:
        spec = find_spec(top)  # a top-level name has no parents to import
    except ValueError:
        return None
    if spec is None:
        return None
    if not spec.submodule_search_locations:
        return Path(spec.origin) if not inner and spec.origin and spec.has_location else None
    for location in spec.submodule_search_locations:
        base = Path(location).joinpath(*inner)
        for file in (base / "__init__.py", *([base.with_suffix(".py")] if inner else [])):
            if file.is_file():
                return file
    return None


def _folder(module: str) -> Path | None:
    file = _file(module)
    return file.parent if file is not None and file.name == "__init__.py" else None


def _modules_of(module: str, folder: Path) -> Iterator[str]:
    """The modules of a package."""
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder).with_suffix("").parts
        yield ".".join([module, *(part for part in parts if part != "__init__")])


def _defining(reference: str, operator: str) -> str | None:
    """The module in which a reference's operator is written."""
    facts = find_facts(f"{reference}:{operator}")
    if facts is None:
        return None
    return facts.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _is_class(module: str, name: str) -> bool:
    facts = find_facts(f"{module}:{name}")
    return facts is not None and facts.kind == "class"


def _closure(start: Iterable[str], package: str) -> set[str]:
    """These modules and everything that they import of one package."""
    found = set(start)
    pending = list(found)
    while pending:
        for module in _imports(pending.pop()):
            inside = module == package or module.startswith(f"{package}.")
            if inside and module not in found and module != package:
                found.add(module)
                pending.append(module)
    return found


def _constants(file: Path) -> Mapping[str, Any]:
    found = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if not isinstance(target, ast.Name) or node.value is None:
                continue
            try:
                found[target.id] = ast.literal_eval(node.value)
            except ValueError:
                continue  # computed: not one of the constants that are looked for
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            found.pop(node.target.id, None)  # computed, too: what was written is not all of it
    return found


def _field(file: Path, name: str) -> str:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _told(entry: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{p} {v}" for p, v in sorted(entry["versions"].items()))
    return f"{entry['hardware'] or 'no such device'}, {versions}, digest {entry['digest'][:16]}"
