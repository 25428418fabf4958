"""What the load test sends and when: prompts, arrivals, and the steps of a run."""

import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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


def read_workload(
    path: Path, limit_tokens: int | None = None, limit_prompt: int | None = None
) -> list[Request]:
    """Returns the requests of a JSONL file with `prompt` and `max_tokens`.

    Args:
        path: The file.
        limit_tokens: Most output tokens of each, so that a short test stays short.
        limit_prompt: Requests that say `prompt_tokens` and have more are left out.
    """
    requests: list[Request] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if limit_prompt is not None and row.get("prompt_tokens", 0) > limit_prompt:
            continue
        most = int(row.get("max_tokens", 32))
        requests.append(Request(row["prompt"], min(most, limit_tokens or most)))
    if not requests:
        raise SystemExit(f"{path} has no requests")
    return requests


def shuffled(requests: Sequence[Request], seed: int | str) -> Iterator[Request]:
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


def arrivals(count: int, duration_s: float, seed: int | str) -> list[float]:
    """Returns the moments of a Poisson process of which is known how many there are.

    Given their number they are independent and anywhere alike. So gaps are as uneven
    as those of `poisson_times`, and each run offers exactly the load that was wanted.

    Args:
        count: How many.
        duration_s: From 0 up to this.
        seed: Of the moments.
    """
    draw = random.Random(seed)
    return sorted(draw.uniform(0.0, duration_s) for _ in range(count))


def distinct(requests: Iterable[Request], label: str) -> Iterator[Request]:
    """Yields requests that each begin with words of their own.

    A workload that goes round would otherwise be found in the prefix cache from its
    second round on, and whoever is measured later would have less to do.

    Args:
        requests: Any.
        label: Of this use of them.
    """
    for number, request in enumerate(requests):
        yield replace(request, prompt=f"({label}-{number}) {request.prompt}")


def steps(rates: Sequence[float], users: Sequence[int]) -> list[Step]:
    """Returns the steps of a run, open loops first, each from light to heavy."""
    opened = [Step("open", rate) for rate in sorted(rates)]
    return opened + [Step("closed", count) for count in sorted(users)]
