"""Says in words and numbers why a way to run a model was chosen, or why none was."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from .ask import Ask
from .candidate import Choice, Refused, gib, per_second


def reasons_for(
    ask: Ask, chosen: Choice, choices: Sequence[Choice], refused: Sequence[Refused]
) -> tuple[str, ...]:
    """Returns a line for each thing that was decided."""
    return tuple(_lines(ask, chosen, choices, refused))


def _lines(
    ask: Ask, chosen: Choice, choices: Sequence[Choice], refused: Sequence[Refused]
) -> Iterator[str]:
    yield _precision(ask, chosen)
    yield _degree(ask, chosen, choices, refused)
    yield _replicas(ask, chosen)
    yield (
        f"{chosen.running} sequences at once: a request takes about "
        f"{chosen.full_ms:.0f} ms with all slots taken{_target(ask, chosen)}, alone "
        f"{chosen.alone_ms:.0f}; {chosen.limit}"
    )
    yield _step(chosen)
    longer = chosen.kv_blocks * ask.block_size // chosen.running
    yield (
        f"{chosen.kv_blocks:,} KV blocks of {ask.block_size} tokens: "
        f"{chosen.running} requests of {ask.request.tokens} tokens, or of {longer:,} "
        "each; what requests leave over keeps prefixes"
    )
    yield (
        f"chunks of {chosen.prefill_chunk} prompt tokens: enough to keep arithmetic "
        "busy, few enough that running streams do not pause for long; beside them the "
        "engine takes less, by its measured step time"
    )
    yield (
        f"a window of {chosen.max_wait_ms} ms: the scheduler waits half a step, about "
        f"{chosen.step_ms / 2:.3g} ms, and never longer than this"
    )


def _step(chosen: Choice) -> str:
    """Says what most of a decode step is, and so what more sequences would bring."""
    step = chosen.step_parts
    each = 1000 * step.sampling / chosen.running
    parts = {
        "reading weights, which all sequences share": step.weights,
        "reading keys and values, more with each sequence": step.kv,
        "waiting for other ranks": step.collective,
        "Python between steps, which all sequences share (assumed, not measured)": (
            step.python
        ),
        (
            f"sampling on the host, {each:.2g} ms for each sequence (assumed, not "
            "measured): more at once would serve hardly more"
        ): step.sampling,
    }
    if step.compute > step.memory:
        parts["arithmetic, more with each sequence"] = step.compute
    most = max(parts, key=parts.__getitem__)
    part = 1000 * parts[most]
    return f"a decode step takes {chosen.step_ms:.3g} ms; of it {part:.3g} are {most}"


def _precision(ask: Ask, chosen: Choice) -> str:
    text = (
        f"weights {chosen.weights}, KV {chosen.kv}: perplexity at most about "
        f"{chosen.loss_percent:.2g} % over float32"
    )
    if ask.weights is not None:
        return f"{text}; as asked"
    if ask.rate is not None:
        return f"{text}; the most exact that sustains the rate"
    return f"{text}; the highest throughput of those that lose next to nothing"


def _degree(
    ask: Ask, chosen: Choice, choices: Sequence[Choice], refused: Sequence[Refused]
) -> str:
    if ask.tp is not None:
        return f"tp {chosen.tp}: as asked"
    if ask.fleet.card.is_host:
        return "tp 1: ranks of one host would share its cores, and wait for each other"
    if chosen.tp == 1:
        return "tp 1: the model fits one card, and ranks need not wait for each other"
    same = [one for one in choices if one.weights == chosen.weights]
    lower = [one for one in same if one.tp < chosen.tp]
    if lower:
        best = max(lower, key=lambda one: one.rate)
        return (
            f"tp {chosen.tp}: {per_second(chosen.rate)} requests/s, tp {best.tp} keeps "
            f"the target at {per_second(best.rate)}"
        )
    below = [
        one
        for one in refused
        if one.weights == chosen.weights and 0 < one.tp < chosen.tp
    ]
    why = f"; tp {below[-1].tp}: {below[-1].reason}" if below else ""
    return f"tp {chosen.tp}: the smallest degree that does{why}"


def _replicas(ask: Ask, chosen: Choice) -> str:
    card = ask.fleet.card.name
    left = ask.fleet.count - chosen.cards
    plural = "s" if chosen.replicas > 1 else ""
    text = f"{chosen.replicas} replica{plural} on {chosen.cards} {card}"
    if ask.rate is None:
        text += f": about {per_second(chosen.rate)} requests/s{_within(ask)}"
    else:
        p99 = "" if chosen.p99_ms is None else f", P99 about {chosen.p99_ms:.0f} ms"
        text += (
            f": {per_second(ask.rate)} requests/s are asked{p99}, "
            f"{per_second(chosen.rate)} possible"
        )
    return f"{text}; {left} {card} stay free" if left else text


def _within(ask: Ask) -> str:
    if ask.slo_ms is None:
        return " with waits as long as the work"
    return f" with the 99th percentile within {ask.slo_ms:.0f} ms, waiting included"


def _target(ask: Ask, chosen: Choice) -> str:
    if ask.slo_ms is None:
        return ""
    if chosen.full_ms <= ask.slo_ms:
        return f" of {ask.slo_ms:.0f} allowed"
    return f" (of {ask.slo_ms:.0f} allowed, so seldom at that rate)"


def why_none(
    ask: Ask, choices: Sequence[Choice], refused: Sequence[Refused]
) -> tuple[str, ...]:
    """Returns what stands against every way, and what would have to change."""
    card = ask.fleet.card.name
    if choices and ask.rate is not None:
        best = max(choices, key=lambda one: one.rate)
        if best.rate <= 0:
            return (f"no rate keeps the target on {ask.fleet.count} {card}",)
        needed = math.ceil(ask.rate / best.rate * best.replicas) * best.tp
        text = (
            f"{per_second(ask.rate)} requests/s are asked; {ask.fleet.count} {card} "
            f"sustain {per_second(best.rate)} (weights {best.weights}, tp {best.tp}): "
            f"about {needed} "
            "such cards would do, or a longer target"
        )
        return (text,)
    slow = [one for one in refused if one.alone_ms]
    short = [one for one in refused if one.short_bytes]
    cure = "more or faster cards, a longer target, less output or a smaller model"
    lines = [f"nothing fits and keeps the target: give {cure}"]
    if slow:
        quick = min(slow, key=lambda one: one.alone_ms)
        lines.append(
            f"the quickest, weights {quick.weights}, tp {quick.tp}, takes about "
            f"{quick.alone_ms:.0f} ms for a request alone"
        )
    if short:
        least = min(short, key=lambda one: one.short_bytes)
        lines.append(
            f"weights {least.weights}, tp {least.tp} lack {gib(least.short_bytes)} GiB "
            "a card"
        )
    return tuple(lines)
