"""Measures: `python benchmark.py [NAME] [flags]`, by default gemv; each name is a file in benchmarks/."""

import sys
from importlib import import_module

from base.errors import BadInput, run_script

BENCHMARKS = ("gemv", "decode", "step", "precision", "traffic")


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 measured, 1 a check before the measurement failed, 2 bad input."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in ("-h", "--help"):
        print(__doc__ + "\n`python benchmark.py NAME --help` lists the flags of one.")
        return 0
    name, flags = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else (BENCHMARKS[0], argv)

    def measure():
        if name not in BENCHMARKS:
            raise BadInput(f"{name}: no such benchmark: use one of {', '.join(BENCHMARKS)}")
        import_module(f"benchmarks.{name}").main(flags)

    return run_script("benchmark.py", measure)


if __name__ == "__main__":
    sys.exit(main())
