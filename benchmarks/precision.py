"""Which precision to train in, by measurement: `python benchmark.py precision`.

train.py trains the chosen preset in fp32 and in each low precision, once for each seed, in processes that
take turns. A precision's loss gap is its validation loss after the last step, less that of fp32 from the same
seed. The fastest precision is adopted whose mean gap is within the noise of the seeds: at most the standard
deviation of fp32's loss over the seeds. `train.py --dtype adopted` reads the choice from config.json in the
default results folder.
"""

import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import train
from amp.formats import FORMATS
from base.errors import BadInput
from base.flags import flag, out_of_bounds, read_flags
from benchmarks.report import ROOT, ReportSettings, Row, find_table, finish
from benchmarks.worker import peak_mb
from request import Request, read
from run import log
from settings import PRESETS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOW = tuple(name for name in FORMATS if name != "fp32")


@dataclass(frozen=True)
class PrecisionSettings(ReportSettings):
    """Flags of `benchmark.py precision`."""

    preset: str = flag("cpu", "what is trained", tuple(PRESETS))
    dtypes: str = flag(",".join(LOW), "what is compared with fp32, with commas between")
    steps: int = flag(200, "steps of each run")
    seeds: int = flag(
        3, "runs of each precision; how much they differ is the noise that a gap is compared with", at_least=2
    )
    device: str = flag("auto", "auto, cpu, cuda or cuda:N")
    corpus: str = flag("tinyshakespeare", "tinyshakespeare, stdlib, or a text file")


class Trained(NamedTuple):
    """What is measured of a training run."""

    rows: list[log.Row]
    peak_mb: float  # of the whole process on a CPU, libraries included; on CUDA of the tensors

    @property
    def speed(self) -> float:
        """Tokens per second: the median of the log's rows, without the first step, which sets things up."""
        return statistics.median(row.tokens_per_second for row in self.rows[1:] or self.rows)

    @property
    def loss(self) -> float:
        """The validation loss after the last step."""
        loss = self.rows[-1].val
        assert loss is not None  # train.py validates after its last step
        return loss


Runs = dict[str, list[Trained]]  # {precision: [seed]}


def main(argv: list[str]) -> None:
    """Trains, compares and adopts. BadInput lists all faults of the command line."""
    values, faults = read_flags(PrecisionSettings, argv, "benchmark.py precision", __doc__ or "")
    settings = PrecisionSettings(**values)
    low = settings.dtypes.split(",")
    if len(set(low)) < len(low) or not set(low) <= set(LOW):
        names = f"{', '.join(LOW)} or both as {','.join(LOW)}"
        faults.append(f"--dtypes {settings.dtypes}: use {names}; fp32 is always measured")
    faults += out_of_bounds(settings)
    if faults:
        raise BadInput("\n".join(faults))
    if settings.readme:
        find_table("precision")
    flags = ["--preset", settings.preset, "--steps", str(settings.steps), "--eval-every", "0"]
    where = ["--device", settings.device, "--corpus", settings.corpus]
    requests = {dtype: read([*flags, *where, "--dtype", dtype]) for dtype in ("fp32", *low)}  # bad input is told now
    resolved = requests["fp32"].settings  # no "auto" in it, and the file by its whole path
    flags += ["--device", resolved.device, "--corpus", resolved.corpus]
    runs: Runs = {dtype: [] for dtype in requests}
    for seed in range(settings.seeds):
        for dtype in list(runs)[:: 1 if seed % 2 == 0 else -1]:
            trained = measure_run([*flags, "--dtype", dtype, "--seed", str(seed)])
            runs[dtype].append(trained)
            shown = f"{trained.speed:,.0f} tok/s, loss {trained.loss:.4f}"
            print(f"seed {seed + 1}/{settings.seeds}  {dtype}: {shown}", file=sys.stderr)
    report(settings, runs, requests)


def measure_run(flags: list[str]) -> Trained:
    """Runs train.py in a process of its own and a folder that goes away."""
    with tempfile.TemporaryDirectory(prefix="minigpt-precision-") as folder:
        command = [sys.executable, "-m", "benchmarks.precision", *flags, "--out", str(Path(folder, "run"))]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise RuntimeError(f"train.py {' '.join(flags)} ended with status {done.returncode}; why is said above")
        return Trained(log.read_log(Path(folder, "run", "log.csv")), float(done.stdout.splitlines()[-1]))


