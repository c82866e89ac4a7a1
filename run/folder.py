"""The run folder: made or taken over, held by one process at a time, cleared of what a killed one left in it."""

import time
from pathlib import Path

from filelock import FileLock, Timeout

from base.errors import BadInput
from run import checkpoint


class Lock:
    """Held from its construction to the end of the block, or of the process: a killed one leaves no lock behind."""

    def __init__(self, out: Path):
        self.lock = FileLock(out / ".lock")  # flock, msvcrt on Windows; that the file is there means nothing
        try:
            self.lock.acquire(timeout=0)
        except Timeout:
            why = "another process is training there: wait for its end, or name another folder"
            raise BadInput(f"--out {out}: {why}") from None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.lock.release()


def open_folder(settings, dtype: str, resume_from: Path | None, first_step: int) -> tuple[Path, Lock]:
    """The run folder and the lock on it. With --overwrite the old run stays until the new one saves.

    BadInput where it cannot be written, another process holds it, or has gone on from a later step meanwhile.
    """
    try:
        out = Path(settings.out) if settings.out else resume_from.parent if resume_from else None
        if out is None:
            out = _new_folder(f"{time.strftime('%Y-%m-%d-%H%M%S')}-{settings.preset}-{dtype}")
        out.mkdir(parents=True, exist_ok=True)
        lock = Lock(out)
        checkpoint.clear_leftovers(out)
        if resume_from and out.absolute() == resume_from.parent.absolute():
            checkpoint.set_aside_newer(out, first_step)
        if settings.overwrite and (out / "log.csv").exists():
            (out / "log.csv").replace(out / "log.csv.old")
        return out, lock
    except OSError as error:
        raise BadInput(f"--out {error.filename}: cannot be written ({error.strerror})") from None


def _new_folder(name: str) -> Path:
    number = 1
    while True:  # two runs may start in the same second
        out = Path("runs") / (name if number == 1 else f"{name}-{number}")
        try:
            out.mkdir(parents=True)
            return out
        except FileExistsError:
            number += 1
