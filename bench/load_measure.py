"""What was seen of each request, and the figures of a step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from harness import Figures, percentile

WORDS_PER_MINUTE = 238.0
"""Silent reading of English by adults, the mean over many studies (Brysbaert, 2019)."""
RAMP = 0.25
"""Part of a closed loop's time that passes before its rates count."""


@dataclass
class Sample:
    """One request; times in seconds of the monotonic clock."""

    intended: float
    """When it was to be sent. Latency counts from here: a request that had to wait for
    the generator, or for a slow answer before it, has waited all the same."""
    sent: float = 0.0
    pieces: list[float] = field(default_factory=list)
    """When each piece of text came."""
    end: float = 0.0
    tokens: int = 0
    words: int = 0
    error: str | None = None
    queued_ms: float | None = None
    """From enqueue to the start on a worker, where the pool was asked for it."""
    version: str | None = None
    """Of the model, that served it; likewise."""

    @property
    def ttft_s(self) -> float:
        """From the intended sending to the first text."""
        return self.pieces[0] - self.intended

    @property
    def total_s(self) -> float:
        """From the intended sending to the end."""
        return self.end - self.intended

    @property
    def per_token_s(self) -> float | None:
        """Mean time of an output token after the first; None where it cannot be told,
        since everything came at once.
        """
        if self.tokens < 2 or len(self.pieces) < 2:
            return None
        return (self.pieces[-1] - self.pieces[0]) / (self.tokens - 1)

    def real_time_factor(self, words_per_minute: float) -> float:
        """Time to answer over the time to read the answer; below 1, readers wait less
        than they read.
        """
        return self.total_s / (max(1, self.words) * 60.0 / words_per_minute)


@dataclass(frozen=True)
class Objective:
    """What a request must keep to count as good."""

    ttft_ms: float
    per_token_ms: float

    def is_met(self, sample: Sample) -> bool:
        """Whether this request succeeded in time."""
        return (
            sample.error is None
            and sample.ttft_s * 1000 <= self.ttft_ms
            and (sample.per_token_s or 0.0) * 1000 <= self.per_token_ms
        )


def spread(name: str, values: Sequence[float], unit: float = 1000.0) -> Figures:
    """Percentiles by name; none of what was never measured: a 0 would be a claim."""
    if not values:
        return {}
    shown = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
    ordered = [value * unit for value in values]
    return {f"{name}_{p}": round(percentile(ordered, f), 2) for p, f in shown.items()}


def figures(
    samples: Sequence[Sample],
    objective: Objective,
    words_per_minute: float = WORDS_PER_MINUTE,
    *,
    closed_s: float | None = None,
) -> Figures:
    """Returns the figures of a step; those that it could not measure are left out.

    Args:
        samples: Every request of it, failed ones too.
        objective: For goodput.
        words_per_minute: For the real-time factor.
        closed_s: How long the users of a closed loop sent. Rates then count what ended
            in its last three quarters: before, nobody has an answer yet, and later
            fewer and fewer ask. None: an open loop, counted to its last answer.
    """
    done = [sample for sample in samples if sample.error is None and sample.pieces]
    if not done:
        errors = {sample.error for sample in samples}
        raise SystemExit(f"no request of this step succeeded: {errors}")
    begin = min(sample.intended for sample in samples)
    seconds = max(sample.end for sample in samples) - begin
    since, until = begin, begin + seconds
    if closed_s is not None:
        since, until = begin + closed_s * RAMP, begin + closed_s
    rated = [sample for sample in done if since <= sample.end <= until]
    good = [sample for sample in done if objective.is_met(sample)]
    paces = [pace for s in done if (pace := s.per_token_s) is not None]
    gaps = [b - a for s in done for a, b in zip(s.pieces, s.pieces[1:], strict=False)]
    return {
        "requests": len(samples),
        "failed": len(samples) - len(done),
        "seconds": round(seconds, 2),
        "qps": round(len(rated) / (until - since), 3),
        "output_tokens_per_s": round(sum(s.tokens for s in rated) / (until - since), 1),
        "goodput_qps": round(
            sum(objective.is_met(s) for s in rated) / (until - since), 3
        ),
        "good_percent": round(100 * len(good) / len(samples), 1),
        **spread("ttft_ms", [s.ttft_s for s in done]),
        **spread("per_token_ms", paces),
        **spread("gap_ms", gaps),
        **spread("total_ms", [s.total_s for s in done]),
        **spread("rtf", [s.real_time_factor(words_per_minute) for s in done], 1.0),
        **spread("send_lag_ms", [max(0.0, s.sent - s.intended) for s in done]),
    }
