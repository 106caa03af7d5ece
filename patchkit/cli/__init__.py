"""The ``patchkit`` command.

Each command lives in a module of its own beside this file and is imported only
when it is called: ``patchkit diff`` must answer in a fraction of a second.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version

# command -> (module in patchkit.cli, one-line help). The module has an `app`,
# a typer application with the command (or the group of commands) in it.
COMMANDS: dict[str, tuple[str, str]] = {
    "audit": ("audit", "what a project patches, and what an upgrade does to each patch"),
    "adopt": ("adopt", "a skeleton adapter out of a project's patches"),
    "conformance": ("conformance", "everything that stands behind an adapter's certificate"),
    "coverage": ("coverage", "what becomes of every submodule of an adapter's model"),
    "check": ("check", "the whole plan of an adapter, against what is installed"),
    "diff": ("diff", "how symbols fare from one version of a package to another"),
    "matrix": ("matrix", "which versions an adapter is ready for"),
    "admit": ("admit", "put a faster operator beside its reference, and record what was seen"),
    "adapt": ("adapt", "record reviewed digests, propose where moved symbols went"),
    "manifest": ("manifest", "build the manifests that comparisons are made of"),
    "artifact": ("artifact", "verify or merge verification artifacts"),
    "demo": ("demo", "the main job on this machine: sample, replay, prove, update, prove again"),
    "doctor": ("doctor", "where the two stacks part: the first operator that differs, and why"),
    "new-adapter": ("new_adapter", "look at a model, and write the skeleton of its adapter"),
    "report": ("report", "render a verification artifact as a page"),
}


def main() -> None:
    """Entry point of the console script."""
    args = sys.argv[1:]
    try:
        _run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the answer has read enough; nothing is left to be flushed at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        # A path that cannot even be asked about (no permission, a name too long), or an
        # answer that finds no room. Anything else is nobody's input.
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        told = f"{error.filename or 'the answer'}: {error.strerror}; name another place"
        if "--json" in args and error.filename is not None:
            print(json.dumps({"error": told}))
        else:
            print(f"error: {told}", file=sys.stderr)
        sys.exit(2)


def _run(args: list[str]) -> None:
    if args and args[0] in COMMANDS:
        import_module(f"patchkit.cli.{COMMANDS[args[0]][0]}").app(
            args=args[1:], prog_name=f"patchkit {args[0]}"
        )
        return
    if args == ["--version"]:
        print(f"patchkit {version('patchkit')}")
        return
    if args and args[0] not in ("-h", "--help"):
        close = get_close_matches(args[0], COMMANDS, n=1)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        print(f"error: there is no command {args[0]!r}{meant}", file=sys.stderr)
        print("`patchkit --help` lists the commands", file=sys.stderr)
        sys.exit(2)
    print("usage: patchkit COMMAND [OPTIONS]\n")
    for name, (_, text) in COMMANDS.items():
        print(f"  {name:<14} {text}")
