"""Where the text comes from. Every server here is on 127.0.0.1, every cache in a temporary folder."""

import errno
import hashlib
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

import data.corpus
from base.cache import cache_folder
from base.errors import BadInput
from data.batches import Batches
from data.corpus import FILE, Corpus, load_corpus
from data.tokenizers import train_tokenizer

ROOT = Path(__file__).parents[1]
TEXT = b"First Citizen:\nBefore we proceed any further, hear me speak.\n" * 40  # stands for Tiny Shakespeare
HTML = b"\n<!DOCTYPE html><html><body>Please log in</body></html>"
REAL_FOLDER = os.environ.get("MINIGPT_DATA", "")
NOWHERE = "http://127.0.0.1:1/input.txt"  # nothing listens there


class Answer(NamedTuple):
    body: bytes = TEXT
    status: int = 200
    missing: int = 0  # bytes that Content-Length announces and the body lacks


class Server(ThreadingHTTPServer):
    """Gives the n-th request the n-th of `answers`, the last of them from then on."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers, self.requests, self.lock = [Answer()], 0, threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}/input.txt"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        with self.server.lock:
            answer = self.server.answers[min(self.server.requests, len(self.server.answers) - 1)]
            self.server.requests += 1
        threading.Event().wait(0.1)  # so that two downloads at once would overlap
        self.send_response(answer.status)
        self.send_header("Content-Length", str(len(answer.body) + answer.missing))
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, *args):
        pass


@pytest.fixture(autouse=True)
def nothing_real(monkeypatch, tmp_path):
    """No real network, no real cache, no proxy, no waiting between two tries."""
    for name in ("HOME", "USERPROFILE", "LOCALAPPDATA"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("MINIGPT_DATA", raising=False)
    monkeypatch.setattr(data.corpus, "URL", NOWHERE)
    monkeypatch.setattr(data.corpus, "SHA256", hashlib.sha256(TEXT).hexdigest())
    monkeypatch.setattr("pooch.core.time", SimpleNamespace(sleep=lambda seconds: None))
    assert cache_folder().is_relative_to(tmp_path)


@pytest.fixture
def server(monkeypatch):
    with Server() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        monkeypatch.setattr(data.corpus, "URL", server.url)
        yield server
        server.shutdown()


def data_folder(monkeypatch, folder: Path, content: bytes | None) -> None:
    """Sets MINIGPT_DATA to `folder`, with `content` as the file in it."""
    folder.mkdir()
    if content is not None:
        (folder / FILE).write_bytes(content)
    monkeypatch.setenv("MINIGPT_DATA", str(folder))


def cache(content: bytes) -> None:
    cache_folder().mkdir(parents=True)
    (cache_folder() / FILE).write_bytes(content)


def cached_files() -> set[str]:
    """The names of the files in the cache, without the lock's."""
    return {path.name for path in cache_folder().glob("*") if path.suffix != ".lock"}


def assert_stdlib_instead(corpus: Corpus, why: str) -> None:
    """One note of one line says why, and how to have Tiny Shakespeare."""
    assert corpus.name == "stdlib"
    assert corpus.text == load_corpus("stdlib").text
    (note,) = corpus.notes
    assert why in note
    assert "MINIGPT_DATA" in note
    assert "\n" not in note


def assert_not_kept(corpus: Corpus) -> None:
    assert corpus.text == TEXT.decode()
    assert corpus.notes == (f"downloaded Tiny Shakespeare; it could not be kept in {cache_folder()}",)
    assert not list(cache_folder().glob(f"*{FILE}*"))


