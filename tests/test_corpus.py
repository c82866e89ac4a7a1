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
from data import tokenizers
from data.batches import Batches
from data.corpus import FILE, load_corpus
from data.tokenizers import train as train_tokenizer

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
    monkeypatch.setattr(data.corpus, "time", SimpleNamespace(sleep=lambda seconds: None))
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
    """What lies in the cache besides the lock."""
    return {path.name for path in cache_folder().glob("*") if path.suffix != ".lock"}


def assert_stdlib_instead(corpus) -> None:
    assert corpus.name == "stdlib"
    assert corpus.text == load_corpus("stdlib").text
    (note,) = corpus.notes
    assert "MINIGPT_DATA" in note
    assert "\n" not in note


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


def test_minigpt_data_without_the_file_is_refused_and_nothing_downloaded(monkeypatch, tmp_path, server):
    data_folder(monkeypatch, tmp_path / "data", None)
    with pytest.raises(BadInput, match="MINIGPT_DATA"):
        load_corpus("tinyshakespeare")
    assert server.requests == 0


def test_a_damaged_file_in_minigpt_data_is_refused_by_its_path(monkeypatch, tmp_path, server):
    data_folder(monkeypatch, tmp_path / "data", TEXT[:-1] + b"!")
    with pytest.raises(BadInput) as error:
        load_corpus("tinyshakespeare")
    assert str(tmp_path / "data" / FILE) in str(error.value)
    assert server.requests == 0


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
    replace, renamed = Path.replace, []

    def observed(temporary: Path, target: Path):
        renamed.append(target)
        assert temporary.parent == target.parent  # one file system: the rename is atomic
        assert temporary.read_bytes() == TEXT
        assert not target.exists()
        return replace(temporary, target)

    monkeypatch.setattr(Path, "replace", observed)
    load_corpus("tinyshakespeare")
    assert renamed == [cache_folder() / FILE]
    assert (cache_folder() / FILE).read_bytes() == TEXT


def test_a_damaged_cache_is_downloaded_again(server):
    cache(TEXT[:100])
    assert load_corpus("tinyshakespeare").text == TEXT.decode()
    assert (cache_folder() / FILE).read_bytes() == TEXT


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(Answer(TEXT[:-7]), id="truncated"),
        pytest.param(Answer(TEXT[:-7], missing=7), id="connection cut"),
        pytest.param(Answer(HTML), id="HTML"),
        pytest.param(Answer(b"", status=404), id="404"),
    ],
)
def test_a_bad_answer_is_refused_and_leaves_nothing_in_the_cache(server, answer):
    server.answers = [answer]
    assert_stdlib_instead(load_corpus("tinyshakespeare"))
    assert cached_files() == set()


def test_an_html_page_is_called_one(server):
    server.answers = [Answer(HTML)]
    assert "HTML" in load_corpus("tinyshakespeare").notes[0]


@pytest.mark.parametrize(
    "first", [Answer(b"", status=503), Answer(TEXT[:50]), Answer(TEXT[:50], missing=9)], ids=["503", "short", "cut"]
)
def test_a_failed_download_is_tried_once_more(server, first):
    server.answers = [first, Answer()]
    assert load_corpus("tinyshakespeare").text == TEXT.decode()
    assert server.requests == 2


def test_there_is_no_third_try(server):
    server.answers = [Answer(b"", status=503), Answer(b"", status=503), Answer()]
    assert_stdlib_instead(load_corpus("tinyshakespeare"))
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
    corpus = load_corpus("tinyshakespeare")
    assert corpus.text == TEXT.decode()
    assert len(corpus.notes) == 1


@pytest.mark.parametrize("method", ["mkdir", "write_bytes"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC], ids=errno.errorcode.get)
def test_an_unwritable_cache_does_not_stop_the_download(monkeypatch, server, method, code):
    def fails(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, method, fails)
    corpus = load_corpus("tinyshakespeare")
    assert corpus.text == TEXT.decode()
    assert len(corpus.notes) == 1
    assert cached_files() == set()


def test_without_a_network_the_standard_library_is_used_and_one_note_says_so():
    assert_stdlib_instead(load_corpus("tinyshakespeare"))
    assert cached_files() == set()


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


def test_bytes_that_are_not_utf8_are_named_with_their_offset(tmp_path):
    path = tmp_path / "latin1.txt"
    path.write_bytes("Zoë".encode("latin-1"))
    with pytest.raises(BadInput) as error:
        load_corpus(str(path))
    assert str(path) in str(error.value)
    assert "0xeb at offset 2" in str(error.value)


@pytest.mark.parametrize("name", ["missing.txt", "."], ids=["missing", "folder"])
def test_a_path_that_cannot_be_read_is_named(tmp_path, name):
    path = str(tmp_path / name)
    with pytest.raises(BadInput) as error:
        load_corpus(path)
    assert str(Path(path)) in str(error.value)


@pytest.mark.parametrize("raw", [b"", b"\xef\xbb\xbf"], ids=["nothing", "only a byte-order mark"])
def test_an_empty_file_is_refused_by_its_path(tmp_path, raw):
    path = tmp_path / "empty.txt"
    path.write_bytes(raw)
    with pytest.raises(BadInput) as error:
        train_tokenizer("char", load_corpus(str(path)).text)
    assert str(path) in str(error.value)


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
    batches = Batches(tokenizers.train("char", text).encode(text), block_size=64, batch_size=12, seed=0)
    assert len(batches.tokens["train"]) == 1_003_854
    assert len(batches.tokens["val"]) == 111_540
