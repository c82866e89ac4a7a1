"""Sinks see all of a run, and cannot end it."""

import io
import sys

import pytest

from tests.conftest import numbers
from watch.watch import Sink, Watch

METHODS = {"begin": (), "step": (), "row": ("a row",), "event": ("a line",), "end": ()}


class Recording(Sink):
    name = "recording"

    def __init__(self):
        self.calls = []

    def begin(self):
        self.calls.append("begin")

    def step(self):
        self.calls.append("step")

    def row(self, row):
        self.calls.append(("row", row))

    def event(self, text):
        self.calls.append(("event", text))

    def end(self):
        self.calls.append("end")


def failing(method: str) -> Sink:
    """A sink that raises an exception in one of its methods."""

    def fail(*arguments):
        raise ValueError("no room")

    sink = Recording()
    sink.name = "failing"
    setattr(sink, method, fail)
    return sink


def a_short_run(watch: Watch) -> None:
    with watch:
        watch.step()
        watch.row("a row")
        watch.event("a line")
        watch.step()


ALL = ["begin", "step", ("row", "a row"), ("event", "a line"), "step", "end"]


def test_a_sink_sees_everything_in_order():
    sink = Recording()
    a_short_run(Watch([sink]))
    assert sink.calls == ALL


@pytest.mark.parametrize("method", METHODS)
def test_a_sink_that_fails_is_named_once_and_left_out_and_others_see_everything(capsys, method):
    first, last, bad = Recording(), Recording(), failing(method)
    a_short_run(Watch([first, bad, last]))
    assert first.calls == last.calls == ALL
    names = [call if isinstance(call, str) else call[0] for call in ALL]
    assert bad.calls == ALL[: names.index(method)]
    assert capsys.readouterr().err.startswith("note    no failing: no room\n")


def test_events_reach_standard_error_when_the_sink_that_would_show_them_is_gone(capsys):
    a_short_run(Watch([failing("begin")]))
    assert capsys.readouterr().err == "note    no failing: no room\nnote    a line\n"


def test_a_sink_ends_also_where_the_run_ends_by_an_exception():
    sink = Recording()
    with pytest.raises(ZeroDivisionError), Watch([sink]):
        raise ZeroDivisionError
    assert sink.calls == ["begin", "end"]


def test_a_note_that_nobody_reads_is_no_reason_to_end(monkeypatch):
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())
    a_short_run(Watch([failing("row")]))


def test_a_run_whose_every_sink_fails_has_the_same_log_and_weights(train_run, monkeypatch):
    flags = "--steps 4 --dtype fp16 --emulation on --dropout 0.1 --eval-every 2"
    seen, rows = train_run("seen", flags)
    for method in METHODS:
        monkeypatch.setattr(f"watch.progress.Progress.{method}", lambda *arguments: 1 / 0)
    monkeypatch.setattr("watch.plot.plot", lambda *arguments: 1 / 0)
    unseen, unseen_rows = train_run("unseen", flags)
    assert numbers(unseen_rows) == numbers(rows)
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (unseen / "step-4" / file).read_bytes() == (seen / "step-4" / file).read_bytes(), file
