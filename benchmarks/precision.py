"""Which precision to train in, by measurement: `python benchmark.py precision`.

train.py trains the chosen preset in fp32 and in each low precision, in processes of their own that take turns, once for
each seed. Adopted is the fastest precision whose loss gap is within the noise of the seeds: its validation loss after
the last step, less that of fp32 from the same seed, is on average at most the standard deviation of fp32's over the
seeds. `train.py --dtype adopted` reads that from benchmarks/results/config.json.
"""

import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from amp.formats import FORMATS
from base.errors import BadInput
from base.flags import flag, read_flags
from benchmarks.report import RESULTS, ROOT, Row, around, finish, keep
from benchmarks.worker import peak_mb
from request import Request, read
from run import log
from settings import PRESETS

LOW = tuple(name for name in FORMATS if name != "fp32")


@dataclass(frozen=True)
class PrecisionSettings:
    """Flags of `benchmark.py precision`."""

    preset: str = flag("cpu", "what is trained", tuple(PRESETS))
    dtypes: str = flag(",".join(LOW), "what is compared with fp32, with commas between")
    steps: int = flag(200, "of each run")
    seeds: int = flag(3, "runs of each precision")
    device: str = flag("auto", "auto, cpu, cuda or cuda:N")
    corpus: str = flag("tinyshakespeare", "tinyshakespeare, stdlib, or a text file")
    readme: bool = flag(False, "write the table into README.md")


class Run(NamedTuple):
    """What is left of a training run."""

    rows: list[log.Row]
    peak_mb: float  # of the whole process on a CPU, libraries included; on CUDA of the tensors

    @property
    def speed(self) -> float:
        """Tokens per second: the median of the log's rows, without the first step, which sets things up."""
        return statistics.median(row.tokens_per_second for row in self.rows[1:] or self.rows)

    @property
    def loss(self) -> float:
        return self.rows[-1].val


Runs = dict[str, list[Run]]  # {precision: [seed]}


def main(argv: list[str]) -> None:
    values, faults = read_flags(PrecisionSettings, argv, "benchmark.py precision", __doc__)
    s = PrecisionSettings(**values)
    low = s.dtypes.split(",")
    if len(set(low)) < len(low) or not set(low) <= set(LOW):
        faults.append(f"--dtypes {s.dtypes}: use {', '.join(LOW)} or both as {','.join(LOW)}; fp32 is always measured")
    if s.seeds < 2:
        faults.append(f"--seeds {s.seeds}: must be at least 2, or there is no noise to compare with")
    if faults:
        raise BadInput("\n".join(faults))
    if s.readme:
        around("precision")
    flags = ["--preset", s.preset, "--steps", str(s.steps), "--eval-every", "0"]
    where = ["--device", s.device, "--corpus", s.corpus]
    requests = {dtype: read([*flags, *where, "--dtype", dtype]) for dtype in ("fp32", *low)}  # bad input is told now
    found = requests["fp32"].settings  # no "auto" in it, and the file by its whole path
    flags += ["--device", found.device, "--corpus", found.corpus]
    runs: Runs = {dtype: [] for dtype in requests}
    for seed in range(s.seeds):
        for dtype in list(runs)[:: 1 if seed % 2 == 0 else -1]:
            runs[dtype].append(train([*flags, "--dtype", dtype, "--seed", str(seed)]))
            shown = f"{runs[dtype][-1].speed:,.0f} tok/s, loss {runs[dtype][-1].loss:.4f}"
            print(f"seed {seed + 1}/{s.seeds}  {dtype}: {shown}", file=sys.stderr)
    report(s, runs, requests)


def train(flags: list[str]) -> Run:
    """train.py in a process of its own and a folder that goes away."""
    with tempfile.TemporaryDirectory(prefix="minigpt-precision-") as folder:
        command = [sys.executable, "-m", "benchmarks.precision", *flags, "--out", str(Path(folder, "run"))]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise RuntimeError(f"train.py {' '.join(flags)} ended with status {done.returncode}; why is said above")
        return Run(log.read_log(Path(folder, "run", "log.csv")), float(done.stdout.splitlines()[-1]))


