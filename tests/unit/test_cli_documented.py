"""docs/cli.md has every command of `tokenmill`, and every option."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from tokenmill.__main__ import build_app

DOCUMENT = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()


def commands(group, path=()) -> Iterator[tuple[str, list[str]]]:
    """Yields each command with its long options."""
    if not getattr(group, "commands", None):
        options = [name for one in group.params for name in one.opts]
        yield " ".join(path), [name for name in options if name.startswith("--")]
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


ALL = dict(commands(get_command(build_app())))


def has(words: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(words)}(?![\w-])", DOCUMENT) is not None


@pytest.mark.parametrize("command", sorted(ALL))
def test_a_command_is_documented_with_its_options(command: str) -> None:
    assert [words for words in (command, *ALL[command]) if not has(words)] == []


def test_no_option_is_documented_that_is_not_there() -> None:
    known = {"--version", *(name for options in ALL.values() for name in options)}
    known |= {"--no-wait"}  # the second name of `--wait`
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", DOCUMENT)) <= known
