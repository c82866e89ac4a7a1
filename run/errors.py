"""How a script ends: what the user can fix is one line and exit status 2."""

import sys
from collections.abc import Callable


class BadInput(ValueError):
    """Bad input. The message says what was wrong, where, and what to do; several lines are several faults."""


def run_script(name: str, script: Callable[[], None]) -> int:
    """Runs a script and returns its exit status: 0, 2 for bad input, 130 for Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):  # a terminal that knows no "±" is no reason to lose a run
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        script()
        return 0
    except BadInput as error:
        for line in str(error).splitlines():
            print(f"{name}: error: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted", file=sys.stderr)
        return 130
