"""``patchkit admit``: put a faster operator beside its reference, and record what was seen."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from patchkit.cli._refusal import refuse
from patchkit.errors import ConfigurationError, PatchkitError

app = typer.Typer(add_completion=False)


@app.command()
def admit(
    module: Annotated[str, typer.Argument(help="The implementation, e.g. patchkit.providers.fast")],
    write: Annotated[
        bool, typer.Option("--write", help="Record it in admissions.json beside the package.")
    ] = False,
    cases: Annotated[
        str, typer.Option(help="Try a package without constants: module:function of its cases.")
    ] = "",
    device: Annotated[
        str | None, typer.Option(help="With --cases: cpu (if absent) or cuda.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Trials on this machine: same bits as the reference, or the guarantees it promises.

    Exit 0: admitted. Exit 1: refused, with everything that was found. Exit 2: wrong usage.
    """
    try:
        if cases and write:
            raise ConfigurationError(
                "--cases tries a package that does not say what it is, so there is nothing to "
                "record: put IMPLEMENTS, DEVICE and CASES into its __init__, and leave --cases out"
            )
        if device and not cases:
            raise ConfigurationError(
                f"--device goes with --cases; {module} says its DEVICE in its __init__"
            )
        from patchkit.parity.admission import admit as put_on_trial
        from patchkit.parity.admission import write_admission

        admission = put_on_trial(
            module,
            as_candidate=(device or "cpu", cases) if cases else None,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
        file = write_admission(module, admission) if write else None
    except PatchkitError as error:
        refuse(error, as_json, code=2 if isinstance(error, ConfigurationError) else 1)
    if as_json:
        print(json.dumps({**admission, "written": str(file) if file else None}))
        return
    versions = ", ".join(f"{p} {v}" for p, v in admission["versions"].items())
    print(f"{module} on {admission['hardware']}, {versions}")
    for name, seen in admission["operators"].items():
        print(
            f"  {name}: {seen['promise']}, {seen['trials']} trials at "
            f"{len(seen['shapes'])} shapes, largest difference {seen['largest_difference']:.3g}"
        )
    print(f"written to {file}" if file else "nothing written; say --write to record it")
