"""A pool that serves some models, for as long as a benchmark takes."""

import argparse
import asyncio
import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness import new_parser
from load_plan import WORKLOAD, Request, read_workload
from load_pool import MILL, running_process, wait_ready

from tokenmill import Client
from tokenmill.shared.connection import read_connection

READY_S = 240.0
"""Two models may load at once, on the same cores."""


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser of what the benchmarks of such pools have in common.

    Args:
        doc: Of the script; its first line says what it is.
    """
    parser = new_parser(doc)
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="built-in name, directory or hub id")
    add("--engine", default="model", help="model, or echo:<ms a step>")
    add("--users", type=int, default=16, help="that saturate a model")
    add("--max-running", type=int, default=8, help="worker.max_running")
    add("--rounds", type=int, default=3)
    add("--window", type=float, default=20.0, help="seconds of saturation that count")
    add("--limit-tokens", type=int, default=16, help="most output tokens of a request")
    add("--limit-prompt", type=int, default=256, help="longer ones are left out")
    add("--workload", type=Path, default=WORKLOAD, help="JSONL: prompt, max_tokens")
    add("--seed", type=int, default=1)
    add("--report", action="store_true", help="save the figures in bench/results")
    return parser


def requests_of(options: argparse.Namespace) -> list[Request]:
    """Returns the requests of the workload that were asked for."""
    found = read_workload(options.workload, options.limit_tokens, options.limit_prompt)
    return found[: options.requests]


def asked(options: argparse.Namespace, *own: str) -> dict[str, object]:
    """Returns what was asked for, as it stands in a report.

    Args:
        options: What `parser_of` and the benchmark have read.
        own: Options that are the benchmark's own.
    """
    common = ("model", "engine", "load", "rounds", "limit_tokens", "limit_prompt")
    return {name: getattr(options, name) for name in (*common, *own)}


def checkpoint(model: str, engine: str) -> str:
    """Returns where a model's files are; converts them first where that is needed.

    Once, here: two workers would convert the same files at the same time.

    Args:
        model: Built-in name, directory or hub id.
        engine: `model`, or `echo:<ms a step>`, which reads none.
    """
    if engine != "model":
        return model
    from tokenmill.workers.engine.model.resolve import resolve_model

    return str(resolve_model(model))


@contextlib.contextmanager
def running(
    directory: Path, models: Sequence[dict[str, object]], engine: str, max_running: int
) -> Iterator[str]:
    """A pool that serves these models, until the block ends; its address.

    Args:
        directory: For its state and logs.
        models: Tables `[[models]]`.
        engine: `model`, or `echo:<ms a step>` for a trial of the benchmark itself.
        max_running: Sequences in a step of each worker.
    """
    names = [str(model["name"]) for model in models]
    env = {
        **os.environ,
        "TOKENMILL_POOL_STATE_DIR": str(directory),
        "TOKENMILL_MODELS": json.dumps(models),
        "TOKENMILL_LOG_LEVEL": "warning",
        "TOKENMILL_WORKER_MAX_RUNNING": str(max_running),
        "TOKENMILL_WORKER_DEVICE": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
    env.pop("TOKENMILL_URL", None)
    ready, log = directory / "ready", directory / "up.log"
    words = ("--no-janitor", "--engine", engine, "--ready-file", str(ready))
    with (
        log.open("wb") as sink,
        running_process((*MILL, "up", *words), env, sink) as pool,
    ):
        wait_ready(ready.exists, pool, log, READY_S)
        connection = read_connection(directory)
        assert connection is not None, "the pool says that it is ready"
        asyncio.run(_all_served(connection.url, names))
        yield connection.url


async def _all_served(url: str, names: Sequence[str]) -> None:
    end = time.monotonic() + READY_S
    async with Client(url) as mill:
        while time.monotonic() < end:
            groups = {info.name: info.num_groups for info in await mill.models()}
            if all(groups.get(name) for name in names):
                return
            await asyncio.sleep(0.1)
    raise SystemExit(f"no worker serves all of {', '.join(names)}")
