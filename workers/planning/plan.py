"""Compares all ways to run a model on a fleet and advises one. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from ..engine.model.advice import WEIGHTS_LOSS
from .ask import Ask, check_request
from .candidate import Choice, Refused, evaluate, per_second
from .elsewhere import notes, warnings_for
from .reasons import reasons_for, why_none
from .shortage import not_enough_memory

NEGLIGIBLE_LOSS: Final = 0.5
"""Per cent of perplexity below which throughput goes before precision."""
CLOSE: Final = 0.9
"""A more precise way with so much of the best throughput goes before it."""
_SAME: Final = 0.97
"""A lower degree of tensor parallelism with so much of the throughput goes first."""
_SIXTEEN_BITS: Final = frozenset({"bfloat16", "float16"})
ASSUMPTIONS: Final = (
    (
        "all requests are alike, arrive at random times and make their full output; no "
        "prefix is found in the cache"
    ),
    (
        "a step takes what it reads over the bandwidth, or what it computes over the "
        "rate where that is longer; then collectives, sampling and planning"
    ),
    "waiting as in M/G/c: Erlang C, for service times as varied as exponential ones",
    "not counted: clients' network, Redis, tokenizing, bulk work beside it",
)
"""What is modelled and what is not."""
ON_GPUS: Final = (
    "parts of a card's rates that are reached, what a CUDA context and NCCL take, and "
    "the latency of collectives are assumed: measure with bench/gpu.sh and bench/tp.py"
)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is advised, and why."""

    chosen: Choice | None
    reasons: tuple[str, ...]
    refused: tuple[Refused, ...]
    warnings: tuple[str, ...]
    elsewhere: tuple[str, ...]
    """When pipeline parallelism or another engine would serve better."""
    assumptions: tuple[str, ...]


def make_plan(ask: Ask) -> Plan:
    """Advises how to run a model.

    Args:
        ask: The model, the devices, and what is wanted.

    Returns:
        The advice; none is chosen where nothing keeps the target or the rate.

    Raises:
        PromptTooLong: Prompt and output are longer than the model's context.
        ModelLoadError: No way fits into memory; the message says what is short and
            what would fit.
    """
    check_request(ask.shape, ask.request)
    refused = [*_never(ask)]
    choices: list[Choice] = []
    for weights, kv, tp in _ways(ask):
        found = evaluate(ask, weights, kv, tp)
        if isinstance(found, Choice):
            choices.append(found)
        else:
            refused.append(found)
    if not choices and all(one.short_bytes for one in refused if one.tp):
        raise not_enough_memory(ask, [one for one in refused if one.tp])
    chosen = _choose(ask, choices)
    beaten = [
        _beaten(ask, one, chosen)
        for one in choices
        if chosen is None or (one.weights, one.kv, one.tp) != _way(chosen)
    ]
    return Plan(
        chosen=chosen,
        reasons=(
            why_none(ask, choices, refused)
            if chosen is None
            else reasons_for(ask, chosen, choices, refused)
        ),
        refused=tuple(sorted([*refused, *beaten], key=_exactness)),
        warnings=() if chosen is None else warnings_for(ask, chosen),
        elsewhere=notes(ask, chosen, choices, refused),
        assumptions=(
            ASSUMPTIONS if ask.fleet.card.is_host else (*ASSUMPTIONS, ON_GPUS)
        ),
    )


def _ways(ask: Ask) -> Iterator[tuple[str, str, int]]:
    """Yields precision, KV and degree of all ways to look at."""
    never = {one.weights for one in _never(ask)}
    kinds = (ask.kv,) if ask.kv else ("int8",)
    for weights in WEIGHTS_LOSS:
        if weights in never or ask.weights not in (None, weights):
            continue
        for kv in kinds:
            for tp in _degrees(ask):
                yield weights, kv, tp


def _degrees(ask: Ask) -> Iterable[int]:
    """Returns the degrees that a replica may have: within one host."""
    if ask.tp is not None:
        return (ask.tp,)
    if ask.fleet.card.is_host:
        return (1,)  # ranks of a host share its cores and its memory
    most = min(ask.fleet.count, ask.fleet.per_node)
    return [degree for degree in ask.degrees if degree <= most]


def _never(ask: Ask) -> Iterator[Refused]:
    """Yields precisions that are not looked at, unless one was asked for by name."""
    if ask.weights is not None:
        return
    reasons = dict(ask.fleet.card.unfit)
    stored = ask.shape.stored
    if stored in _SIXTEEN_BITS:
        other = next(iter(_SIXTEEN_BITS - {stored}))
        reasons.setdefault(
            "float32",
            f"the checkpoint is {stored}: twice the memory, for nothing it has",
        )
        reasons.setdefault(
            other, f"the checkpoint is {stored}, whose values it may round or overflow"
        )
    for weights, reason in reasons.items():
        yield Refused(weights=weights, kv="", tp=0, reason=reason)


def _choose(ask: Ask, choices: list[Choice]) -> Choice | None:
    """Returns the best way.

    With a rate: the most exact that sustains it, on as few cards as do. Without: the
    highest throughput among those that lose next to nothing, or a more exact one that
    is close to it.
    """
    if ask.rate is not None:
        able = [one for one in choices if one.rate >= ask.rate]
        if not able:
            return None
        least = min(one.loss_percent for one in able)
        exact = [one for one in able if one.loss_percent == least]
        return min((_reduced(ask, one) for one in exact), key=lambda one: one.cards)
    good = [one for one in choices if one.loss_percent <= NEGLIGIBLE_LOSS] or choices
    if not good:
        return None
    best = max(one.rate for one in good)
    close = [one for one in good if one.rate >= CLOSE * best]
    least = min(one.loss_percent for one in close)
    exact = [one for one in close if one.loss_percent == least]
    top = max(one.rate for one in exact)
    return min((c for c in exact if c.rate >= _SAME * top), key=lambda one: one.tp)


def _reduced(ask: Ask, choice: Choice) -> Choice:
    """Returns the choice with as few replicas as sustain the rate."""
    if ask.rate is None:
        return choice
    for replicas in range(1, choice.replicas):
        fleet = msgspec.structs.replace(
            ask.fleet, count=replicas * choice.tp, per_node=replicas * choice.tp
        )
        fewer = evaluate(
            msgspec.structs.replace(ask, fleet=fleet, running=choice.running),
            *_way(choice),
        )
        if isinstance(fewer, Choice) and fewer.rate >= ask.rate:
            return msgspec.structs.replace(fewer, limit=choice.limit)
    return choice


def _beaten(ask: Ask, one: Choice, chosen: Choice | None) -> Refused:
    """Says why a way that would do was not chosen."""
    rate = f"{per_second(one.rate)} requests/s on {one.cards} {ask.fleet.card.name}"
    if ask.rate is not None and one.rate < ask.rate:
        reason = f"sustains {rate}, {per_second(ask.rate)} are asked"
    elif chosen is None:
        reason = f"sustains {rate}"
    elif one.loss_percent > chosen.loss_percent:
        reason = f"loses more quality (up to {one.loss_percent:.2g} %); {rate}"
    elif one.loss_percent < chosen.loss_percent:
        reason = f"{rate}, the advised way {per_second(chosen.rate)}"
    else:
        reason = f"{rate}, tp {chosen.tp} has {per_second(chosen.rate)}"
    return Refused(weights=one.weights, kv=one.kv, tp=one.tp, reason=reason)


def _way(choice: Choice) -> tuple[str, str, int]:
    return choice.weights, choice.kv, choice.tp


def _exactness(refused: Refused) -> tuple[float, int]:
    return refused.loss_percent, refused.tp
