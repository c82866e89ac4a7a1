"""Where the text comes from: Tiny Shakespeare, this Python's own library, or any text file.

Tiny Shakespeare is looked for in the folder $MINIGPT_DATA, then in the user's cache; then it is downloaded once. Every
copy is checked by its hash. A run without a network trains on text that every machine has: Python's standard library.
"""

import hashlib
import os
import sysconfig
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from base.cache import cache_folder
from base.errors import BadInput

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
FILE = "tinyshakespeare.txt"
NAMES = ("tinyshakespeare", "stdlib")  # the corpora that are no path of a file
TIMEOUT_SECONDS = 10

# About 1 MB. Python 3.10 to 3.14 have all of these modules; a stripped installation may lack some.
STDLIB_MODULES = [
    "argparse", "calendar", "cmd", "codecs", "configparser", "copy", "csv", "dataclasses", "difflib", "fileinput",
    "fractions", "functools", "heapq", "inspect", "ipaddress", "optparse", "pprint", "random", "shlex", "shutil",
    "statistics", "string", "subprocess", "textwrap", "threading", "traceback", "uuid", "weakref",
]  # fmt: skip


class NoDownload(OSError):
    """Raised where both tries of the download failed."""


class Corpus(NamedTuple):
    """A text with its name. `notes` are lines for the user: what was downloaded, or what was used instead."""

    name: str
    text: str
    notes: tuple[str, ...] = ()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def load_corpus(name: str, fall_back: bool = True) -> Corpus:
    """Returns the corpus "tinyshakespeare", the corpus "stdlib", or the UTF-8 text file at the path `name`.

    fall_back: take the standard library where Tiny Shakespeare cannot be had. A run that goes on cannot do that.
    BadInput says what is wrong with the text.
    """
    if name == "stdlib":
        return Corpus(name, _standard_library())
    if name != "tinyshakespeare":
        return Corpus(name, read_text(Path(name)))
    try:
        raw, notes = _tiny_shakespeare()
    except OSError as error:
        why = f"no Tiny Shakespeare ({error.strerror or error})"
        to_have_it = f"put {FILE} into a folder and set MINIGPT_DATA to that folder"
        if not fall_back:
            raise BadInput(f"{why}, and the run was trained on it: try again with a network, or {to_have_it}") from None
        note = f"{why}: training on this Python's own library instead; to have it, {to_have_it}"
        return Corpus("stdlib", _standard_library(), (note,))
    return Corpus(name, decode(raw, FILE), notes)


def decode(raw: bytes, where: str) -> str:
    """Returns the text of UTF-8 bytes, whatever the locale: no byte-order mark, and LF for CRLF and CR."""
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
    """Returns the text of a UTF-8 file."""
    return decode(_read(path), str(path))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from None


def _tiny_shakespeare() -> tuple[bytes, tuple[str, ...]]:
    """Returns the file's bytes, and notes for the user. OSError where the file can neither be found nor downloaded."""
    if folder := os.environ.get("MINIGPT_DATA"):
        return _from_folder(folder), ()
    cached = cache_folder() / FILE
    try:
        if (raw := _from_cache(cached)) is not None:
            return raw, ()
        cached.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(cached.with_suffix(".lock"), timeout=4 * TIMEOUT_SECONDS):  # two processes: one download
            if (raw := _from_cache(cached)) is not None:
                return raw, ()
            return _download(cached.parent), (f"downloaded Tiny Shakespeare to {cached}",)
    except NoDownload:
        raise
    except (OSError, NotImplementedError):
        pass  # a cache that is read-only, full, no folder or locked for long: the run does without
    with tempfile.TemporaryDirectory() as temporary:
        return _download(Path(temporary)), (f"downloaded Tiny Shakespeare; it could not be kept in {cached.parent}",)


def _from_folder(folder: str) -> bytes:
    path = Path(folder) / FILE
    if not path.is_file():
        raise BadInput(f"MINIGPT_DATA={folder}: no {FILE} in that folder: put it there or unset MINIGPT_DATA")
    raw = _read(path)
    if reason := _not_the_file(raw):
        raise BadInput(f"{path}: {reason}")
    return raw


def _from_cache(cached: Path) -> bytes | None:
    raw = cached.read_bytes() if cached.is_file() else b""
    return None if _not_the_file(raw) else raw


def _download(folder: Path) -> bytes:
    """Downloads the file into a folder and returns its bytes. NoDownload, with the reason, where two tries fail.

    pooch writes a temporary file and renames it where the hash is right: nobody sees half a file under its name.
    """
    with warnings.catch_warnings():  # of its progress bar, where a notebook lacks widgets
        warnings.simplefilter("ignore")
        import pooch
    import requests

    def fetch(url: str, file: str, _: pooch.Pooch) -> None:
        pooch.HTTPDownloader(timeout=TIMEOUT_SECONDS)(url, file, None)
        if reason := _not_the_file(Path(file).read_bytes()):  # says more than pooch's word on the hash
            raise ValueError(reason)

    pooch.get_logger().setLevel("ERROR")  # the user gets one note, not pooch's lines
    registry = {FILE: f"sha256:{SHA256}"}
    library = pooch.create(folder, base_url="", registry=registry, urls={FILE: URL}, retry_if_failed=1)
    try:
        return Path(library.fetch(FILE, downloader=fetch)).read_bytes()  # pyright: ignore[reportArgumentType]
    except (requests.RequestException, ValueError) as error:
        cause: BaseException = error
        while cause.__context__:  # from requests' long account down to "Name or service not known"
            cause = cause.__context__
        raise NoDownload(getattr(cause, "strerror", None) or str(cause)) from None


def _not_the_file(raw: bytes) -> str | None:
    """Returns why these bytes are not Tiny Shakespeare, or None if they are."""
    if hashlib.sha256(raw).hexdigest() == SHA256:
        return None
    if raw.lstrip()[:15].lower().startswith((b"<!doctype", b"<html")):
        return "an HTML page came instead of the text, perhaps a network login"
    return f"not the expected file: {len(raw):,} bytes of 1,115,394, or other content (its sha256 differs)"


def _standard_library() -> str:
    """Returns the sources of STDLIB_MODULES as one text, with what is not ASCII left out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [folder / f"{module}.py" for module in STDLIB_MODULES]
    sources = [file.read_bytes() for file in files if file.is_file()]
    if not sources:
        raise BadInput(f"--corpus stdlib: no Python sources in {folder}: use a text file")
    return decode(b"\n".join(sources).decode("ascii", "ignore").encode(), "stdlib")
