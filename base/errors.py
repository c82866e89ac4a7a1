"""How a script ends: what the user can fix is one line and exit status 2."""

import errno
import io
import os
import sys
from collections.abc import Callable

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a disk, a quota, a limit


class BadInput(ValueError):
    """Bad input. The message says what was wrong, where, and what to do; several lines are several faults."""


def say(text: str) -> None:
    """print, where a full disk under a redirected output is no reason to end a run."""
    try:
        print(text, flush=True)
    except OSError as error:
        if error.errno not in FULL:
            raise


def run_script(name: str, script: Callable[[], None]) -> int:
    """Runs a script and returns its exit status: 0, 2 for bad input, 130 for Ctrl-C, 141 where nobody reads on."""
    for stream, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, stream) is None:  # closed by who started this
            setattr(sys, stream, open(os.devnull, mode))  # noqa: SIM115, for as long as the process lives
    for stream in (sys.stdout, sys.stderr):  # a terminal that knows no "±" is no reason to lose a run
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        script()
        return 0
    except BadInput as error:
        for line in str(error).splitlines():
            print(f"{name}: error: {line}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 128 + 13
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted", file=sys.stderr)
        return 130
