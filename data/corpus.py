"""Where the text comes from: Tiny Shakespeare, this Python's own library, or any text file.

Tiny Shakespeare is looked for in $MINIGPT_DATA, then in the user's cache, then downloaded once. Every copy is checked
by its hash. Without a network the run goes on with text that is on every machine: Python's own standard library.
"""

import hashlib
import http.client
import os
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from base.cache import cache_folder
from base.errors import BadInput

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
FILE = "tinyshakespeare.txt"
NAMES = ("tinyshakespeare", "stdlib")  # corpora that are no path
TIMEOUT_SECONDS = 10

# About 1 MB, all of it in Python 3.10 to 3.14; a stripped installation may lack some.
STDLIB_MODULES = [
    "argparse", "calendar", "cmd", "codecs", "configparser", "copy", "csv", "dataclasses", "difflib", "fileinput",
    "fractions", "functools", "heapq", "inspect", "ipaddress", "optparse", "pprint", "random", "shlex", "shutil",
    "statistics", "string", "subprocess", "textwrap", "threading", "traceback", "uuid", "weakref",
]  # fmt: skip


class NoDownload(OSError):
    """Both tries failed."""


class Corpus(NamedTuple):
    name: str
    text: str
    notes: tuple[str, ...] = ()  # lines for the user: what was fetched, what was used instead

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def load_corpus(name: str, fall_back: bool = True) -> Corpus:
    """`name`: "tinyshakespeare", "stdlib", or the path of a UTF-8 text file. BadInput says what is wrong with it.

    fall_back: where Tiny Shakespeare cannot be had, take the standard library; a run that goes on cannot.
    """
    if name == "stdlib":
        return Corpus(name, _standard_library())
    if name != "tinyshakespeare":
        return Corpus(name, read_text(Path(name)))
    try:
        raw, notes = _tiny_shakespeare()
    except OSError as error:
        why = f"no Tiny Shakespeare ({getattr(error, 'reason', error)})"
        to_have_it = f"put {FILE} into a folder and set MINIGPT_DATA to that folder"
        if not fall_back:
            raise BadInput(f"{why}, and the run was trained on it: try again with a network, or {to_have_it}") from None
        note = f"{why}: training on this Python's own library instead; to have it, {to_have_it}"
        return Corpus("stdlib", _standard_library(), (note,))
    return Corpus(name, decode(raw, FILE), notes)


def decode(raw: bytes, where: str) -> str:
    """UTF-8 whatever the locale, byte-order mark dropped, CRLF and CR to LF."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{where}: not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}: convert the file to UTF-8"
        ) from None
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if not text:
        raise BadInput(f"{where}: empty")
    return text


def read_text(path: Path) -> str:
    return decode(_read(path), str(path))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from None


def _tiny_shakespeare() -> tuple[bytes, tuple[str, ...]]:
    """Bytes and notes. OSError where it has to be downloaded and cannot be."""
    folder = os.environ.get("MINIGPT_DATA")
    if folder:
        path = Path(folder) / FILE
        if not path.is_file():
            raise BadInput(f"MINIGPT_DATA={folder}: no {FILE} in that folder: put it there or unset MINIGPT_DATA")
        raw = _read(path)
        if reason := _not_the_file(raw):
            raise BadInput(f"{path}: {reason}")
        return raw, ()
    cached = cache_folder() / FILE
    fresh = None
    try:
        if cached.is_file() and not _not_the_file(raw := cached.read_bytes()):
            return raw, ()
        cached.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(cached.with_suffix(".lock"), timeout=4 * TIMEOUT_SECONDS):  # two processes: one download
            if cached.is_file() and not _not_the_file(raw := cached.read_bytes()):
                return raw, ()
            with tempfile.NamedTemporaryFile(dir=cached.parent, prefix=FILE, delete=False) as file:
                temporary = Path(file.name)
            try:
                fresh = _download()
                temporary.write_bytes(fresh)
                temporary.replace(cached)
            finally:
                temporary.unlink(missing_ok=True)
            return fresh, (f"downloaded Tiny Shakespeare to {cached}",)
    except NoDownload:
        raise
    except (OSError, NotImplementedError):  # of the cache: read-only, full, no folder, locked for long
        return fresh or _download(), (f"downloaded Tiny Shakespeare; it could not be kept in {cached.parent}",)


def _download() -> bytes:
    """The checked bytes, in two tries. OSError, with the reason, when both fail."""
    for last_try in (False, True):
        try:
            with urllib.request.urlopen(URL, timeout=TIMEOUT_SECONDS) as response:
                raw = response.read()
            if reason := _not_the_file(raw):
                raise OSError(reason)
            return raw
        except (OSError, http.client.HTTPException) as error:  # IncompleteRead is no OSError
            if last_try:
                raise NoDownload(str(getattr(error, "reason", error))) from None
            time.sleep(0.5)


def _not_the_file(raw: bytes) -> str | None:
    """Why these bytes are not Tiny Shakespeare, or None if they are."""
    if hashlib.sha256(raw).hexdigest() == SHA256:
        return None
    if raw.lstrip()[:15].lower().startswith((b"<!doctype", b"<html")):
        return "an HTML page came instead of the text, perhaps a network login"
    return f"not the expected file: {len(raw):,} bytes of 1,115,394, or other content (its sha256 differs)"


def _standard_library() -> str:
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [folder / f"{module}.py" for module in STDLIB_MODULES]
    texts = [file.read_bytes() for file in files if file.is_file()]
    if not texts:
        raise BadInput(f"--corpus stdlib: no Python sources in {folder}: use a text file")
    return decode(b"\n".join(texts).decode("ascii", "ignore").encode(), "stdlib")
