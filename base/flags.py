"""A command line from a dataclass: a field is a flag with its type, default, help, choices and bounds.

@dataclass(frozen=True)
class Settings:
    batch_size: int = flag(12, "rows of a micro-batch", at_least=1)      # --batch-size
"""

import argparse
import difflib
import math
import operator
import re
import sys
from dataclasses import Field, field, fields
from typing import Any

from base.errors import BadInput

HOLDS = {"at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}


def flag(
    default: Any,
    help: str,
    choices: tuple[str, ...] | None = None,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    on_resume: str = "changes",
) -> Any:
    """A dataclass field that is also a flag: `batch_size: int = flag(12, "…")` is --batch-size.

    at_least, at_most, above, below: bounds of a number. Besides, a float must be finite, and a whole number with
    bounds must fit into 64 bits. on_resume: settings.py.
    """
    bounds = {"at least": at_least, "above": above, "at most": at_most, "below": below}
    bounds = {words: bound for words, bound in bounds.items() if bound is not None}
    return field(default=default, metadata={"help": help, "choices": choices, "bounds": bounds, "on_resume": on_resume})


def read_flags(cls: type, argv: list[str] | None, prog: str, description: str) -> tuple[dict[str, Any], list[str]]:
    """The fields of `cls` that the command line names, converted, and a line for each fault.

    argparse finds the flags; conversion is done here, since argparse stops at the first fault. out_of_bounds() checks
    bounds.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    for f in fields(cls):
        _add(parser, f)
    parser.error = _raise
    known, unknown = parser.parse_known_args(_join_negative_numbers(sys.argv[1:] if argv is None else argv))
    values, faults = {}, _unknown_arguments(unknown, [name_of(f) for f in fields(cls)])
    for f in fields(cls):
        if not hasattr(known, f.name):
            continue
        value, choices = getattr(known, f.name), f.metadata["choices"]
        if choices and value not in choices:
            faults.append(f"{name_of(f)} {value}: use one of {', '.join(choices)}")
            continue
        try:
            values[f.name] = type_of(f)(value)
        except ValueError:
            faults.append(f"{name_of(f)} {value}: not {'a whole number' if type_of(f) is int else 'a number'}")
    return values, faults


def out_of_bounds(settings: Any) -> list[str]:
    """A line for each number of a dataclass that is out of the bounds of its flag."""
    lines = []
    for f in fields(settings):
        value, bounds = getattr(settings, f.name), f.metadata["bounds"]
        if not bounds or value is None:
            continue
        if isinstance(value, int) and value >= 2**63 and _is_within(value, bounds):
            lines.append(f"{name_of(f)} {value}: must be below 2^63")
        elif not _is_within(value, bounds):
            unbounded_float = type_of(f) is float and not {"at most", "below"} & bounds.keys()
            kind = "a finite number, " if unbounded_float else ""
            words = " and ".join(f"{words} {bound:.20g}" for words, bound in bounds.items())
            shown = f"{value:.10g}" if isinstance(value, float) else value
            lines.append(f"{name_of(f)} {shown}: must be {kind}{words}")
    return lines


def _is_within(value: float, bounds: dict[str, float]) -> bool:
    return -math.inf < value < math.inf and all(HOLDS[words](value, bound) for words, bound in bounds.items())


def name_of(f: Field | str) -> str:
    """The flag of a field, or of a field's name: "batch_size" -> "--batch-size"."""
    name = f if isinstance(f, str) else f.name
    return "--" + name.replace("_", "-")


def type_of(f: Field) -> type:
    """The type of a field without its None."""
    return next(kind for kind in (bool, int, float, str) if f.type in (kind, kind | None))


def _add(parser: argparse.ArgumentParser, f: Field) -> None:
    kind, choices = type_of(f), f.metadata["choices"]
    help = f.metadata["help"].replace("%", "%%")
    if kind is bool:
        parser.add_argument(name_of(f), action="store_true", default=argparse.SUPPRESS, help=help)
        return
    if f.default is not None and f.default != "auto":
        help += f" [{f.default:g}]" if kind is float else f" [{f.default}]"
    metavar = "|".join(choices) if choices else {int: "N", float: "X", str: "TEXT"}[kind]
    parser.add_argument(name_of(f), metavar=metavar, default=argparse.SUPPRESS, help=help)


def _unknown_arguments(words: list[str], names: list[str]) -> list[str]:
    """A line for each unknown flag, with the known one that it may mean. Its value gets no line of its own."""
    lines = []
    for before, word in zip(["", *words], words, strict=False):
        if before.startswith("--") and not word.startswith("--"):
            continue
        close = difflib.get_close_matches(word.split("=")[0], names, n=1)
        lines.append(f"unknown argument {word}: " + (f"did you mean {close[0]}?" if close else "--help lists all"))
    return lines


def _join_negative_numbers(argv: list[str]) -> list[str]:
    """["--lr", "-1e-3"] -> ["--lr=-1e-3"], which argparse would take for two flags."""
    joined: list[str] = []
    for word in argv:
        if joined and joined[-1].startswith("--") and re.fullmatch(r"-(\d|\.\d|inf|nan).*", word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _raise(message: str):
    raise BadInput(f"{message} (--help lists all)")
