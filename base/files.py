"""Files that are written whole or not at all, and read with one line for each fault."""

import errno
import hashlib
import json
import os
from pathlib import Path

from base.errors import BadInput

CANNOT_FLUSH = (errno.EINVAL, errno.ENOTSUP)  # network file systems answer so to the flush of a folder


def write(path: Path, content: bytes) -> None:
    """Writes a file and waits until the disk has it."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace(contents: dict[Path, bytes]) -> None:
    """Puts each content in the place of a file: a reader sees the old content or the new one, never a part.

    All are written before the first file is replaced, so a full disk leaves all files as they were.
    """
    temporaries = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in contents}
    try:
        for path, content in contents.items():
            write(temporaries[path], content)
        for path, temporary in temporaries.items():
            temporary.replace(path)
    finally:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)
    for folder in {path.parent for path in contents}:
        flush_folder(folder)


def flush_folder(folder: Path) -> None:
    """Waits until the disk has the names that were written or renamed in a folder."""
    if os.name != "posix":  # Windows cannot open a folder to flush it
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in CANNOT_FLUSH:
            raise
    finally:
        os.close(descriptor)


def read(path: Path) -> bytes:
    """The content of a file. BadInput where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}): use another checkpoint") from None


def read_checked(path: Path, sha256: str) -> bytes:
    """The content of a file. BadInput if its sha256 differs."""
    content = read(path)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise BadInput(f"{path}: damaged, its sha256 is not the manifest's: use another checkpoint")
    return content


def to_json(content: dict) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def read_json(path: Path) -> dict:
    """The JSON object in a file. BadInput where there is none."""
    return parse_json(read(path), path)


def parse_json(content: bytes, path: Path) -> dict:
    """The JSON object in `content`, which was read from `path`. BadInput where it is something else."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise BadInput(f"{path}: damaged, not JSON ({error}): use another checkpoint") from None
    if not isinstance(value, dict):
        raise BadInput(f"{path}: damaged, not a JSON object: use another checkpoint")
    return value
