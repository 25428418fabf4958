"""Compares two profiles: what became slower, beyond what chance explains."""

import math
from typing import Final, Literal

import msgspec

from .profile_reading import Profile, Timing

FEWEST_STEPS: Final = 8
"""With fewer, a median says too little."""
SURE: Final = 3.0
"""Standard errors that a difference must have."""
_SAME_LOAD: Final = 0.1
_FACTS: Final = ("model", "weights", "kv", "kernels", "device", "threads", "host")


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One thing in both profiles."""

    now: Timing
    before: Timing
    ratio: float
    """Median now over median before."""
    verdict: Literal["slower", "faster", "same", "unsure"]


def changes(now: Profile, before: Profile, threshold: float) -> list[Change]:
    """Compares what is in both.

    Args:
        now: The profile in question.
        before: What it is held against.
        threshold: Relative change of a median that counts, 0.1 for a tenth.
    """
    old = {timing.key: timing for timing in before.timings}
    return [
        _change(timing, old[timing.key], threshold)
        for timing in now.timings
        if timing.key in old
    ]


def _change(now: Timing, before: Timing, threshold: float) -> Change:
    ratio = now.p50_ms / before.p50_ms if before.p50_ms else 1.0
    error = math.hypot(now.error_ms, before.error_ms)
    difference = now.p50_ms - before.p50_ms
    verdict: Literal["slower", "faster", "same", "unsure"] = "same"
    if 1 / (1 + threshold) < ratio < 1 + threshold:
        verdict = "same"
    elif min(now.steps, before.steps) < FEWEST_STEPS or abs(difference) < SURE * error:
        verdict = "unsure"
    else:
        verdict = "slower" if difference > 0 else "faster"
    return Change(now=now, before=before, ratio=ratio, verdict=verdict)


def differences(now: Profile, before: Profile) -> list[str]:
    """Says what makes the two hard to compare: another machine, another load."""
    found = [
        f"{name}: {now.facts.get(name)} now, {before.facts.get(name)} before"
        for name in _FACTS
        if now.facts.get(name) != before.facts.get(name)
    ]
    for kind, tokens in now.mean_tokens.items():
        then = before.mean_tokens.get(kind)
        if then and abs(tokens / then - 1) > _SAME_LOAD:
            found.append(f"{kind} steps had {tokens:.1f} tokens now, {then:.1f} before")
    return found
