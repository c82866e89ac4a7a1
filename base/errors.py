"""How a script ends: what the user can fix is one line and exit status 2."""

import errno
import io
import os
import sys
from collections.abc import Callable

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a full disk, a used-up quota, a file at its size limit


class BadInput(ValueError):
    """Bad input. The message says what was wrong, where, and what to do; several lines are several faults."""


def say(text: str) -> None:
    """Prints a text at once. If the output is a file on a full disk, the text is lost and the run goes on."""
    try:
        sys.stdout.write(text + "\n")  # one write: a reader may leave after the first line
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in FULL:
            raise


class Ended(Exception):
    """A script ends by itself before its work is done. The message is its last line, `status` its exit status."""

    status: int


def run_script(
    name: str,
    script: Callable[[], None],
    stops: tuple[type[Exception], ...] = (),
    when_out_of_memory: str = "use a smaller model",
) -> int:
    """Runs a script and returns its exit status.

    0: done. 1: out of memory, or an exception of `stops`, whose message is printed. 2: bad input. An Ended gives
    its own status. 130: Ctrl-C. 141: nobody reads its output any more.
    """
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
    except Ended as ended:
        print(f"{name}: {ended}", file=sys.stderr)
        return ended.status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes the rest at its end, and would complain
        return 128 + 13
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted", file=sys.stderr)
        return 130
    except stops as error:
        print(f"{name}: stopped: {error}", file=sys.stderr)
        return 1
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        print(f"{name}: out of memory: {when_out_of_memory}", file=sys.stderr)
        return 1


def _is_out_of_memory(error: Exception) -> bool:
    """NumPy raises a MemoryError; PyTorch a torch.OutOfMemoryError on CUDA and a plain RuntimeError on a CPU."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or "can't allocate memory" in str(error)