def python(script: str, *arguments: str, **environment: str) -> subprocess.Popen:
    """A Python process that imports from the repository."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="ascii",
    )


# ---- $MINIGPT_DATA


def test_the_file_in_minigpt_data_is_used_without_network_and_cache(monkeypatch, tmp_path):
    data_folder(monkeypatch, tmp_path / "data", TEXT)
    assert load_corpus("tinyshakespeare") == ("tinyshakespeare", TEXT.decode(), ())
    assert not cache_folder().exists()


@pytest.mark.parametrize(
    ("content", "fault"),
    [(None, "MINIGPT_DATA={folder}: no {file} in"), (TEXT[:-1] + b"!", "{folder}/{file}: not the expected file")],
    ids=["no file", "damaged"],
)
def test_a_bad_minigpt_data_is_refused_by_its_path(monkeypatch, tmp_path, server, content, fault):
    data_folder(monkeypatch, tmp_path / "data", content)
    with pytest.raises(BadInput) as error:
        load_corpus("tinyshakespeare")
    assert str(error.value).startswith(fault.format(folder=tmp_path / "data", file=FILE))
    assert server.requests == 0  # nothing is downloaded instead


# ---- the cache and the download


def test_a_cached_file_is_used_without_the_network():
    cache(TEXT)
    assert load_corpus("tinyshakespeare") == ("tinyshakespeare", TEXT.decode(), ())


def test_a_download_is_kept_in_the_cache_without_a_temporary(server):
    corpus = load_corpus("tinyshakespeare")
    assert corpus.text == TEXT.decode()
    assert str(cache_folder() / FILE) in corpus.notes[0]
    assert (cache_folder() / FILE).read_bytes() == TEXT
    assert cached_files() == {FILE}
    load_corpus("tinyshakespeare")
    assert server.requests == 1


def test_the_cache_name_appears_only_with_the_whole_content(monkeypatch, server):
    rename, renamed = os.rename, []

    def observed(temporary: str, target: str):
        renamed.append(Path(target))
        assert Path(temporary).parent == Path(target).parent  # one file system: the rename is atomic
        assert Path(temporary).read_bytes() == TEXT
        assert not Path(target).exists()
        rename(temporary, target)

    monkeypatch.setattr(os, "rename", observed)
    load_corpus("tinyshakespeare")
    assert renamed == [cache_folder() / FILE]
    assert (cache_folder() / FILE).read_bytes() == TEXT


def test_a_damaged_cache_is_downloaded_again(server):
    cache(TEXT[:100])
    assert load_corpus("tinyshakespeare").text == TEXT.decode()
    assert (cache_folder() / FILE).read_bytes() == TEXT


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        pytest.param(Answer(TEXT[:-7]), f"not the expected file: {len(TEXT) - 7:,} bytes", id="truncated"),
        pytest.param(Answer(TEXT[:-7], missing=7), "7 more expected", id="connection cut"),
        pytest.param(Answer(HTML), "an HTML page came instead of the text", id="HTML"),
        pytest.param(Answer(b"", status=404), "404", id="404"),
    ],
)
def test_a_bad_answer_is_refused_with_its_reason_and_leaves_nothing_in_the_cache(server, answer, why):
    server.answers = [answer]
    assert_stdlib_instead(load_corpus("tinyshakespeare"), why)
    assert cached_files() == set()


def test_a_server_that_does_not_answer_is_not_waited_for(monkeypatch, server):
    monkeypatch.setattr(data.corpus, "TIMEOUT_SECONDS", 0.01)
    assert_stdlib_instead(load_corpus("tinyshakespeare"), "timed out")


@pytest.mark.parametrize(
    "first", [Answer(b"", status=503), Answer(TEXT[:50]), Answer(TEXT[:50], missing=9)], ids=["503", "short", "cut"]
)
def test_a_failed_download_is_tried_once_more(server, first):
    server.answers = [first, Answer()]
    assert load_corpus("tinyshakespeare").text == TEXT.decode()
    assert server.requests == 2


def test_there_is_no_third_try(server):
    server.answers = [Answer(b"", status=503), Answer(b"", status=503), Answer()]
    assert_stdlib_instead(load_corpus("tinyshakespeare"), "503")
    assert server.requests == 2


def test_two_processes_at_once_download_once(server):
    script = (
        "import sys\n"
        "import data.corpus\n"
        "data.corpus.URL, data.corpus.SHA256 = sys.argv[1:]\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "corpus = data.corpus.load_corpus('tinyshakespeare')\n"
        "print(corpus.name, len(corpus.text), len(corpus.notes))\n"
    )
    processes = [python(script, server.url, data.corpus.SHA256) for _ in range(2)]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 2
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = sorted(process.communicate(timeout=20)[0] for process in processes)
    assert answers == [f"tinyshakespeare {len(TEXT)} {notes}\n" for notes in (0, 1)]
    assert server.requests == 1


def test_a_cache_folder_that_cannot_exist_does_not_stop_the_download(monkeypatch, tmp_path, server):
    (tmp_path / "file").write_text("not a folder")
    for name in ("XDG_CACHE_HOME", "HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(name, str(tmp_path / "file"))
    assert_not_kept(load_corpus("tinyshakespeare"))


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", ["mkdir", "open"])  # of the folder; of the lock
def test_a_read_only_cache_does_not_stop_the_download(monkeypatch, server, name, code):
    original = getattr(os, name)

    def fails_in_the_cache(path, *args, **kwargs):
        if Path(path).is_relative_to(cache_folder()):
            raise OSError(code, os.strerror(code))
        return original(path, *args, **kwargs)

    monkeypatch.setattr(os, name, fails_in_the_cache)
    assert_not_kept(load_corpus("tinyshakespeare"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_cache_does_not_stop_the_download(monkeypatch, server):
    original = open

    def full_in_the_cache(path, *args, **kwargs):
        return original("/dev/full" if Path(path).is_relative_to(cache_folder()) else path, *args, **kwargs)

    monkeypatch.setattr("pooch.downloaders.open", full_in_the_cache, raising=False)
    assert_not_kept(load_corpus("tinyshakespeare"))


def test_without_a_network_the_standard_library_is_used_and_one_note_says_so():
    assert_stdlib_instead(load_corpus("tinyshakespeare"), f"no Tiny Shakespeare ({os.strerror(errno.ECONNREFUSED)})")
    assert cached_files() == set()


def test_without_a_cache_and_a_network_the_note_names_the_network(monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("not a folder")
    assert_stdlib_instead(load_corpus("tinyshakespeare"), f"no Tiny Shakespeare ({os.strerror(errno.ECONNREFUSED)})")


# ---- the standard library


def test_the_standard_library_is_about_a_megabyte_of_ascii():
    text = load_corpus("stdlib").text
    assert text.isascii()
    assert "\r" not in text
    assert 700_000 < len(text) < 2_000_000


def test_the_standard_library_is_the_same_in_another_process():
    script = "from data.corpus import load_corpus; print(load_corpus('stdlib').sha256)"
    assert python(script).communicate(timeout=20)[0].strip() == load_corpus("stdlib").sha256


def test_a_python_without_sources_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(data.corpus.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(BadInput, match="stdlib"):
        load_corpus("stdlib")


# ---- a file of one's own


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        pytest.param("Zoë\n".encode("utf-8-sig"), "Zoë\n", id="byte-order mark"),
        pytest.param("a\ufeffb".encode(), "a\ufeffb", id="the same character inside"),
        pytest.param(b"one\r\ntwo\r\n", "one\ntwo\n", id="CRLF"),
        pytest.param(b"one\rtwo\r\rthree", "one\ntwo\n\nthree", id="CR"),
        pytest.param("Ünïcödé 🎭 \x00".encode(), "Ünïcödé 🎭 \x00", id="beyond ASCII"),
    ],
)
def test_a_text_file_is_read(tmp_path, raw, text):
    path = tmp_path / "mine.txt"
    path.write_bytes(raw)
    assert load_corpus(str(path)) == (str(path), text, ())


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        pytest.param("Zoë".encode("latin-1"), "not UTF-8: byte 0xeb at offset 2", id="not UTF-8"),
        pytest.param(b"", "empty", id="nothing"),
        pytest.param(b"\xef\xbb\xbf", "empty", id="only a byte-order mark"),
        pytest.param(None, "cannot be read", id="no file"),
    ],
)
def test_a_bad_text_file_is_refused_by_its_path(tmp_path, raw, fault):
    path = tmp_path / "bad.txt"
    if raw is not None:
        path.write_bytes(raw)
    with pytest.raises(BadInput) as error:
        load_corpus(str(path))
    assert str(error.value).startswith(f"{path}: {fault}")


def test_a_folder_is_not_a_text_file(tmp_path):
    with pytest.raises(BadInput) as error:
        load_corpus(str(tmp_path))
    assert str(error.value).startswith(f"{tmp_path}: cannot be read")


def test_the_locale_does_not_change_the_text(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_bytes("Ünïcödé 🎭\r\n".encode())
    script = (
        "import sys, locale\n"
        "from data.corpus import load_corpus\n"
        "print(sys.flags.utf8_mode, ascii(load_corpus(sys.argv[1]).text))\n"
    )
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    output = python(script, str(path), **plain).communicate(timeout=20)[0]
    assert output == f"0 {load_corpus(str(path)).text!a}\n"


# ---- the real file


@pytest.mark.skipif(not Path(REAL_FOLDER, FILE).is_file(), reason=f"MINIGPT_DATA has no {FILE}")
def test_tiny_shakespeare_is_the_file_that_everybody_uses(monkeypatch):
    monkeypatch.undo()
    text = load_corpus("tinyshakespeare").text
    assert len(text) == 1_115_394
    assert len(set(text)) == 65
    batches = Batches(train_tokenizer("char", text).encode(text), block_size=64, batch_size=12, seed=0)
    assert len(batches.tokens["train"]) == 1_003_854
    assert len(batches.tokens["val"]) == 111_540
