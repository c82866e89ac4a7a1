"""What each version of csrc/bf16_linear.cu moves, counted on a CPU: the ladder's table, on any machine with g++.

Counted are the 32-byte sectors that each request of a warp touches, as if there were no cache: what a version moves
beyond the bytes it needs is what it asks the caches to save.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from amp.formats import to_bf16_bits
from base.errors import BadInput
from base.flags import flag, read_flags
from benchmarks.report import around, finish
from csrc.cuda_on_cpu.emulator import COMPILER, aligned, counters, library, linear

IDEAS = ["a thread per row", "a warp per row", "16-byte loads", "rows and splits", "8 vectors at once", "tensor cores"]
VECTORS = [1, 1, 1, 1, 8, 128]  # what each version is for


def measured(path: Path | None = None, versions=range(6), m: int = 768, k: int = 3072, **device) -> list[dict]:
    """A row for each version and type of weights. x and y are bf16, as in training and decoding."""
    path = path or library("counted")
    rng = np.random.default_rng(0)
    rows = []
    for version in versions:
        n = VECTORS[version]
        x = aligned(to_bf16_bits(rng.standard_normal((n, k), dtype=np.float32)))
        weight = rng.standard_normal((m, k), dtype=np.float32)
        y = aligned(np.zeros((n, m), np.uint16))
        for weights, array in (("fp32", aligned(weight)), ("bf16", aligned(to_bf16_bits(weight)))):
            linear(x, array, None, version, path=path, y=y, **device)
            count = counters(path)
            rows.append(
                {
                    "version": version,
                    "weights": weights,
                    "n": n,
                    "m": m,
                    "k": k,
                    "weight_bytes": count.sectors[1] * 32 / array.nbytes,  # moved / needed
                    "all_sectors": sum(count.sectors) / sum(count.perfect),  # moved / had each request been coalesced
                    "requests": count.requests,
                    "conflicts": count.conflicts,
                    "barriers": count.barriers,
                }
            )
    return rows


def markdown(rows: list[dict]) -> str:
    lines = [
        "| version | weights | vectors | weight bytes moved / needed | sectors / coalesced | requests | bank conflicts"
        " | barriers |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| v{row['version']} {IDEAS[row['version']]} | {row['weights']} | {row['n']} | {row['weight_bytes']:.2f}"
            f" | {row['all_sectors']:.2f} | {row['requests']:,} | {row['conflicts']:,} | {row['barriers']:,} |"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class TrafficSettings:
    """Flags of `benchmark.py traffic`."""

    readme: bool = flag(False, "write the table into README.md")


def main(argv: list[str]) -> None:
    values, faults = read_flags(TrafficSettings, argv, "benchmark.py traffic", __doc__)
    s = TrafficSettings(**values)
    if COMPILER is None:
        faults.append("g++ is missing, or this is not Linux: it runs the kernels on the CPU")
    if faults:
        raise BadInput("\n".join(faults))
    if s.readme:
        around("traffic")
    rows = measured()
    finish("traffic", rows, "counted on a CPU", s.readme, text=markdown(rows))
