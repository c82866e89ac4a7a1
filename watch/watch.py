"""Shows a run to people, by sinks. No sink can end a run or change it.

A sink is an object with a `name` and the methods of Sink, each of which does nothing by default. log.csv is no sink: it
is the truth about a run, and a run that cannot write it does not start.
"""

import sys
from contextlib import suppress

from run.log import Row


class Sink:
    """Something that shows a run."""

    name = "sink"

    def begin(self) -> None:
        """The run starts."""

    def step(self) -> None:
        """One more step is done."""

    def row(self, row: Row) -> None:
        """A row of the log."""

    def event(self, text: str) -> None:
        """A line about something that happened, like a checkpoint that was not saved."""

    def end(self) -> None:
        """The run has ended, in whatever way."""


class Watch:
    """Tells every sink what happens. A sink that raises an exception is named in one note and then left out."""

    def __init__(self, sinks: list[Sink]):
        self.sinks = list(sinks)
        self.dropped = False  # whether a sink was left out

    def step(self) -> None:
        self._tell("step")

    def row(self, row: Row) -> None:
        self._tell("row", row)

    def event(self, text: str) -> None:
        self._tell("event", text)
        if self.dropped:  # perhaps the one that would have shown it
            _note(text)

    def __enter__(self):
        self._tell("begin")
        return self

    def __exit__(self, *exception):
        self._tell("end")

    def _tell(self, method: str, *arguments) -> None:
        for sink in list(self.sinks):
            try:
                getattr(sink, method)(*arguments)
            except Exception as error:
                self.sinks.remove(sink)
                self.dropped = True
                _note(f"no {sink.name}: {error}")


def _note(text: str) -> None:
    with suppress(OSError, ValueError):  # standard error may be full, or closed
        print(f"note    {text}", file=sys.stderr, flush=True)
