"""What the engine costs: per call, per installation, per scan.

    python benchmarks/engine.py [--json] [--check] [--without-stack]

Calls are compared in one run, interleaved, as the best of several rounds, in
processor time, so that a busy machine does not change the answer: absolute
numbers mean little between machines, ratios do. ``mpat`` and
``gorilla`` are compared where they are installed. With ``--check`` the exit
code is 1 when a promise is broken: an active *replace* costs no more than its
replacement, an undone patch no more than the plain function, an installation
under 0.5 s that imports nothing foreign, a verification under 1 ms.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

from patchkit.engine import (
    Adapter,
    Patch,
    exact_context,
    find_adapter,
    inspect_plan,
    install,
)

_ROUNDS, _CALLS = 15, 200_000
_NOISE = 1.10  # what two runs of the very same function may differ in


def toy(name: str, folder: Path) -> ModuleType:
    (folder / f"{name}.py").write_text("def f(x, y=1):\n    return x\n")
    importlib.invalidate_caches()
    return importlib.import_module(name)


def replacement(x, y=1):
    return x


def factory(original):
    def f(x, y=1):
        return original(x, y)

    return f


def declared(module: ModuleType, new: Any, action: Any) -> Patch:
    words = {"reason": "benchmark", "consequence": "none", "until": "measured"}
    return Patch(symbol=f"{module.__name__}:f", action=action, replacement=new, **words)


def calls() -> dict[str, float]:
    """Nanoseconds per call."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        sys.path.insert(0, name)
        stack.callback(sys.path.remove, name)
        cases: dict[str, Callable[..., Any]] = {}
        contexts: dict[str, Callable[[], Any]] = {}

        plain = toy("bench_plain", folder)
        cases["plain function"] = plain.f
        cases["plain function, again"] = plain.f
        cases["the replacement, called directly"] = replacement
        cases["a closure around it, by hand"] = factory(plain.f)

        def adapter(label: str, action: Any, new: Any, side: str = "rollout") -> ModuleType:
            module = toy(f"bench_{label}", folder)
            patches = (declared(module, new, action),)
            made = install(Adapter(name=label, **{side: patches}), side)
            installed[label] = made
            return module

        installed: dict[str, Any] = {}
        cases["patchkit replace, active"] = adapter("replace", "replace", replacement).f
        cases["patchkit wrap, active"] = adapter("wrap", "wrap", factory).f
        gone = adapter("undone_replace", "replace", replacement)
        leftover = gone.f
        installed.pop("undone_replace").uninstall()
        cases["patchkit replace, undone"] = gone.f
        gone = adapter("undone_wrap", "wrap", factory)
        installed.pop("undone_wrap").uninstall()
        cases["patchkit wrap, undone"] = gone.f
        cases["  … somebody kept the patched function"] = leftover
        counted = adapter("counted", "replace", replacement)
        with installed["counted"].canary():
            counted.f(1)
        cases["patchkit replace, canary over"] = counted.f
        switched = adapter("switched", "replace", replacement, "trainer")
        cases["patchkit switched, outside"] = switched.f
        cases["patchkit switched, in exact_context"] = switched.f
        contexts["patchkit switched, in exact_context"] = exact_context

        import wrapt

        @wrapt.decorator
        def through(wrapped, instance, args, kwargs):
            return wrapped(*args, **kwargs)

        cases["wrapt FunctionWrapper"] = through(plain.f)
        cases |= others(folder)
        best = measure(cases, contexts)
        for made in installed.values():
            made.uninstall()
        return best


def others(folder: Path) -> dict[str, Callable[..., Any]]:
    """The same change by other libraries, where they are installed."""
    found: dict[str, Callable[..., Any]] = {}
    try:
        import gorilla
    except ImportError:
        print("gorilla is not installed: left out", file=sys.stderr)
    else:
        module = toy("bench_gorilla", folder)
        settings = gorilla.Settings(allow_hit=True)
        change = gorilla.Patch(module, "f", replacement, settings=settings)
        gorilla.apply(change)
        found["gorilla, active"] = module.f
        undone = toy("bench_gorilla_undone", folder)
        change = gorilla.Patch(undone, "f", replacement, settings=settings)
        gorilla.apply(change)
        gorilla.revert(change)
        found["gorilla, reverted"] = undone.f
    try:
        import mpat
    except ImportError:
        print("mpat is not installed: left out", file=sys.stderr)
    else:
        module = toy("bench_mpat", folder)

        @mpat.patch("bench_mpat.f")
        def f(original, x, y=1):
            return original(x, y)

        found["mpat, active (calls the original)"] = module.f
    return found


