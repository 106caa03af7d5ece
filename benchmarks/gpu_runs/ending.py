"""The end of a process that started an engine."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from typing import NoReturn, ParamSpec

P = ParamSpec("P")


def ends_process(work: Callable[P, None]) -> Callable[P, NoReturn]:
    """Exit at once when ``work`` is done, with code 1 and its traceback where it failed.

    An ordinary exit would wait for the engine's processes, which wait for work.
    """

    @wraps(work)
    def ended(*args: P.args, **kwargs: P.kwargs) -> NoReturn:
        code = 1
        try:
            work(*args, **kwargs)
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    return ended
