"""Lua sources: one file per script in `lua/`, shared parts in `lua/lib/`.

A line `--include name` is replaced by `lib/name.lua`, so that what is sent to Redis,
and published for clients in other languages, is complete in itself.
"""

import hashlib
from functools import cache
from importlib import resources

import msgspec


class Script(msgspec.Struct, frozen=True):
    """One script, ready to send."""

    name: str
    source: str
    sha: str
    """SHA-1 of the source, by which Redis knows it."""


def _read(name: str) -> str:
    return (resources.files(__package__) / "lua" / name).read_text(encoding="utf-8")


@cache
def load_script(name: str) -> Script:
    """Returns the script of that name, complete with its includes.

    Args:
        name: The file's name in `lua/` without its ending.
    """
    lines: list[str] = []
    for line in _read(f"{name}.lua").splitlines():
        word, _, part = line.partition(" ")
        lines.append(_read(f"lib/{part}.lua").rstrip() if word == "--include" else line)
    source = "\n".join(lines) + "\n"
    sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
    return Script(name, source, sha)


@cache
def script_names() -> tuple[str, ...]:
    """Returns the names of all scripts, sorted."""
    folder = resources.files(__package__) / "lua"
    found = (entry.name for entry in folder.iterdir())
    return tuple(sorted(n.removesuffix(".lua") for n in found if n.endswith(".lua")))
