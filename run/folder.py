"""The folder of a run: who may write in it, which checkpoint in it is used, and which checkpoints stay.

    step-N/                   checkpoints (checkpoint.py)
    latest.json, best.json    {"step": N, ...}: pointers for those who read a run. Each is replaced atomically.
                              latest.json also names, under "overwrote", folders of an older run still to be deleted
    log.csv, loss.png         what happened (log.py, watch/plot.py)
    .lock                     held by the process that trains here

A run goes on from its newest checkpoint that is whole, whatever latest.json says: a kill may come between the two.
"""

import math
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from amp.scaler import LossScaler
from base import files
from base.errors import BadInput
from run import checkpoint, resume
from run.checkpoint import LEFTOVER, STEP_FOLDER, NotSaved
from run.log import Row
from settings import Settings

KEPT = 2  # newest checkpoints that stay; the best one stays too


# ---- which checkpoint


def find(wanted: str, out: str | None = None, pointers: tuple[str, ...] = ("latest.json",)) -> Path:
    """Returns a model's folder. wanted: "auto" (the run in `out`, else the newest run), a run folder, or the folder.

    pointers: which checkpoint of a run to take. The first pointer that exists counts.
    """
    folder = _find_run(wanted, out)
    old = _overwritten(folder) or []
    for pointer in pointers:
        if os.path.isfile(folder / pointer):
            step_folder = folder / f"step-{_pointed(folder / pointer)}"
            if step_folder.name not in old:
                return step_folder
    if not os.path.isfile(folder / "config.json"):
        raise BadInput(f"{folder}: no checkpoint there: neither {pointers[-1]} of a run nor config.json of a model")
    return Path(os.path.realpath(folder))  # "." or a link may name a step folder, and its parent must be the run


def find_intact(wanted: str, out: str | None = None) -> tuple[Path, list[str]]:
    """The newest whole checkpoint of the run that `wanted` means, and a line for each newer one, which is damaged.

    BadInput where none is whole. A step folder that is named is taken as it is.
    """
    run_folder = _find_run(wanted, out)
    faults: list[str] = []
    for step in reversed(_steps(run_folder)):
        fault = checkpoint.damage(run_folder / f"step-{step}")
        if fault is None:
            return run_folder / f"step-{step}", faults
        faults.append(fault)
    if faults:
        raise BadInput("\n".join(faults))
    return find(wanted, out), []


def intact_after(out: Path, step: int) -> Path | None:
    """A whole checkpoint of the run that is newer than `step`, or None."""
    newer = [out / f"step-{number}" for number in _steps(out) if number > step]
    return next((folder for folder in newer if checkpoint.damage(folder) is None), None)


def holds_run(out: Path) -> bool:
    """Whether the folder holds a checkpoint. A log alone does not count: its run never saved one."""
    return os.path.isfile(out / "latest.json") or bool(_steps(out))


def _find_run(wanted: str, out: str | None) -> Path:
    if wanted != "auto":
        return Path(wanted)
    candidates = [Path(out)] if out else _entries(Path("runs"))
    runs = [candidate for candidate in candidates if holds_run(candidate)]
    if not runs:
        raise BadInput(f"no checkpoint in {out or 'runs'}: train one first, or name its folder")
    return max(runs, key=_saved_last)


def _saved_last(out: Path) -> float:
    """The time of a run's last save; without latest.json, which a kill may leave missing, the time of the folder."""
    pointer = out / "latest.json"
    return os.path.getmtime(pointer if os.path.isfile(pointer) else out)


# ---- the start of a run


class Lock:
    """Held from its construction to the end of the block, or of the process: a killed process leaves no lock behind."""

    def __init__(self, out: Path):
        self.lock = FileLock(out / ".lock")  # flock; on Windows msvcrt. The file stays when the lock is gone
        try:
            self.lock.acquire(timeout=0)
        except Timeout:
            why = "another process is training there: wait for its end, or name another folder"
            raise BadInput(f"--out {out}: {why}") from None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.lock.release()


