"""How a command says that it cannot: in a sentence, and in JSON to whoever parses the answer."""

from __future__ import annotations

import json
import sys
from typing import NoReturn

import typer


def refuse(
    error: BaseException | str, as_json: bool, *, code: int = 2, name: str = "error"
) -> NoReturn:
    """End the command.

    Args:
        error: What is wrong.
        as_json: Whether ``--json`` was asked for; whoever parses the answer gets one.
        code: The exit code.
        name: What stands before the sentence.
    """
    print(f"{name}: {error}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": str(error)}))
    raise typer.Exit(code)
