"""A command line from a dataclass: a field is a flag, with its type, default, help and choices. All faults at once."""

import argparse
import difflib
import re
import sys
from dataclasses import field, fields

from base.errors import BadInput


def flag(default, help: str, choices: tuple[str, ...] | None = None):
    """A dataclass field that is also a flag: `batch_size: int = flag(12, "…")` is --batch-size."""
    return field(default=default, metadata={"help": help, "choices": choices})


def read_flags(cls: type, argv: list[str] | None, prog: str, description: str) -> tuple[dict, list[str]]:
    """The fields of `cls` that the command line names, converted, and what is wrong with the rest, a line a fault.

    argparse finds the flags; conversion is done here, since argparse stops at the first fault.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    for f in fields(cls):
        kind, choices = _type(f), f.metadata["choices"]
        help = f.metadata["help"].replace("%", "%%")
        if kind is bool:
            parser.add_argument(name_of(f), action="store_true", default=argparse.SUPPRESS, help=help)
            continue
        if f.default is not None and f.default != "auto":
            help += f" [{f.default:g}]" if kind is float else f" [{f.default}]"
        metavar = "|".join(choices) if choices else {int: "N", float: "X", str: "TEXT"}[kind]
        parser.add_argument(name_of(f), metavar=metavar, default=argparse.SUPPRESS, help=help)
    parser.error = _raise
    known, unknown = parser.parse_known_args(_join_negative_numbers(sys.argv[1:] if argv is None else argv))
    values, faults = {}, []
    for before, word in zip(["", *unknown], unknown, strict=False):
        if not before.startswith("--") or word.startswith("--"):  # else it is the value of the unknown flag before it
            close = difflib.get_close_matches(word.split("=")[0], [name_of(f) for f in fields(cls)], n=1)
            faults.append(f"unknown argument {word}: " + (f"did you mean {close[0]}?" if close else "--help lists all"))
    for f in fields(cls):
        if not hasattr(known, f.name):
            continue
        value, choices = getattr(known, f.name), f.metadata["choices"]
        if choices and value not in choices:
            faults.append(f"{name_of(f)} {value}: use one of {', '.join(choices)}")
            continue
        try:
            values[f.name] = _type(f)(value)
        except ValueError:
            faults.append(f"{name_of(f)} {value}: not {'a whole number' if _type(f) is int else 'a number'}")
    return values, faults


def _join_negative_numbers(argv: list[str]) -> list[str]:
    """["--lr", "-1e-3"] -> ["--lr=-1e-3"], which argparse would take for two flags."""
    joined: list[str] = []
    for word in argv:
        if joined and joined[-1].startswith("--") and re.fullmatch(r"-(\d|\.\d|inf|nan).*", word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def name_of(f) -> str:
    """The flag of a field, or of a field's name."""
    return "--" + getattr(f, "name", f).replace("_", "-")


def _type(f) -> type:
    return next(t for t in (bool, int, float, str) if f.type in (t, t | None))


def _raise(message: str):
    raise BadInput(f"{message} (--help lists all)")
