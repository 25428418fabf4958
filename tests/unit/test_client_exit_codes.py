"""The table of exit codes in docs/cli.md is the one in the code."""

import re
from pathlib import Path

from tokenmill.shared import errors

PACKAGE = "tokenmill."
DOCUMENT = Path(__file__).parents[2] / "docs" / "cli.md"


def kinds(root):
    yield root
    for kind in root.__subclasses__():
        yield from kinds(kind)


def test_every_error_stands_beside_its_exit_code() -> None:
    table: dict[int, set[str]] = {}
    for code, names in re.findall(r"^\| (\d+) \| (.*?) \|", DOCUMENT.read_text(), re.M):
        table[int(code)] = set(re.findall(r"`(\w+)`", names))
    for kind in kinds(errors.TokenmillError):
        if kind.code == "illegal_transition":
            continue  # never leaves a process
        assert kind.code in table.get(kind.exit_code, ()), kind


def test_the_tree_at_the_top_of_the_file_has_every_error() -> None:
    assert errors.__doc__ is not None
    drawn = re.findall(r"\b[A-Z]\w+", errors.__doc__.split("A message says")[0])
    ours = {k for k in kinds(errors.TokenmillError) if k.__module__.startswith(PACKAGE)}
    assert all(getattr(errors, kind.__name__) is kind for kind in ours)
    assert sorted(drawn) == sorted(["Every", *(kind.__name__ for kind in ours)])
