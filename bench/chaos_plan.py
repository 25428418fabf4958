"""What a seed decides: the prompts, the jobs, and the faults with their times."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

VARIANTS: Final = 48
"""Different requests; each has one reference, so every text can be compared."""
STREAMERS: Final = 3
"""Subscriber processes; each job has one, every tenth job a second one."""
TENANTS: Final = 4
KINDS: Final = {
    "worker.kill": 4,
    "worker.stop": 3,
    "worker.term": 2,
    "scheduler.kill": 2,
    "scheduler.stop": 1,
    "scheduler.term": 1,
    "standby.kill": 1,
    "subscriber.kill": 2,
    "subscriber.stop": 1,
    "producer.kill": 1,
    "redis.kill": 2,
    "redis.stop": 1,
    "redis.term": 1,
    "connections.kill": 2,
    "proxy.drop": 1,
    "proxy.freeze": 1,
}
"""Faults, and how many of each are in one deck. `scheduler` is the active one,
`connections` a third of all by CLIENT KILL, `proxy` all that go through it."""
_WORDS: Final = ("mill", "grain", "wheel", "water", "stone", "flour", "river", "gear")


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    at_s: float
    """Seconds from the start of the faults."""
    kind: str
    target: int
    """Which of several: reduced modulo their number."""
    for_s: float
    """How long a process is stopped, or Redis stays away."""


@dataclass(frozen=True)
class Job:
    """One job of the run."""

    number: int
    variant: int
    bulk: bool
    tenant: str
    cancel_s: float | None
    """Seconds from its submit until it is cancelled."""
    deadline_s: float | None
    delay_s: float
    streamers: tuple[int, ...] = field(default=())


def make_faults(
    seed: int, seconds: float, every_s: float, lease_s: float, kinds: Sequence[str] = ()
) -> list[Fault]:
    """Deals faults from shuffled decks, so that each kind comes soon.

    Args:
        seed: Decides everything.
        seconds: Length of the run.
        every_s: Mean time between two faults.
        lease_s: Processes are stopped for longer than this.
        kinds: What a deck holds; empty is `KINDS`.
    """
    rng = random.Random(f"faults {seed}")
    unknown = sorted(set(kinds) - KINDS.keys())
    if unknown:
        raise SystemExit(f"no such faults: {unknown}; there are {sorted(KINDS)}")
    deck = list(kinds) or [kind for kind, count in KINDS.items() for _ in range(count)]
    faults: list[Fault] = []
    cards: list[str] = []
    at_s = every_s / 2
    while at_s < seconds:
        if not cards:
            cards = rng.sample(deck, len(deck))
        kind = cards.pop()
        long = kind.endswith((".stop", ".freeze"))
        for_s = lease_s * rng.uniform(1.2, 2.0) if long else rng.uniform(0.2, 2.0)
        faults.append(Fault(round(at_s, 2), kind, rng.randrange(1000), round(for_s, 2)))
        at_s += every_s * rng.uniform(0.6, 1.4)
    return faults


def make_job(seed: int, number: int) -> Job:
    """Returns what job `number` of a run is like; the same in every process."""
    rng = random.Random(f"job {seed} {number}")
    fate = rng.random()
    first = number % STREAMERS
    both = number % 10 == 0
    return Job(
        number=number,
        variant=rng.randrange(VARIANTS),
        bulk=rng.random() < 0.4,
        tenant=f"tenant-{rng.randrange(TENANTS)}",
        cancel_s=rng.uniform(0.0, 2.0) if fate < 0.06 else None,
        deadline_s=rng.uniform(0.5, 8.0) if 0.06 <= fate < 0.12 else None,
        delay_s=rng.uniform(0.2, 2.0) if 0.12 <= fate < 0.15 else 0.0,
        streamers=(first, (first + 1) % STREAMERS) if both else (first,),
    )


def make_request(variant: int) -> tuple[str, dict[str, Any]]:
    """Returns the text and the sampling options of a variant.

    Greedy, seeded, penalties, stop strings, log probabilities and several choices all
    occur, since each keeps other state that a resumed job must find again.
    """
    rng = random.Random(f"variant {variant}")
    text = f"{variant}: " + " ".join(rng.choices(_WORDS, k=rng.randrange(2, 40)))
    options: dict[str, Any] = {
        "max_tokens": rng.randrange(50, 300),
        "ignore_eos": variant % 3 > 0,
        "seed": 1000 + variant,
    }
    styles: tuple[dict[str, Any], ...] = (
        {},
        {"repetition_penalty": 1.2},
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 1.1, "top_k": 40, "n": 2},
        {"logprobs": 2},
        {"temperature": 0.8, "stop": ("re", "a b", "qu"), "min_tokens": 20},
        {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"temperature": 1.0, "min_p": 0.02, "n": 3, "logprobs": 0},
    )
    return text, options | styles[variant % len(styles)]