def measure(
    cases: dict[str, Callable[..., Any]], contexts: dict[str, Callable[[], Any]]
) -> dict[str, float]:
    best = dict.fromkeys(cases, float("inf"))
    for _ in range(_ROUNDS):
        for label, function in cases.items():
            with contexts[label]() if label in contexts else ExitStack():
                timer = timeit.Timer("f(1)", timer=time.process_time, globals={"f": function})
                best[label] = min(best[label], timer.timeit(_CALLS) / _CALLS * 1e9)
    return best


def stack(adapter: str) -> dict[str, Any]:
    """Milliseconds for an adapter of the real stack, with everything it patches imported."""
    try:
        started = time.process_time()
        for side in ("rollout", "trainer"):
            for planned in inspect_plan(adapter, side).patches:
                importlib.import_module(planned.module)
        importing = time.process_time() - started
    except ImportError as error:
        print(f"the stack is not installed: left out ({error})", file=sys.stderr)
        return {}
    import gc

    from patchkit.engine import _references as references
    from patchkit.engine._owners import Private

    packages = {p.symbol.partition(".")[0] for p in find_adapter(adapter).rollout}
    result: dict[str, Any] = {
        "modules loaded": len(sys.modules),
        "objects": len(gc.get_objects()),
        "importing the stack": importing * 1e3,
    }
    for side in ("rollout", "trainer"):
        inspect_plan(adapter, side)  # imports the adapter's own replacements
        before = set(sys.modules)
        made: list[Any] = []
        result[f"{side}: plan"] = timed(lambda side=side: inspect_plan(adapter, side))
        result[f"{side}: install"] = timed(
            lambda side=side, made=made: made.append(install(adapter, side))
        )
        result[f"{side}: verify"] = timed(made[0].verify, 200)
        result[f"{side}: undo"] = timed(made[0].uninstall)
        result[f"{side}: patches"] = len(made[0]._patches)
        result[f"{side}: newly imported"] = sorted(
            m for m in set(sys.modules) - before if not m.startswith("patchkit")
        )
        found = [p.target for p in inspect_plan(adapter, side).patches if p.target is not None]
        targets, owners = Private(t.value for t in found), [t.owner for t in found]
        result[f"{side}: reference scan"] = timed(
            lambda targets=targets, owners=owners: references.scan(targets, owners)
        )
        del found
    result["packages"] = sorted(packages)
    return result


def timed(work: Callable[[], Any], times: int = 1) -> float:
    started = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - started) / times * 1e3


def broken_promises(nanoseconds: dict[str, float], milliseconds: dict[str, Any]) -> list[str]:
    """What the project claims and this run does not show."""
    told = []
    plain = max(nanoseconds["plain function"], nanoseconds["plain function, again"])
    direct = nanoseconds["the replacement, called directly"]
    limits = {
        "patchkit replace, active": direct,
        "patchkit replace, canary over": direct,
        "patchkit replace, undone": plain,
        "patchkit wrap, undone": plain,
        "patchkit wrap, active": nanoseconds["a closure around it, by hand"],
    }
    for label, limit in limits.items():
        if nanoseconds[label] > limit * _NOISE:
            told.append(f"{label}: {nanoseconds[label]:.1f} ns, allowed {limit * _NOISE:.1f}")
    for label, value in milliseconds.items():
        allowed = {"install": 500.0, "verify": 1.0}.get(label.rpartition(": ")[2])
        if allowed is not None and value > allowed:
            told.append(f"{label}: {value:.2f} ms, allowed {allowed}")
        if label.endswith("newly imported") and value:
            told.append(f"{label}: {', '.join(value)}")
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--without-stack", action="store_true")
    parser.add_argument("--adapter", default="qwen3_moe")
    options = parser.parse_args()
    nanoseconds = calls()
    milliseconds = {} if options.without_stack else stack(options.adapter)
    broken = broken_promises(nanoseconds, milliseconds)
    if options.json:
        print(
            json.dumps(
                {
                    "python": platform.python_version(),
                    "nanoseconds_per_call": nanoseconds,
                    "stack": milliseconds,
                    "broken_promises": broken,
                }
            )
        )
    else:
        print(f"Python {platform.python_version()}, {platform.machine()}\n")
        plain = nanoseconds["plain function"]
        for label, value in nanoseconds.items():
            print(f"{label:<40} {value:8.1f} ns   {value / plain:5.2f}x")
        print()
        for label, value in milliseconds.items():
            shown = f"{value:10.3f} ms" if isinstance(value, float) else f"{value}"
            print(f"{label:<40} {shown}")
        for line in broken:
            print(f"BROKEN PROMISE: {line}")
    return 1 if options.check and broken else 0


if __name__ == "__main__":
    sys.exit(main())
