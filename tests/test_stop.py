"""Signals. Those to this process are sent by the process itself, at the moment that a test is about."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from base import files
from run import checkpoint
from run.folder import find, find_intact
from run.log import read_log
from run.stop import Stop
from tests.conftest import TINY, numbers

ROOT = Path(__file__).resolve().parent.parent
BOTH = [(signal.SIGTERM, 143), (signal.SIGINT, 130)]
EXACT = "--steps 12 --dtype fp16 --emulation on --dropout 0.1 --eval-every 4 --save-every 6"


def signal_at(monkeypatch, name: str, arguments_hold: str, call: int, number: int) -> None:
    """Sends the signal to this process in the n-th call, with such arguments, of a function that train.py uses."""
    module, attribute = name.split(".")
    owner = {"train": sys.modules["train"], "files": files}[module]
    function, calls = getattr(owner, attribute), iter(range(1, 10**6))

    def signalling(*arguments):
        if arguments_hold in str(arguments) and next(calls) == call:
            os.kill(os.getpid(), number)
        return function(*arguments)

    monkeypatch.setattr(owner, attribute, signalling)


MOMENTS = {
    "a step": ("train.learning_rate", "", 5, 5),
    "a step that is saved anyway": ("train.learning_rate", "", 6, 6),
    "evaluation": ("train.mean_loss", "", 1, 4),
    "a save": ("files.write", "step-6", 3, 6),
    "the save of the last step": ("files.write", "step-12", 3, 12),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(("number", "status"), BOTH)
def test_a_signal_lets_the_step_end_and_saves_it(train_run, monkeypatch, capsys, moment, number, status):
    *at, step = MOMENTS[moment]
    with monkeypatch.context() as patched:
        signal_at(patched, *at, number)
        out, _ = train_run("run", EXACT, status=status)
    error = capsys.readouterr().err
    assert f"{out / f'step-{step}'} is saved; go on with: " in error
    assert f"--resume {out}" in error
    assert checkpoint.damage(out / f"step-{step}") is None
    assert find_intact(str(out)) == (out / f"step-{step}", [])
    assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


@pytest.mark.parametrize("moment", ["a step", "evaluation", "a save"])
def test_a_run_that_was_stopped_goes_on_exactly(train_run, monkeypatch, moment):
    import train

    *at, _ = MOMENTS[moment]
    whole, rows = train_run("whole", EXACT)
    with monkeypatch.context() as patched:
        signal_at(patched, *at, signal.SIGTERM)
        stopped, _ = train_run("stopped", EXACT, status=143)
    assert train.main(["--resume", str(stopped), "--device", "cpu"]) == 0
    assert numbers(read_log(stopped / "log.csv")) == numbers(rows)
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (stopped / "step-12" / file).read_bytes() == (whole / "step-12" / file).read_bytes(), file


def test_a_signal_that_comes_twice_at_once_is_one():
    """As `timeout` and `make` send it."""
    with Stop() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
    script = (
        "import os, signal, threading, time; from run.stop import Stop\n"
        "threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
        "with Stop() as stop:\n    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(0.1)\nprint(stop.signal)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "15\n")


@pytest.mark.skipif(os.name != "posix", reason="Windows ends a process by other means")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_process_at_once(number):
    script = "import time; from run.stop import Stop\nwith Stop():\n    print(flush=True)\n    time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    process.send_signal(number)
    assert process.stderr.readline() == "\n"
    assert "once more ends the run at once" in process.stderr.readline()
    time.sleep(0.3)
    assert process.poll() is None  # the first one is only noted
    process.send_signal(number)
    assert process.wait(timeout=10) == -number


@pytest.mark.skipif(os.name != "posix", reason="Windows has other signals")
@pytest.mark.parametrize(("number", "status"), BOTH)
def test_a_process_that_is_told_to_stop_saves_and_says_how_to_go_on(tmp_path, corpus, number, status):
    out = tmp_path / "run"
    flags = [*TINY.split(), "--steps", "100000", "--corpus", str(corpus), "--out", str(out)]
    command = [sys.executable, str(ROOT / "train.py"), *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: (out / "log.csv").is_file() and len((out / "log.csv").read_text().splitlines()) > 3)
    process.send_signal(number)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == status
    step = find(str(out)).name
    assert f"train.py: {number.name}: {out / step} is saved; go on with: " in error
    assert checkpoint.damage(out / step) is None


def wait_for(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
