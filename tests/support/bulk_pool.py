"""Bulk commands that are run against a pool, and what they read and write."""

import contextlib
import gzip
import io
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
import typer

from tokenmill.producer.bulk.cli import register_bulk

from .pools import UpProcess


@dataclass
class Ran:
    """How a command came to its end."""

    code: int
    out: str
    err: str

    @property
    def report(self) -> dict[str, Any]:
        """What `--json` printed last."""
        return json.loads(self.out.splitlines()[-1])["report"]


class BulkPool:
    """Commands against one pool.

    Args:
        pool: The pool.
    """

    def __init__(self, pool: UpProcess) -> None:
        self.up = pool
        self.url = pool.url
        self.redis = redis.Redis.from_url(pool.url)

    def start(self, *args: object, **options: Any) -> subprocess.Popen[bytes]:
        """Starts `tokenmill bulk` with these arguments."""
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        return subprocess.Popen(
            [sys.executable, "-m", "tokenmill", "bulk", *map(str, args)],
            env=self.up.env,
            **streams,
        )

    def bulk(self, *args: object) -> Ran:
        """Runs it to its end, in this process: starting one takes longer than most."""
        out = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
        err = io.StringIO()
        given = [*map(str, args), "--url", self.url]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = _code_of(given)
        assert isinstance(out.buffer, io.BytesIO)
        return Ran(code, out.buffer.getvalue().decode(), err.getvalue())

    def process(self, *args: object, given: bytes | None = None) -> Ran:
        """Runs it to its end, as a process."""
        process = self.start(*args, stdin=subprocess.PIPE)
        out, err = process.communicate(given, timeout=120)
        return Ran(process.returncode, out.decode(), err.decode())

    def run(self, *args: object) -> Ran:
        """`bulk run` for the model of this pool, without progress."""
        return self.bulk("run", *args, "--model", "echo", "--quiet")

    def summarize(self, *args: object) -> Ran:
        """`bulk summarize` likewise."""
        return self.bulk("summarize", *args, "--model", "echo", "--quiet")


def _code_of(args: list[str]) -> int:
    app = typer.Typer()
    register_bulk(app)
    try:
        app(args=["bulk", *args], standalone_mode=False)
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def request(number: int, **options: object) -> dict[str, Any]:
    """A line of the simple form whose answer is known: the prompt's first bytes."""
    return {
        "id": number,
        "prompt": f"{number:06d} and more",
        "options": {"max_tokens": 6, **options},
    }


def write_lines(path: Path, lines: Sequence[object]) -> Path:
    """Writes JSONL; bytes are taken as they are."""
    data = b"".join(
        (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n"
        for line in lines
    )
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads JSONL, packed or not."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    return [json.loads(line) for line in data.splitlines()]


def assert_answered(path: Path, count: int) -> None:
    """Every request of `request` has one line, with its own answer."""
    rows = read_lines(path)
    assert len(rows) == count
    assert {row["id"]: row["text"] for row in rows} == {
        number: f"{number:06d}" for number in range(count)
    }
