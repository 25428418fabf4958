"""Real documents through a pool whose worker and command are killed on the way."""

import contextlib
import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
from bulk_check import leaves_of, problems_of
from bulk_jobs import JobReader
from bulk_pool import BulkPool, up

from tokenmill.producer.bulk.finding import run_named
from tokenmill.shared.bulk.keys import RunKeys
from tokenmill.shared.errors import TokenmillError

PEPS = Path(__file__).parent / "data" / "peps.jsonl.gz"
LIMIT_S = 7200.0


def documents(count: int) -> list[dict[str, Any]]:
    """Returns the first documents, the shortest first, so that few are quick.

    Args:
        count: How many.
    """
    with gzip.open(PEPS, "rt", encoding="utf-8") as file:
        found = [json.loads(line) for line in file]
    if count >= len(found):
        return found
    return sorted(found, key=lambda one: len(one["text"]))[:count]


def measure(
    model: str, count: int, *, max_words: int, window_tokens: int
) -> tuple[dict[str, object], list[str]]:
    """Summarizes with a kill -9 of the worker and one of the command.

    Args:
        model: The model.
        count: Documents.
        max_words: Most words of a summary.
        window_tokens: Most tokens of a window.

    Returns:
        Figures, and what was wrong.
    """
    given = documents(count)
    with up(model) as pool:
        source, output = pool.directory / "in.jsonl", pool.directory / "out.jsonl"
        source.write_text("".join(json.dumps(one) + "\n" for one in given))
        arguments = (
            *("summarize", source, "-o", output, "--model", model, "--keep-tree"),
            *("--max-words", max_words, "--window-tokens", window_tokens, "--quiet"),
        )
        began = time.monotonic()
        with JobReader(pool.url) as jobs:
            killed_at = _run_killed(pool, arguments, count)
        view = _view(pool, output)
        lines = [json.loads(line) for line in output.read_text().splitlines()]
        seconds = time.monotonic() - began
    problems = problems_of(
        lines,
        given,
        run=view["run"],
        max_words=max_words,
        asked=jobs.asked,
        answered=jobs.answered,
    )
    figures = {
        "documents": len(given),
        "source_words": sum(len(one["text"].split()) for one in given),
        "seconds": seconds,
        **killed_at,
        **_figures(view, lines),
    }
    return figures, problems


def _figures(view: dict[str, Any], lines: list[dict[str, Any]]) -> dict[str, object]:
    trees = [line for line in lines if "tree" in line]
    return {
        "windows": sum(len(leaves_of(line)) for line in trees),
        "jobs": view["jobs"],
        "levels_at_most": max((line["levels"] for line in trees), default=0),
        "prompt_tokens": view["prompt_tokens"],
        "completion_tokens": view["completion_tokens"],
        "parts_by_key_sentences": view["fell_back"],
        "longest_summary_words": max(
            (line.get("words", 0) for line in lines), default=0
        ),
    }


def _run_killed(
    pool: BulkPool, arguments: tuple[object, ...], count: int
) -> dict[str, float]:
    """Runs the command; kills its worker, then itself, then runs it again."""
    output = Path(str(arguments[3]))
    command = pool.start(*arguments)
    _wait(lambda: _view(pool, output).get("jobs", 0) >= 1, "first window")
    before_worker = _view(pool, output)["jobs"]
    pool.kill_worker()
    _wait(
        lambda: (
            _view(pool, output).get("settled", 0) >= max(1, count // 2)
            or command.poll() is not None
        ),
        "half of the documents",
    )
    settled = _view(pool, output)["settled"]
    was_running = command.poll() is None
    command.kill()
    command.wait()
    if pool.start(*arguments).wait(LIMIT_S):
        raise SystemExit("the command failed when it was given again")
    return {
        "jobs_ended_before_worker_was_killed": before_worker,
        "documents_settled_before_command_was_killed": settled,
        # Of very few documents all may have ended together.
        "command_was_killed_in_mid_run": float(was_running and settled < count),
    }


def _view(pool: BulkPool, output: Path) -> dict[str, Any]:
    """The counters of the run; nothing while there is none."""
    with contextlib.suppress(TokenmillError, redis.RedisError):
        keys = RunKeys(run_named(str(output)))
        with redis.Redis.from_url(pool.url) as client:
            found = client.hgetall(keys.record)
        counted = {name.decode(): value.decode() for name, value in found.items()}
        numbers = {n: int(v) for n, v in counted.items() if v.isdigit()}
        return {"run": keys.run, "jobs": 0, "settled": 0, "fell_back": 0} | numbers
    return {}


def _wait(condition: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > give_up:
            raise SystemExit(f"no {what} within {LIMIT_S:.0f} s")
        time.sleep(0.1)
