"""Load on models of a pool, saturated or offered, and what was seen of it."""

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness import Figures, percentile
from load_drive import closed_loop, open_loop
from load_measure import Sample, spread
from load_plan import Request, arrivals, distinct, shuffled

from tokenmill import Client, Job, Prompt, Sampling
from tokenmill.shared.errors import TokenmillError

LATE_MS = 50.0
"""When P99 of sending is later than this the generator itself was too slow."""
SHORT_OF_LOAD = 0.05
"""A load that was missed by more is another one: a target says nothing there."""


class ModelSide:
    """One model of a pool.

    Args:
        mill: A client of the pool.
        model: Its name.
    """

    def __init__(self, mill: Client, model: str) -> None:
        self.name = model
        self.jobs: list[Job] = []
        """Those that were taken, in their order."""
        self._mill = mill

    async def send(self, request: Request, sample: Sample) -> None:
        """Submits and streams one job."""
        sampling = Sampling(max_tokens=request.max_tokens, ignore_eos=True)
        prompt = Prompt(request.prompt, model=self.name, sampling=sampling)
        try:
            job = await self._mill.submit(prompt)
            self.jobs.append(job)
            async for delta in job.stream():
                sample.tokens += len(delta.token_ids)
                if delta.text:
                    sample.pieces.append(time.monotonic())
            sample.end = time.monotonic()
            if sample.tokens != request.max_tokens:
                sample.error = "incomplete"
            result = await job.result()
            sample.queued_ms = result.timings.queued_ms
            sample.version = result.version
        except TokenmillError as error:
            sample.error = error.code
            sample.end = time.monotonic()


@dataclass(frozen=True)
class Window:
    """What was sent to one model in a span of time."""

    begin: float
    """By the monotonic clock."""
    seconds: float
    samples: Sequence[Sample]

    @property
    def done(self) -> list[Sample]:
        """Requests that succeeded."""
        return [one for one in self.samples if one.error is None and one.pieces]

    def num_ended(self, later_s: float = 0.0) -> int:
        """Returns how many had succeeded by so long after its end, and not before it
        began.
        """
        until = self.begin + self.seconds + later_s
        return sum(self.begin <= one.end <= until for one in self.done)


async def saturated(
    sides: Sequence[ModelSide],
    requests: Sequence[Request],
    *,
    users: int,
    ramp_s: float,
    window_s: float,
    label: str,
) -> dict[str, Figures]:
    """Keeps so many requests of each model under way, and counts once that is steady.

    Neither the first answers, which begin on an idle machine, nor the last ones, which
    end on one, are counted: at both ends of the window all users wait.

    Args:
        sides: The models; the pool's others idle.
        requests: What is sent, again and again.
        users: At once, of each model.
        ramp_s: Before anything counts.
        window_s: In which it does.
        label: Of this use of the requests.

    Returns:
        By model: `qps`, `output_tokens_per_s` and `failed`.
    """
    begin = time.monotonic() + ramp_s
    loops = (
        closed_loop(
            side,
            users,
            distinct(shuffled(requests, number), f"{label}-{side.name}"),
            ramp_s + window_s,
        )
        for number, side in enumerate(sides)
    )
    found = await asyncio.gather(*loops)
    windows = {
        side.name: Window(begin, window_s, samples)
        for side, samples in zip(sides, found, strict=True)
    }
    return {name: _rates(name, window) for name, window in windows.items()}


def _rates(name: str, window: Window) -> Figures:
    until = window.begin + window.seconds
    ended = [one for one in window.done if window.begin <= one.end <= until]
    if not ended:
        raise SystemExit(
            f"{name}: no request ended in the {window.seconds:g} s that count; make "
            "the window longer or the answers shorter"
        )
    return {
        "qps": round(len(ended) / window.seconds, 3),
        "output_tokens_per_s": round(
            sum(one.tokens for one in ended) / window.seconds, 1
        ),
        "failed": len(window.samples) - len(window.done),
    }


async def offered(
    sides: Sequence[ModelSide],
    requests: Sequence[Request],
    *,
    rates: Mapping[str, float],
    duration_s: float,
    seed: int,
    label: str,
) -> dict[str, Window]:
    """Sends to each model at its own rate, at moments that the seed alone decides.

    Args:
        sides: The models; the pool's others idle.
        requests: What is sent; from the first again after the last.
        rates: Requests per second by model, reached exactly.
        duration_s: How long requests are begun.
        seed: Of the order and the moments.
        label: Of this use of the requests.
    """
    begin = time.monotonic()
    loops = []
    for side in sides:
        own = f"{seed}-{side.name}"
        times = arrivals(round(rates[side.name] * duration_s), duration_s, own)
        prompts = distinct(shuffled(requests, own), f"{label}-{side.name}")
        loops.append(open_loop(side, times, prompts))
    found = await asyncio.gather(*loops)
    return {
        side.name: Window(begin, duration_s, samples)
        for side, samples in zip(sides, found, strict=True)
    }


def figures_of(windows: Sequence[Window], capacity_qps: float) -> Figures:
    """Returns the figures of all windows of one kind together: times of all requests.

    Args:
        windows: Of one model, in the same situation.
        capacity_qps: What it can do; the load that was reached is a part of this.
    """
    samples = list(itertools.chain.from_iterable(one.samples for one in windows))
    done = list(itertools.chain.from_iterable(one.done for one in windows))
    if not done:
        errors = {sample.error for sample in samples}
        raise SystemExit(f"no request succeeded: {errors}")
    seconds = sum(one.seconds for one in windows)
    # What was sent last may take its usual time.
    usual_s = percentile([one.total_s for one in done], 0.5)
    served = sum(one.num_ended(usual_s) for one in windows) / seconds
    queued = [one.queued_ms for one in done if one.queued_ms is not None]
    lags = [max(0.0, one.sent - one.intended) for one in samples]
    return {
        "requests": len(samples),
        "failed": len(samples) - len(done),
        "seconds": round(seconds, 1),
        "offered_qps": round(len(samples) / seconds, 3),
        "served_qps": round(served, 3),
        "load": round(served / capacity_qps, 3),
        "output_tokens_per_s": round(sum(one.tokens for one in done) / seconds, 1),
        **spread("queue_ms", queued, 1.0),
        **spread("ttft_ms", [one.ttft_s for one in done]),
        **spread("total_ms", [one.total_s for one in done]),
        **spread("send_lag_ms", lags),
    }


def doubts(steps: Mapping[str, Figures], load: float) -> list[str]:
    """Returns why figures say nothing about a target that holds at a certain load.

    Args:
        steps: Figures of each situation.
        load: That was wanted, as a part of what a model can do.
    """
    late = [
        f"{name}: P99 of sending was {found['send_lag_ms_p99']:.0f} ms late"
        for name, found in steps.items()
        if found["send_lag_ms_p99"] > LATE_MS
    ]
    return late + [
        f"{name}: the load reached {found['load']:.0%} of what the model can do; "
        f"{load:.0%} were to be, and nothing is judged below {load - SHORT_OF_LOAD:.0%}"
        for name, found in steps.items()
        if found["load"] < load - SHORT_OF_LOAD
    ]
