"""Counts on a CPU what each version of csrc/bf16_linear.cu moves: `python benchmark.py traffic`. It needs g++.

The emulator counts the 32-byte sectors that each request of a warp touches, as if there were no cache. A
version that moves more bytes than it needs relies on the caches for the rest. The table has no ratio of two
sides: 1.00 is the least that can be moved, and less is better.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from amp.formats import to_bf16_bits
from base.errors import BadInput
from base.flags import read_flags
from benchmarks.report import ReportSettings, find_table, finish
from csrc.cuda_on_cpu.emulator import COMPILER, aligned, counters, library, linear

IDEAS = ["a thread per row", "a warp per row", "16-byte loads", "rows and splits", "8 vectors at once", "tensor cores"]
VECTORS = [1, 1, 1, 1, 8, 128]  # what each version is for


def measured(
    path: Path | None = None, versions: Sequence[int] = range(6), m: int = 768, k: int = 3072, **device
) -> list[dict]:
    """Returns a row for each version and type of weights. x and y are bf16, as in training and decoding.

    path: the emulator's library. device: what it pretends to be.
    """
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
    """Returns the rows as a Markdown table."""
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
class TrafficSettings(ReportSettings):
    """Flags of `benchmark.py traffic`: those of every benchmark."""


def main(argv: list[str]) -> None:
    """Counts every version. BadInput lists all faults of the command line."""
    values, faults = read_flags(TrafficSettings, argv, "benchmark.py traffic", __doc__ or "")
    settings = TrafficSettings(**values)
    if COMPILER is None:
        faults.append("g++ is missing, or this is not Linux: it runs the kernels on the CPU")
    if faults:
        raise BadInput("\n".join(faults))
    if settings.readme:
        find_table("traffic")
    rows = measured()
    finish("traffic", rows, "counted on a CPU", settings, text=markdown(rows))
