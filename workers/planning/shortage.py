"""What to say where a model does not fit: how much is short, and what would do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ...shared.errors import ModelLoadError
from .ask import Ask
from .candidate import Refused, blocks_needed, gib
from .cards import CARDS, PER_NODE, Card
from .memory import Use, memory_table

_SHOWN: Final = 4
_LEAST_CHUNK: Final = 512


def not_enough_memory(ask: Ask, refused: Sequence[Refused]) -> ModelLoadError:
    """Returns the error for a model that no way of running it makes fit.

    Args:
        ask: What is wanted.
        refused: All ways, each short of memory.
    """
    least = min(refused, key=lambda one: one.short_bytes)
    card, count = ask.fleet.card, ask.fleet.count
    needed = card.memory_bytes + least.short_bytes * (least.tp if card.is_host else 1)
    which = "host" if card.is_host else card.name
    return ModelLoadError(
        f"{ask.model} does not fit {count} {which}: even with weights {least.weights}, "
        f"KV {least.kv} and tp {least.tp} it needs {gib(needed)} GiB of each, "
        f"{gib(card.memory_bytes)} are there, {gib(least.short_bytes)} GiB short; "
        f"{_cure(ask, least)}"
    )


def _cure(ask: Ask, least: Refused) -> str:
    ways = list(_what_fits(ask, least.weights, least.kv))
    smaller = "a smaller model, or pipeline parallelism (vLLM, SGLang) over more cards"
    if ask.fleet.card.is_host:
        needed = ask.fleet.card.memory_bytes + least.short_bytes * least.tp
        ways.insert(0, f"a host with {gib(needed)} GiB")
    if not ways:
        return f"no card in the table holds it within one host: take {smaller}"
    return f"what would fit with weights {least.weights}: {', '.join(ways[:_SHOWN])}"


def _what_fits(ask: Ask, weights: str, kv: str) -> Iterator[str]:
    """Yields the fewest cards of each kind that hold one sequence, smallest first."""
    found: list[tuple[int, str]] = []
    for card in CARDS.values():
        tp = next(
            (one for one in _degrees(ask) if _fits(ask, card, weights, kv, one)), 0
        )
        if tp:
            found.append((tp * card.memory_bytes, f"{tp}x{card.name}"))
    yield from (name for _, name in sorted(found))


def _degrees(ask: Ask) -> Iterator[int]:
    yield from (degree for degree in ask.degrees if degree <= PER_NODE)


def _fits(ask: Ask, card: Card, weights: str, kv: str, tp: int) -> bool:
    use = Use(
        weights=weights,
        kv=kv,
        tp=tp,
        num_blocks=blocks_needed(ask, 1),
        block_size=ask.block_size,
        step_tokens=1 + _LEAST_CHUNK,
        rows=1,
    )
    return memory_table(ask.shape, card, use).free >= 0
