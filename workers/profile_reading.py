"""Reads a profile and sums it up: steps, phases, kernels. No torch."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from ..shared.errors import InvalidRequest

Part = Literal["step", "phase", "model", "kernel"]
PARTS: Final[tuple[Part, ...]] = ("step", "phase", "model", "kernel")
_GROUPS: Final = ("linear", "attention")
"""Kernels that are told together; all others are small operations."""
_NORMAL_IQR: Final = 1.349
"""Between the quartiles of a normal distribution lie so many standard deviations."""
_MEDIAN_ERROR: Final = 1.2533
"""The median's standard error is that of the mean times this."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """How long one thing took in each of the steps that it was part of."""

    part: Part
    kind: str
    """`decode`: every sequence computed one token; `prefill`: some computed more."""
    name: str
    steps: int
    calls: int
    total_ms: float
    p50_ms: float
    """Of the time in a step, over steps, as are those below."""
    p95_ms: float
    error_ms: float
    """Standard error of the median."""

    @property
    def key(self) -> tuple[str, str, str]:
        """What is compared with what."""
        return self.part, self.kind, self.name


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A whole file."""

    facts: dict[str, Any]
    """What ran: model, weights, kernels, version."""
    steps: int
    mean_tokens: dict[str, float]
    """Of a step, by kind."""
    timings: tuple[Timing, ...]
    """Steps, then phases, then kernels; the longest first."""


class _Gathered:
    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.times: dict[tuple[Part, str, str], list[float]] = defaultdict(list)
        self.calls: dict[tuple[Part, str, str], int] = defaultdict(int)

    def step(
        self, event: Mapping[str, Any], spans: Sequence[Mapping[str, Any]]
    ) -> None:
        """Takes one step: phases of an ordinary one, kernels of a detailed one."""
        args, step_ms = event["args"], event["dur"] / 1000
        kind = "decode" if args["tokens"] == args["sequences"] else "prefill"
        if args["detail"]:
            model_ms = sum(span["dur"] for span in spans if span["name"] == "model")
            kernels = [span for span in spans if span["cat"] == "kernel"]
            self._add("kernel", kind, [(span["name"], span) for span in kernels])
            grouped = [(_group(span["name"]), span) for span in kernels]
            self._add("model", kind, grouped, whole_ms=model_ms / 1000)
            return
        self.tokens[kind].append(args["tokens"])
        self._add("step", kind, [("step", event)])
        phases = [(span["name"], span) for span in spans if span["cat"] == "phase"]
        self._add("phase", kind, phases, whole_ms=step_ms)

    def _add(
        self,
        part: Part,
        kind: str,
        spans: Sequence[tuple[str, Mapping[str, Any]]],
        whole_ms: float | None = None,
    ) -> None:
        """Sums the spans of one step by name; with `whole_ms` also what they leave."""
        sums: dict[str, float] = defaultdict(float)
        for name, span in spans:
            sums[name] += span["dur"] / 1000
            self.calls[part, kind, name] += 1
        if whole_ms is not None:
            sums["(the rest)"] = max(0.0, whole_ms - sum(sums.values()))
        for name, time_ms in sums.items():
            self.times[part, kind, name].append(time_ms)


def _group(kernel: str) -> str:
    word = kernel.partition(" ")[0]
    return word if word in _GROUPS else "small operations"


def read_profile(path: Path) -> Profile:
    """Reads a file that `--profile` wrote, a cut-off one too.

    Args:
        path: The file.

    Raises:
        InvalidRequest: It cannot be read, or is no profile of ours.
    """
    gathered, spans = _Gathered(), list[Mapping[str, Any]]()
    for event in _events(path):
        try:
            if event["ph"] == "M":
                if event["name"] == "tokenmill":
                    gathered.facts = event["args"]
            elif event["cat"] == "step":
                gathered.step(event, spans)
                spans.clear()
            else:
                spans.append(event)
        except (KeyError, TypeError) as error:
            raise _no_profile(path, f"an event lacks {error}") from error
    if not gathered.facts:
        raise _no_profile(path, "it does not begin as one")
    if not gathered.tokens:
        raise _no_profile(path, "no step was computed while it was written")
    return _summed(gathered)


def _no_profile(path: Path, why: str) -> InvalidRequest:
    return InvalidRequest(
        "file", f"{path} is no profile of `tokenmill work --profile`: {why}"
    )


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """Yields one event a line; the last line may be cut off."""
    try:
        with path.open(encoding="utf-8") as file:
            if file.readline().strip() != "[":
                raise _no_profile(path, "it does not begin as one")
            for line in file:
                text = line.strip().removesuffix(",")
                if text in ("", "]"):
                    continue
                try:
                    event = json.loads(text)
                except ValueError:
                    if line.endswith("\n"):
                        raise _no_profile(path, "a line is no JSON") from None
                    return
                if isinstance(event, dict):
                    yield event
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest("file", f"{path} cannot be read: {error}") from error


def _summed(gathered: _Gathered) -> Profile:
    timings = [
        _timing(key, times, gathered.calls.get(key, len(times)))
        for key, times in gathered.times.items()
    ]
    timings.sort(key=lambda one: (PARTS.index(one.part), one.kind, -one.total_ms))
    return Profile(
        facts=gathered.facts,
        steps=sum(map(len, gathered.tokens.values())),
        mean_tokens={
            kind: sum(counts) / len(counts) for kind, counts in gathered.tokens.items()
        },
        timings=tuple(timings),
    )


def _timing(key: tuple[Part, str, str], times: list[float], calls: int) -> Timing:
    ordered = sorted(times)
    spread = (_share(ordered, 0.75) - _share(ordered, 0.25)) / _NORMAL_IQR
    part, kind, name = key
    return Timing(
        part=part,
        kind=kind,
        name=name,
        steps=len(ordered),
        calls=calls,
        total_ms=sum(ordered),
        p50_ms=_share(ordered, 0.5),
        p95_ms=_share(ordered, 0.95),
        error_ms=_MEDIAN_ERROR * spread / math.sqrt(len(ordered)),
    )


def _share(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