def open_folder(settings: Settings, dtype: str, resume_from: Path | None, first_step: int) -> tuple[Path, Lock]:
    """The run folder and the lock on it. With --overwrite the old run stays until the new one saves.

    BadInput if it cannot be written, another process holds it, or another process has meanwhile saved a later step.
    """
    try:
        if settings.out:
            out = Path(settings.out)
        elif resume_from:
            out = resume_from.parent
        else:
            out = _new_folder(f"{time.strftime('%Y-%m-%d-%H%M%S')}-{settings.preset}-{dtype}")
        out.mkdir(parents=True, exist_ok=True)
        lock = Lock(out)
        clear_leftovers(out)
        if resume_from and out.absolute() == resume_from.parent.absolute():
            set_aside_newer(out, first_step)
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


def clear_leftovers(out: Path) -> None:
    """Removes half-done work of killed processes, or brings back moved folders. The caller holds the run's lock."""
    with suppress(OSError):  # killed when the new run had saved and the old one was being deleted
        finish_overwrite(out)
    old_run_is_over = _overwritten(out) is not None  # also where some of it cannot be deleted
    old_run_stays = (out / "log.csv.old").exists() and not old_run_is_over  # --overwrite, killed before it saved
    for path in _entries(out):
        if leftover := LEFTOVER.fullmatch(path.name):
            step, kind = leftover.groups()
            if kind == "old" and old_run_stays:
                shutil.rmtree(out / f"step-{step}", ignore_errors=True)
            if kind == "old" and not old_run_is_over and not (out / f"step-{step}").exists():
                path.rename(out / f"step-{step}")  # killed between two renames
            else:
                shutil.rmtree(path)
        elif re.fullmatch(r"\.(latest\.json|best\.json|log\.csv)\.\d+\.tmp", path.name, re.ASCII):
            path.unlink()
    if old_run_stays:
        (out / "log.csv.old").replace(out / "log.csv")


def set_aside_newer(out: Path, step: int) -> None:
    """Renames damaged checkpoints after `step` to step-N.damaged, so that the highest number is the newest again.

    BadInput where one of them is whole: another process has gone on since `step` was chosen.
    """
    if newer := intact_after(out, step):
        raise BadInput(f"--resume {out / f'step-{step}'}: {newer.name} is newer: start again")
    for number in _steps(out):
        if number > step:
            shutil.rmtree(out / f"step-{number}.damaged", ignore_errors=True)
            (out / f"step-{number}").rename(out / f"step-{number}.damaged")
    if _pointed_or_none(out / "latest.json") != step:
        files.replace({out / "latest.json": files.to_json({"step": step})})
    if (_pointed_or_none(out / "best.json") or 0) > step:
        (out / "best.json").unlink()


# ---- saving


class Saver:
    """Saves the checkpoints of one run. It knows the best loss, the step that was saved last, and why a save failed."""

    def __init__(self, out: Path, config: dict, tokenizer: dict, about: dict, best_val: float, overwrite: bool):
        self.out, self.config, self.tokenizer = out, config, tokenizer
        self.about = about  # the part of each manifest that stays the same
        self.best_val = best_val
        self.replace = overwrite  # the first checkpoint replaces the run that was here
        self.saved_step: int | None = None
        self.fault: str | None = None  # of the latest save

    def is_best(self, val: float | None) -> bool:
        """Whether a validation loss is the lowest yet. NaN never is."""
        return val is not None and val < self.best_val

    def save(self, row: Row, state: Callable[[], dict], scaler: LossScaler, tell: Callable[[str], None]) -> None:
        """Saves the step of `row`. A failure, like a full disk, is told and kept in `fault`: the run goes on.

        state: gives the arrays, as Backend.state. A model whose loss is not finite is not saved: it would push out a
        good one.
        """
        if not math.isfinite(row.loss if row.val is None else row.val):
            return
        best = self.is_best(row.val)
        best_val = row.val if best and row.val is not None else self.best_val
        manifest = self.about | resume.state_of(scaler, best_val)
        try:
            save(self.out, row.step, state(), self.config, self.tokenizer, manifest, best, self.replace)
        except NotSaved as error:
            self.fault = str(error)
            tell(self.fault)
            return
        self.best_val, self.saved_step, self.fault = best_val, row.step, None
        self.replace = False
        try:
            finish_overwrite(self.out)
        except OSError as error:  # tried again with the next save, and when the run goes on
            tell(f"{error.filename}: of the run before, cannot be deleted ({error.strerror})")

    def where_saved(self, row: Row) -> str:
        """Words that say whether the step of `row` is saved."""
        if self.saved_step == row.step:
            return f"{self.out / f'step-{row.step}'} is saved"
        return f"step {row.step} has a loss of {row.loss}: not saved"


