"""After SIGTERM or Ctrl-C the loop ends with the step that is running, and saves it."""

import os
import signal
import time
from contextlib import suppress

from base.errors import Ended

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Ended):
    """A signal ended the run between two steps. `status` is the exit status that shells give to it: 143 or 130."""

    def __init__(self, number: int, message: str):
        super().__init__(f"{signal.Signals(number).name}: {message}")
        self.status = 128 + number


class Stop:
    """Notes the first SIGTERM or Ctrl-C of its block in `signal`. The next one ends the process at once."""

    def __init__(self):
        self.signal: int | None = None

    def __enter__(self):
        self.handlers_before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *exception):
        for number, handler in self.handlers_before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame) -> None:
        self.signal = number
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        line = f"\n{signal.Signals(number).name}: this step ends and is saved; once more ends the run at once\n"
        with suppress(OSError):
            os.write(2, line.encode())  # print may be the call that was interrupted, and is not re-entrant
        time.sleep(0.1)  # `timeout` and `make` send their signal twice
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