def report(s: PrecisionSettings, runs: Runs, requests: dict[str, Request]) -> None:
    """Rows, table, picture, metrics.json and config.json of the runs."""
    device = requests["fp32"].hardware.device_name
    speed = {dtype: statistics.median(run.speed for run in own) for dtype, own in runs.items()}
    peak = {dtype: statistics.median(run.peak_mb for run in own) for dtype, own in runs.items()}
    loss = {dtype: statistics.fmean(run.loss for run in own) for dtype, own in runs.items()}
    noise = statistics.stdev(run.loss for run in runs["fp32"])
    rows, speed_up, gaps = [], {}, {}
    for dtype in runs:
        if dtype == "fp32":
            continue
        pairs = list(zip(runs[dtype], runs["fp32"], strict=True))
        faster, smaller = [a.speed / b.speed for a, b in pairs], [b.peak_mb / a.peak_mb for a, b in pairs]
        case, speed_up[dtype] = f"precision/{dtype}", statistics.median(faster)
        gaps[dtype] = [a.loss - b.loss for a, b in pairs]
        rows += [
            Row(case, "fp32", speed[dtype], speed["fp32"], "tok/s", speed_up[dtype], (min(faster), max(faster))),
            Row(f"{case}/memory", "fp32", peak[dtype], peak["fp32"], "MB", statistics.median(smaller), _range(smaller)),
        ]
    gap = {dtype: statistics.fmean(own) for dtype, own in gaps.items()}
    chosen = adopt(speed, gap, noise)
    lacking = [f"{dtype} is {r.hardware.how}" for dtype, r in requests.items() if r.hardware.emulated]
    metrics = {
        "device": device,
        "preset": s.preset,
        "steps": s.steps,
        "seeds": s.seeds,
        "tokens_per_second": speed,
        "speed_up": speed_up,
        "peak_mb": peak,
        "final_loss": loss,
        "loss_gap": gap,
        "loss_gap_range": {dtype: _range(own) for dtype, own in gaps.items()},
        "noise": noise,
        "note": "; ".join(lacking) or None,
    }
    picture(runs, gaps, noise, device)
    keep("metrics.json", {"m6_precision": metrics})
    keep("config.json", {"precision": chosen, "measured_on": device})
    more = {"m6_precision": metrics, "adopted": chosen}
    finish("precision", rows, device, s.readme, more, text=table(metrics, chosen))


def adopt(speed: dict[str, float], gap: dict[str, float], noise: float) -> str:
    """The fastest precision whose mean loss gap to fp32 is within the noise of the seeds; a better loss is no fault."""
    within = ["fp32", *(dtype for dtype in gap if gap[dtype] <= noise)]
    return max(within, key=lambda dtype: speed[dtype])


def _range(values: list[float]) -> tuple[float, float]:
    return min(values), max(values)


def table(m: dict, chosen: str) -> str:
    """What was measured as a Markdown table, with a line below that says what was adopted."""
    lines = [
        "| precision | tok/s | against fp32 | peak memory | validation loss | gap to fp32 | its range |",
        "|---|---|---|---|---|---|---|",
    ]
    for dtype, speed in m["tokens_per_second"].items():
        cells = [dtype, f"{speed:,.0f}", "", f"{m['peak_mb'][dtype]:,.0f} MB", f"{m['final_loss'][dtype]:.4f}", "", ""]
        if dtype in m["loss_gap"]:
            low, high = m["loss_gap_range"][dtype]
            cells[2], cells[5] = f"**{m['speed_up'][dtype]:.2f}**", f"{m['loss_gap'][dtype]:+.4f}"
            cells[6] = f"{low:+.4f} to {high:+.4f}"
        lines.append(f"| {' | '.join(cells)} |")
    what = f"Preset `{m['preset']}`, {m['steps']} steps, {m['seeds']} seeds, of which fp32's loss spreads by "
    what += f"{m['noise']:.4f} (standard deviation). Adopted: **{chosen}**, the fastest whose gap is at most that."
    note = f" Note: {m['note']}." if m["note"] else ""
    return "\n".join(lines) + f"\n\n{what}{note}"


def picture(runs: Runs, gaps: dict[str, list[float]], noise: float, device: str) -> None:
    """Three panels: the loss of one seed, every seed's gap against the noise, and the speed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (curves, gap, speed) = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    for i, (dtype, own) in enumerate(runs.items()):
        rows, color = own[0].rows, f"C{i}"
        style = ("-", "--", ":")[i]  # the curves lie on each other
        curves.plot([r.step for r in rows], [r.loss for r in rows], color=color, linestyle=style, label=dtype)
        if dtype in gaps:
            gap.plot([dtype] * len(own), gaps[dtype], "o", color=color, alpha=0.6)
        speed.bar(dtype, statistics.median(run.speed for run in own), color=color)
        speed.plot([dtype] * len(own), [run.speed for run in own], ".", color="black", markersize=4)
    curves.set(xlabel="step", ylabel="training loss, nats per token", title="one seed")
    curves.legend()
    gap.axhspan(-noise, noise, color="gray", alpha=0.2, label="± noise of the seeds in fp32")
    gap.axhline(0, color="gray", linewidth=0.8)
    gap.margins(x=0.4, y=0.3)
    gap.set(ylabel="validation loss less fp32's", title="each seed, after the last step")
    gap.legend(fontsize="small")
    speed.set(ylabel="tokens per second", title=device)
    RESULTS.mkdir(parents=True, exist_ok=True)
    figure.savefig(RESULTS / "precision-runs.png", dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    import train as script  # in this process, so that its peak memory can be asked for after it

    status = script.main(sys.argv[1:])
    print(peak_mb(sys.argv[sys.argv.index("--device") + 1]))
    sys.exit(status)
