"""A flag is one line of a dataclass: type, default, help, choices, bounds."""

import math
from dataclasses import dataclass

import pytest

from base.errors import BadInput
from base.flags import flag, name_of, out_of_bounds, read_flags


@dataclass(frozen=True)
class Example:
    whole: int = flag(3, "a whole number", at_least=1, at_most=10)
    share: float = flag(0.5, "a share", at_least=0, below=1)
    rate: float = flag(0.1, "a rate", above=0)
    derived: int | None = flag(None, "derived from others", at_least=0)
    word: str = flag("one", "a word, 100 % of it", ("one", "two"))
    text: str | None = flag(None, "any text")
    switch: bool = flag(False, "a switch")


def read(*argv: str) -> dict:
    values, faults = read_flags(Example, list(argv), "example.py", "An example.")
    assert faults == []
    return values


def faults(*argv: str) -> list[str]:
    return read_flags(Example, list(argv), "example.py", "An example.")[1]


def test_values_have_the_types_of_their_fields():
    argv = "--whole 4 --share 0.25 --rate 1e-3 --derived 2 --word two --text 5 --switch"
    expected = {"whole": 4, "share": 0.25, "rate": 1e-3, "derived": 2, "word": "two", "text": "5", "switch": True}
    values = read(*argv.split())
    assert values == expected
    assert [type(value) for value in values.values()] == [type(value) for value in expected.values()]


def test_flags_that_are_not_given_have_no_value():
    assert read() == {}


def test_negative_numbers_are_values_and_no_flags():
    assert read("--rate", "-1e-3") == {"rate": -1e-3}
    assert read("--derived=-1") == {"derived": -1}


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("--whole two", "--whole two: not a whole number"),
        ("--whole 2.5", "--whole 2.5: not a whole number"),
        ("--rate fast", "--rate fast: not a number"),
        ("--word three", "--word three: use one of one, two"),
        ("--wholes 3", "unknown argument --wholes: did you mean --whole?"),
        ("--nonsense", "unknown argument --nonsense: --help lists all"),
    ],
)
def test_a_fault_is_one_line_that_names_the_flag(argv, line):
    assert faults(*argv.split()) == [line]


def test_all_faults_are_told_together():
    assert len(faults("--whole", "x", "--rate", "y", "--word", "z", "--nonsense")) == 4


def test_a_flag_without_its_value_is_bad_input():
    with pytest.raises(BadInput, match=r"argument --whole: expected one argument \(--help lists all\)"):
        read("--whole")


@pytest.mark.parametrize(
    ("values", "lines"),
    [
        ({"whole": 0}, ["--whole 0: must be at least 1 and at most 10"]),
        ({"whole": 11}, ["--whole 11: must be at least 1 and at most 10"]),
        ({"share": 1.0}, ["--share 1: must be at least 0 and below 1"]),
        ({"share": math.nan}, ["--share nan: must be at least 0 and below 1"]),
        ({"rate": 0.0}, ["--rate 0: must be a finite number, above 0"]),
        ({"rate": math.inf}, ["--rate inf: must be a finite number, above 0"]),
        ({"derived": -1}, ["--derived -1: must be at least 0"]),
        ({"derived": 2**63}, [f"--derived {2**63}: must be below 2^63"]),
        ({"derived": 10**400}, [f"--derived {10**400}: must be below 2^63"]),
        ({"derived": -(10**400)}, [f"--derived -{10**400}: must be at least 0"]),
        ({"derived": -2, "share": -1.0}, ["--share -1: must be at least 0 and below 1", "--derived -2: must be at least 0"]),  # noqa: E501
        ({"whole": 1, "share": 0.0, "rate": 1e-300, "derived": None}, []),
        ({"whole": 10, "share": 0.999, "derived": 2**63 - 1}, []),
    ],
)  # fmt: skip
def test_a_number_out_of_bounds_is_one_line(values, lines):
    assert out_of_bounds(Example(**values)) == lines


def test_help_shows_each_flag_with_its_default_and_choices(capsys):
    with pytest.raises(SystemExit) as ended:
        read("--help")
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "--whole N a whole number [3]",
        "--rate X a rate [0.1]",
        "--word one|two",
        "100 % of it",
        "--switch a",
    ):
        assert words in text


def test_the_name_of_a_flag():
    assert name_of("batch_size") == "--batch-size"
