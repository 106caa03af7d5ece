"""vLLM general plugin: installs patchkit's rollout patches in this process.

Without ``PATCHKIT_ENABLE`` (or with 0) it does nothing and imports nothing. With 1, the
process runs patched or not at all; with anything else it does not run either: whoever
wrote ``true`` believes in patches that would not be there.
"""

import os


def register() -> None:
    """Entry point of ``vllm.general_plugins``; called in every vLLM process."""
    asked = os.environ.get("PATCHKIT_ENABLE", "")
    if asked in ("", "0"):
        return
    if asked != "1":
        _end(f"PATCHKIT_ENABLE: expected 1, or 0 or nothing to run unpatched; found {asked[:99]!r}")
    try:
        from patchkit.runtime.worker import activate

        activate()
    except BaseException as error:
        _stop(error)


def _stop(error: BaseException) -> None:
    """End this process, and say why."""
    import traceback

    from_patchkit = any(c.__module__.partition(".")[0] == "patchkit" for c in type(error).__mro__)
    if not from_patchkit:
        traceback.print_exception(type(error), error, error.__traceback__)
    _end(
        f"PATCHKIT_ENABLE=1, but this process (pid {os.getpid()}) cannot be patched, "
        f"so it stops.\n{error if from_patchkit else repr(error)}"
    )


def _end(why: str) -> None:
    """End this process, whatever surrounds us.

    An ordinary exception would not do: versions of vLLM differ in whether they
    catch what a plugin raises, and all of them mark the plugins as loaded before
    they are called, so that the next attempt in the same process goes on without.
    ``SystemExit`` passes through ``except Exception`` and lets the interpreter
    clean up; in a thread other than the main one it would end only that thread.
    """
    import sys
    import threading

    print(f"patchkit: {why}", file=sys.stderr, flush=True)
    if threading.current_thread() is not threading.main_thread():
        os._exit(78)
    raise SystemExit(78)
