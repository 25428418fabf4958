"""What `mixed_models.py` runs: a pool of some models, and load on one or on several."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness import Figures, percentile
from load_drive import drive
from load_measure import Objective, Sample, figures
from load_plan import Request, Step, shuffled

from tokenmill import Client, Prompt, Sampling
from tokenmill.shared.connection import read_connection
from tokenmill.shared.errors import TokenmillError

READY_S = 240.0
_KEPT = ("qps", "output_tokens_per_s", "requests", "failed", "send_lag_ms_p99")
_TIMES = ("queue_ms", "ttft_ms", "total_ms")
_ANY = Objective(1e9, 1e9)
"""Nothing is judged here request by request."""


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
    command = (sys.executable, "-m", "tokenmill", "up", "--no-janitor")
    options = ("--engine", engine, "--ready-file", str(ready))
    with log.open("wb") as sink:
        pool = subprocess.Popen([*command, *options], env=env, stdout=sink, stderr=sink)
        try:
            _wait(ready.exists, pool, log)
            connection = read_connection(directory)
            assert connection is not None, "the pool says that it is ready"
            asyncio.run(_all_served(connection.url, names))
            yield connection.url
        finally:
            pool.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                pool.wait(60)
            pool.kill()
            pool.wait()


def _wait(condition: object, pool: "subprocess.Popen[bytes]", log: Path) -> None:
    assert callable(condition)
    end = time.monotonic() + READY_S
    while not condition():
        if pool.poll() is not None or time.monotonic() > end:
            tail = log.read_text(errors="replace")[-2000:]
            raise SystemExit(f"the pool did not come up:\n{tail}")
        time.sleep(0.1)


async def _all_served(url: str, names: Sequence[str]) -> None:
    end = time.monotonic() + READY_S
    async with Client(url) as mill:
        while time.monotonic() < end:
            groups = {info.name: info.num_groups for info in await mill.models()}
            if all(groups.get(name) for name in names):
                return
            await asyncio.sleep(0.1)
    raise SystemExit(f"no worker serves all of {', '.join(names)}")


class ModelSide:
    """One model of a pool.

    Args:
        mill: A client of the pool.
        model: Its name.
    """

    def __init__(self, mill: Client, model: str) -> None:
        self.name = model
        self._mill = mill
        self.queued_ms: list[float] = []
        """From the queue's taking a job to its start in a worker."""

    async def send(self, request: Request, sample: Sample) -> None:
        """Submits and streams one job."""
        sampling = Sampling(max_tokens=request.max_tokens, ignore_eos=True)
        prompt = Prompt(request.prompt, model=self.name, sampling=sampling)
        try:
            job = await self._mill.submit(prompt)
            async for delta in job.stream():
                sample.tokens += len(delta.token_ids)
                if delta.text:
                    sample.pieces.append(time.monotonic())
            sample.end = time.monotonic()
            result = await job.result()
            self.queued_ms.append(result.timings.queued_ms or 0.0)
        except TokenmillError as error:
            sample.error = error.code
            sample.end = time.monotonic()


async def measured(
    url: str,
    models: Sequence[str],
    step: Step,
    requests: Sequence[Request],
    duration_s: float,
    seed: int,
) -> dict[str, Figures]:
    """Puts the same load on each of some models at once.

    Args:
        url: Of the pool.
        models: Which; the pool's others idle.
        step: Arrivals a second or users, for each model.
        requests: What is sent.
        duration_s: How long requests are begun.
        seed: Of order and arrivals; each model has its own from it.

    Returns:
        By model: throughput, and times in the queue, to the first token and whole.
    """
    async with Client(url) as mill:
        sides = [ModelSide(mill, model) for model in models]
        seeds = [seed + 7919 * int(model.rpartition("-")[2]) for model in models]
        samples = await asyncio.gather(
            *(
                drive(side, step, shuffled(requests, own), duration_s, own)
                for side, own in zip(sides, seeds, strict=True)
            )
        )
    return {
        side.name: _figures(found, side.queued_ms)
        for side, found in zip(sides, samples, strict=True)
    }


def _figures(samples: Sequence[Sample], queued_ms: list[float]) -> Figures:
    found = figures(samples, _ANY)
    queue = {
        f"queue_ms_{name}": round(percentile(queued_ms, part), 2)
        for name, part in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
    }
    return {
        **{name: found[name] for name in _KEPT},
        **queue,
        **{name: found[name] for name in found if name.startswith(_TIMES)},
    }


def joined(runs: Sequence[Figures]) -> Figures:
    """Returns the mean of each figure over runs; the largest failure count."""
    mean = {
        name: round(sum(run[name] for run in runs) / len(runs), 3) for name in runs[0]
    }
    return {**mean, "failed": max(run["failed"] for run in runs)}
