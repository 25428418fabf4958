"""docker-compose.yml as Compose reads it: YAML with its merges, variables filled in."""

import functools
import json
import re
import subprocess
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docker-compose.yml"
_VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)(?:(:?[-?])([^}]*))?\})")


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replaces ${NAME}, ${NAME:-default} and ${NAME:?problem}; $$ is a dollar sign."""

    def value(match: re.Match[str]) -> str:
        if match[1]:
            return "$"
        name, mode, word = match[2], match[3] or "", match[4]
        found = values.get(name, "")
        if found or (name in values and not mode.startswith(":")):
            return found
        assert mode.endswith("-"), f"{name} has no value: {word}"
        return str(word)

    return _VARIABLE.sub(value, text)


def _filled(node: Any, values: Mapping[str, str]) -> Any:
    if isinstance(node, dict):
        return {key: _filled(value, values) for key, value in node.items()}
    if isinstance(node, list):
        return [_filled(value, values) for value in node]
    if isinstance(node, str):
        text = fill(node, values)
        # Compose reads what a variable gave as YAML would: `replicas: ${N:-1}`.
        return int(text) if text != node and text.isdigit() else text
    return node


def raw() -> dict[str, Any]:
    """The file before its variables are filled in."""
    return yaml.safe_load(FILE.read_text("utf-8"))


def read(values: Mapping[str, str]) -> dict[str, Any]:
    """The file as Compose would run it with these variables."""
    return _filled(raw(), values)


@functools.cache
def passwords() -> Mapping[str, str]:
    """The variables that deploy/passwords.sh makes, new ones for this process."""
    printed = subprocess.run(
        ["sh", ROOT / "deploy/passwords.sh"], check=True, capture_output=True, text=True
    ).stdout
    return dict(line.split("=", 1) for line in printed.splitlines())


def schema() -> dict[str, Any]:
    """The Compose specification's own JSON schema, as check-jsonschema ships it."""
    folder = resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    return json.loads((folder / "compose-spec.json").read_text("utf-8"))


def seconds(duration: str) -> float:
    """`45s`, `1m30s` as a number of seconds."""
    parts = re.findall(r"(\d+)(ms|s|m|h)", duration)
    assert parts, duration
    return sum(int(n) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600}[u] for n, u in parts)