def save(
    out: Path,
    step: int,
    arrays: dict,
    config: dict,
    tokenizer: dict,
    manifest: dict,
    best: bool = False,
    replace: bool = False,
) -> Path:
    """Writes `out/step-N`, points latest.json (with `best` also best.json) at it, and deletes what is not kept.

    replace: the folder holds another run, which finish_overwrite() deletes last. NotSaved where the disk is full, say.
    """
    old = [path.name for path in _entries(out) if _is_ours(path)] if replace else _overwritten(out)
    folder = checkpoint.write(out, step, arrays, config, tokenizer, manifest, keep_replaced=replace)
    overwrote = {} if old is None else {"overwrote": [name for name in old if name != folder.name]}
    pointers = {out / "latest.json": files.to_json({"step": step} | overwrote)}
    if best:
        pointers[out / "best.json"] = files.to_json({"step": step, "val": manifest["best_val"]})
    try:
        files.replace(pointers)
    except OSError as error:
        if not replace:
            raise NotSaved(f"step {step} is saved, but nothing in {out} points at it: {error.strerror}") from error
        with suppress(OSError):
            checkpoint.undo(folder)
        raise NotSaved(f"step {step} is not saved: {error.strerror}: the run in {out} stays") from error
    if not replace:
        _remove_old(out)
    return folder


def finish_overwrite(out: Path) -> None:
    """Deletes what an overwritten run left in `out`, and nothing else. Does nothing where there is no such run.

    OSError where something cannot be deleted, after everything else is. latest.json then goes on naming it, and no
    reader takes it for the new run's.
    """
    old = _overwritten(out)
    if old is None:
        return
    folders = [path for path in _entries(out) if path.name in old or LEFTOVER.fullmatch(path.name)]
    names = ["loss.png", "log.csv.damaged", "log.csv.old"]
    if f"step-{_pointed_or_none(out / 'best.json')}" in old:
        names.append("best.json")
    errors = []
    for path in [*folders, *(out / name for name in names if (out / name).is_file())]:
        try:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    files.replace({out / "latest.json": files.to_json({"step": _pointed(out / "latest.json")})})


def _overwritten(out: Path) -> list[str] | None:
    """Folders of an older run, which the run here has replaced and not deleted yet. None: there was no such run.

    latest.json names them from the moment that the new run has saved, so the folder is one run also after a kill.
    """
    try:
        names = files.read_json(out / "latest.json").get("overwrote")
    except BadInput:
        return None
    return [name for name in names if _is_step_name(str(name))] if isinstance(names, list) else None


def _remove_old(out: Path) -> None:
    pointed = [_pointed_or_none(out / name) for name in ("latest.json", "best.json")]
    for step in _steps(out)[:-KEPT]:
        if step not in pointed:
            shutil.rmtree(out / f"step-{step}", ignore_errors=True)


# ---- names in a run folder


def _entries(out: Path) -> list[Path]:
    try:
        return sorted(out.iterdir()) if os.path.isdir(out) else []
    except OSError as error:
        raise BadInput(f"{out}: cannot be read ({error.strerror})") from None


def _steps(out: Path) -> list[int]:
    """The steps of the run of which there is a folder, whole or damaged, in order."""
    old = _overwritten(out) or []
    matches = [STEP_FOLDER.fullmatch(path.name) for path in _entries(out) if _is_ours(path) and path.name not in old]
    return sorted(int(match[1]) for match in matches if match)


def _is_ours(path: Path) -> bool:
    """Whether this is a step folder, also one set aside for its damage, or one that a killed process left behind."""
    if LEFTOVER.fullmatch(path.name):
        return True
    has_our_files = any((path / file).is_file() for file in ("manifest.json", "optimizer.safetensors"))
    return _is_step_name(path.name) and has_our_files


def _is_step_name(name: str) -> bool:
    return bool(STEP_FOLDER.fullmatch(name.removesuffix(".damaged")) or LEFTOVER.fullmatch(name))


def _pointed(pointer: Path) -> int:
    step = files.read_json(pointer).get("step")
    if type(step) is not int:
        raise BadInput(f"{pointer}: damaged, no step in it: name a step folder")
    return step


def _pointed_or_none(pointer: Path) -> int | None:
    try:
        return _pointed(pointer)
    except BadInput:  # a damaged pointer is no reason to end a run
        return None
