"""Reading every module of a package, on as many processes as there are cores.

The helpers are plain interpreters that run this module, not forks: the caller may
have threads, and may have no ``if __name__ == "__main__"``.
"""

from __future__ import annotations

import gc
import marshal
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

from patchkit.symbols._module import RawModule, read_raw
from patchkit.symbols._sources import Source, _problem, open_source
from patchkit.symbols.errors import SourceUnreadableError

Progress = Callable[[int, int], None]

_FEW_BYTES = 2 << 20  # below this, starting a process costs more than it saves
_MOST_PROCESSES = 8
_RAW_FIELDS = tuple(f.name for f in fields(RawModule))
_HELPER = "import sys; sys.path[:] = {path!r}; from patchkit.symbols._scan import serve; serve()"


def scan(
    source: Source,
    modules: Sequence[str] | None = None,
    *,
    processes: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Read modules of a source into it; all of them where none are named."""
    names = source.modules()
    wanted = [(m, names[m]) for m in (names if modules is None else modules) if m in names]
    shares = _shares(source, wanted, processes)
    helpers = [_start(source, share) for share in shares[1:]]
    done = 0
    with collector_paused():
        for raw, module, file, problem in _read_all(source, shares[0]):
            _take(source, raw, module, file, problem)
            done += 1
            if progress and not done % 50:
                progress(done * len(shares), len(wanted))
        for helper in helpers:
            for values, module, file, problem in _collect(helper):
                raw = RawModule(*values) if values is not None else None
                _take(source, raw, module, file, problem)
    if progress:
        progress(len(wanted), len(wanted))


def _take(
    source: Source, raw: RawModule | None, module: str, file: str, problem: str | None
) -> None:
    source._raws[module] = raw
    if problem is not None:
        source.unreadable[file] = problem


def _shares(
    source: Source, wanted: list[tuple[str, str]], processes: int | None
) -> list[list[tuple[str, str]]]:
    """The files, dealt out so that each process gets about as many bytes."""
    sizes = {file: source.size(file) for _, file in wanted}
    count = processes or min(_cores(), _MOST_PROCESSES)
    if sum(sizes.values()) < _FEW_BYTES:
        count = 1
    shares: list[list[tuple[str, str]]] = [[] for _ in range(count)]
    # The first share is read here; a helper needs a moment to start.
    loads = [0] + [_FEW_BYTES // 4] * (count - 1)
    for entry in sorted(wanted, key=lambda e: -sizes[e[1]]):
        index = loads.index(min(loads))
        shares[index].append(entry)
        loads[index] += sizes[entry[1]] + 500
    return shares


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _read_all(
    source: Source, share: list[tuple[str, str]]
) -> Iterator[tuple[RawModule | None, str, str, str | None]]:
    for module, file in share:
        try:
            yield read_raw(source.read(file), module, file), module, file, None
        except SourceUnreadableError as error:
            yield None, module, file, _problem(error)


def _start(source: Source, share: list[tuple[str, str]]) -> subprocess.Popen[bytes]:
    # Nothing but patchkit itself is imported there, whatever the environment says.
    here = str(Path(__file__).resolve().parents[2])
    path = [here, *(p for p in sys.path if p.endswith((".zip", "lib-dynload")) or _standard(p))]
    helper = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _HELPER.format(path=path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert helper.stdin is not None
    with helper.stdin as stream:
        marshal.dump((source.kind, source.location, source.package, share), stream)
    return helper


def _standard(entry: str) -> bool:
    return entry == os.path.dirname(os.__file__)


def _collect(helper: subprocess.Popen[bytes]) -> list:
    assert helper.stdout is not None
    with helper.stdout as stream:
        data = stream.read()
    if helper.wait() != 0:
        raise RuntimeError(f"a process that reads sources ended with {helper.returncode}")
    return marshal.loads(data)


def serve() -> None:
    """What a helper does: a share on stdin, the records on stdout."""
    gc.disable()
    # Ctrl-C reaches the whole group: whoever started this one says what there is to say.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    kind, location, package, share = marshal.load(sys.stdin.buffer)
    source = open_source(kind, location, package)
    results = [
        (
            tuple(getattr(raw, name) for name in _RAW_FIELDS) if raw is not None else None,
            module,
            file,
            problem,
        )
        for raw, module, file, problem in _read_all(source, share)
    ]
    marshal.dump(results, sys.stdout.buffer)
    sys.stdout.buffer.flush()
    os._exit(0)  # freeing millions of objects one by one takes longer than it is worth


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the cyclic collector from walking millions of live objects again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
