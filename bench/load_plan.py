"""What the load test sends and when: prompts, arrivals, and the steps of a run."""

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Mode = Literal["open", "closed"]
WORKLOAD = Path(__file__).parent / "workloads" / "mixed.jsonl"


@dataclass(frozen=True)
class Request:
    """One prompt and how many tokens to answer with."""

    prompt: str
    max_tokens: int


@dataclass(frozen=True)
class Step:
    """One setting of the load that is measured for a while."""

    mode: Mode
    level: float
    """Requests per second when open, users at once when closed."""

    @property
    def name(self) -> str:
        """`open 4/s`, `closed 16`."""
        return (
            f"open {self.level:g}/s"
            if self.mode == "open"
            else f"closed {self.level:g}"
        )


def read_workload(path: Path, limit_tokens: int | None = None) -> list[Request]:
    """Returns the requests of a JSONL file with `prompt` and `max_tokens`.

    Args:
        path: The file.
        limit_tokens: Most output tokens of each, so that a short test stays short.
    """
    requests: list[Request] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        most = int(row.get("max_tokens", 32))
        requests.append(Request(row["prompt"], min(most, limit_tokens or most)))
    if not requests:
        raise SystemExit(f"{path} has no requests")
    return requests


def shuffled(requests: Sequence[Request], seed: int) -> Iterator[Request]:
    """Yields requests without end, in an order that depends on the seed alone."""
    order = list(requests)
    random.Random(seed).shuffle(order)
    return itertools.cycle(order)


def poisson_times(rate: float, duration_s: float, seed: int) -> list[float]:
    """Returns the seconds after the start at which an open loop sends.

    Users who know nothing of each other arrive with exponential gaps, whether or not
    the system keeps up with them.

    Args:
        rate: Requests per second.
        duration_s: Of the step.
        seed: Of the gaps.
    """
    draw = random.Random(seed)
    times: list[float] = []
    at = draw.expovariate(rate)
    while at < duration_s:
        times.append(at)
        at += draw.expovariate(rate)
    return times


def steps(rates: Sequence[float], users: Sequence[int]) -> list[Step]:
    """Returns the steps of a run, open loops first, each from light to heavy."""
    opened = [Step("open", rate) for rate in sorted(rates)]
    return opened + [Step("closed", count) for count in sorted(users)]
