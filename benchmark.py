"""Measures: `python benchmark.py [NAME] [flags]`, by default gemv. Each name is a file in benchmarks/."""

import sys
from importlib import import_module

from base.errors import BadInput, run_script

BENCHMARKS = {
    "gemv": "our matrix-vector product against the libraries'",
    "decode": "tokens per second of one text, ours against PyTorch's and transformers'",
    "step": "a training step against other libraries; also its profile, recomputation, the time to a loss",
    "precision": "fp32, bf16 and fp16 over several seeds, and which of them to train in",
    "traffic": "the bytes that each version of the CUDA kernel moves, counted on a CPU",
}


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 measured, 1 a check before the measurement failed, 2 bad input."""
    argv = sys.argv[1:] if argv is None else argv
    return run_script("benchmark.py", lambda: measure(argv))


def measure(argv: list[str]) -> None:
    """Runs the benchmark that the command line names. BadInput where there is none of that name."""
    if argv and argv[0] in ("-h", "--help"):
        names = "\n".join(f"  {name:<10} {about}" for name, about in BENCHMARKS.items())
        print(f"{__doc__}\n\n{names}\n\n`python benchmark.py NAME --help` lists the flags of one.")
        return
    name, flags = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("gemv", argv)
    if name not in BENCHMARKS:
        raise BadInput(f"{name}: no such benchmark: use one of {', '.join(BENCHMARKS)}")
    import_module(f"benchmarks.{name}").main(flags)


if __name__ == "__main__":
    sys.exit(main())