def report(settings: PrecisionSettings, runs: Runs, requests: dict[str, Request]) -> None:
    """Compares the runs, adopts a precision, and writes rows, table, picture, metrics.json and config.json."""
    device = requests["fp32"].hardware.device_name
    speed = {dtype: statistics.median(run.speed for run in trained) for dtype, trained in runs.items()}
    peak = {dtype: statistics.median(run.peak_mb for run in trained) for dtype, trained in runs.items()}
    loss = {dtype: statistics.fmean(run.loss for run in trained) for dtype, trained in runs.items()}
    noise = statistics.stdev(run.loss for run in runs["fp32"])
    rows: list[Row] = []
    speed_up: dict[str, float] = {}
    gaps: dict[str, list[float]] = {}
    for dtype in runs:
        if dtype == "fp32":
            continue
        pairs = list(zip(runs[dtype], runs["fp32"], strict=True))
        faster = [low.speed / fp32.speed for low, fp32 in pairs]
        smaller = [fp32.peak_mb / low.peak_mb for low, fp32 in pairs]
        gaps[dtype] = [low.loss - fp32.loss for low, fp32 in pairs]
        speed_up[dtype] = statistics.median(faster)
        case = f"precision/{dtype}"
        memory = f"{case}/memory"
        rows += [
            Row(case, "fp32", speed[dtype], speed["fp32"], "tok/s", speed_up[dtype], range_of(faster)),
            Row(memory, "fp32", peak[dtype], peak["fp32"], "MB", statistics.median(smaller), range_of(smaller)),
        ]
    gap = {dtype: statistics.fmean(of_seeds) for dtype, of_seeds in gaps.items()}
    adopted = adopt(speed, gap, noise)
    emulated = [f"{dtype} is {r.hardware.how}" for dtype, r in requests.items() if r.hardware.emulated]
    metrics = {
        "device": device,
        "preset": settings.preset,
        "steps": settings.steps,
        "seeds": settings.seeds,
        "tokens_per_second": speed,
        "speed_up": speed_up,
        "peak_mb": peak,
        "final_loss": loss,
        "loss_gap": gap,
        "loss_gap_range": {dtype: range_of(of_seeds) for dtype, of_seeds in gaps.items()},
        "noise": noise,
        "note": "; ".join(emulated) or None,
    }
    finish(
        "precision",
        rows,
        device,
        settings,
        more={"m6_precision": metrics, "adopted": adopted},
        text=table(metrics, adopted),
        pictures={"precision-runs.png": picture(runs, gaps, noise, device)},
        kept={
            "metrics.json": {"m6_precision": metrics},
            "config.json": {"precision": adopted, "measured_on": device},
        },
    )


def adopt(speed: dict[str, float], gap: dict[str, float], noise: float) -> str:
    """Returns the fastest precision whose mean loss gap is at most the noise of the seeds, or below zero."""
    within = ["fp32", *(dtype for dtype in gap if gap[dtype] <= noise)]
    return max(within, key=lambda dtype: speed[dtype])


def range_of(values: list[float]) -> tuple[float, float]:
    return min(values), max(values)


def table(metrics: dict, adopted: str) -> str:
    """Returns the measurement as a Markdown table, with a line below that says which precision was adopted."""
    lines = [
        "| precision | tok/s | against fp32 | peak memory | validation loss | gap to fp32 | its range |",
        "|---|---|---|---|---|---|---|",
    ]
    for dtype, speed in metrics["tokens_per_second"].items():
        memory, loss = f"{metrics['peak_mb'][dtype]:,.0f} MB", f"{metrics['final_loss'][dtype]:.4f}"
        against, gap, gap_range = "", "", ""
        if dtype in metrics["loss_gap"]:
            low, high = metrics["loss_gap_range"][dtype]
            against = f"**{metrics['speed_up'][dtype]:.2f}**"
            gap = f"{metrics['loss_gap'][dtype]:+.4f}"
            gap_range = f"{low:+.4f} to {high:+.4f}"
        lines.append(f"| {' | '.join([dtype, f'{speed:,.0f}', against, memory, loss, gap, gap_range])} |")
    about = (
        f"Preset `{metrics['preset']}`, {metrics['steps']} steps, {metrics['seeds']} seeds. "
        f"The loss of fp32 spreads by {metrics['noise']:.4f} over the seeds (standard deviation). "
        f"Adopted: **{adopted}**, the fastest precision whose gap is at most that."
    )
    note = f" Note: {metrics['note']}." if metrics["note"] else ""
    return "\n".join(lines) + f"\n\n{about}{note}"


def picture(runs: Runs, gaps: dict[str, list[float]], noise: float, device: str) -> "Figure":
    """Returns three panels: the loss of one seed, every seed's gap against the noise, and the speed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    curves, gap, speed = figure.subplots(1, 3)
    for i, (dtype, trained) in enumerate(runs.items()):
        rows = trained[0].rows
        color = f"C{i}"
        style = ("-", "--", ":")[i]  # the curves lie on each other
        curves.plot([r.step for r in rows], [r.loss for r in rows], color=color, linestyle=style, label=dtype)
        if dtype in gaps:
            gap.plot([dtype] * len(trained), gaps[dtype], "o", color=color, alpha=0.6)
        speeds = [run.speed for run in trained]
        speed.bar(dtype, statistics.median(speeds), color=color)
        speed.plot([dtype] * len(trained), speeds, ".", color="black", markersize=4)
    curves.set(xlabel="step", ylabel="training loss, nats per token", title="one seed")
    curves.legend()
    gap.axhspan(-noise, noise, color="gray", alpha=0.2, label="± noise of the seeds in fp32")
    gap.axhline(0, color="gray", linewidth=0.8)
    gap.margins(x=0.4, y=0.3)
    gap.set(ylabel="validation loss less fp32's", title="each seed, after the last step")
    gap.legend(fontsize="small")
    speed.set(ylabel="tokens per second", title=device)
    return figure


if __name__ == "__main__":
    status = train.main(sys.argv[1:])  # in this process, so that its peak memory can be asked for after it
    print(peak_mb(sys.argv[sys.argv.index("--device") + 1]))
    sys.exit(status)
