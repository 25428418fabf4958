"""How long a replica's steps take, by a roofline: the slower of reading and computing.

A step reads every weight and the keys and values of its sequences once, multiplies
every token with every weight, waits for its collectives, and then its host samples and
plans the next one. Devices reach a part of what their vendors state; the parts below
are assumptions, save on a host, whose rates are measured.
"""

from __future__ import annotations

from typing import Final

import msgspec

from ..engine.model.sizes import Parameters, read_bytes
from .cards import Card
from .parameters import count_parameters, kv_bytes_per_token
from .shape import ModelShape

COMPUTE_PART: Final = 0.5
"""Of a GPU's dense rate that products of a prefill reach: an assumption."""
MEMORY_PART: Final = 0.75
"""Of a GPU's bandwidth that a decode step reaches: an assumption."""
HOST_PART: Final = 0.8
"""Of a host's measured rates, since attention and small operations come on top."""
STEP_S: Final = 1.5e-3
"""Python between two steps: plan, delivery, launch of a graph."""
SAMPLE_BYTES_S: Final = 3e9
"""Bytes of logits a second that the sampler looks at, on one core."""
TO_HOST_BYTES_S: Final = 12e9
"""Logits on their way from a GPU to the sampler."""
_INT16_PRODUCTS: Final = 2
"""INT8 weights meet 16-bit rows: two products of 8 bits each."""
_FLOAT: Final = 4


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one step by what they are spent on."""

    compute: float
    weights: float
    """Reading them."""
    kv: float
    """Reading keys and values."""
    collective: float
    python: float
    """Between two steps, however many sequences run."""
    sampling: float
    """Of the host, in proportion to the sequences."""

    @property
    def memory(self) -> float:
        """All reading of the device."""
        return self.weights + self.kv

    @property
    def host(self) -> float:
        """What the device waits for."""
        return self.python + self.sampling

    @property
    def total(self) -> float:
        """Computing and reading overlap; the others do not."""
        return max(self.compute, self.memory) + self.collective + self.host


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """A model on `tp` cards, as arithmetic."""

    shape: ModelShape
    card: Card
    weights: str
    kv: str
    tp: int

    def step(
        self, rows: int, context: int, prefill: int = 0, seen: int = 0
    ) -> StepTime:
        """Returns the time of a step.

        Args:
            rows: Sequences that each make a token.
            context: Tokens that each of them looks at.
            prefill: Prompt tokens beside them.
            seen: Tokens that a prompt token looks at on average.
        """
        shape, counts = self.shape, count_parameters(self.shape, self.tp)
        tokens = rows + prefill
        heads = shape.num_heads // self.tp
        looked = rows * context + prefill * seen
        attention = 4 * shape.num_layers * heads * shape.head_dim * looked
        logits = rows + (1 if prefill else 0)
        products = 2 * (counts.linear * tokens + counts.head * logits)
        kv = rows * context * kv_bytes_per_token(shape, self.kv, self.tp)
        return StepTime(
            compute=(products + attention) / self.flops,
            weights=read_bytes(counts, self.weights) / self.bandwidth,
            kv=kv / self.bandwidth,
            collective=self.collective(tokens, logits),
            python=STEP_S,
            sampling=self._sampling(logits),
        )

    @property
    def flops(self) -> float:
        """Operations a second of a rank that its products reach."""
        return rate_of(self.card, self.weights) / self._sharers

    @property
    def bandwidth(self) -> float:
        """Bytes a second that a rank reads."""
        part = HOST_PART if self.card.is_host else MEMORY_PART
        return self.card.bandwidth * part / self._sharers

    @property
    def _sharers(self) -> int:
        return self.tp if self.card.is_host else 1

    def collective(self, tokens: int, logits: int) -> float:
        """Returns the seconds that a step waits for other ranks.

        Two all-reduces a layer and one for the embedding, then a gather of logits.
        """
        if self.tp == 1:
            return 0.0
        width = _FLOAT if self.card.is_host or self.weights == "float32" else 2
        size = tokens * self.shape.hidden * width
        moved = 2 * (self.tp - 1) / self.tp * size / self.card.link
        reduces = (2 * self.shape.num_layers + 1) * (self.card.link_latency_s + moved)
        gathered = logits * self.shape.vocabulary * width * (self.tp - 1) / self.tp
        return reduces + self.card.link_latency_s + gathered / self.card.link

    def _sampling(self, logits: int) -> float:
        size = logits * self.shape.vocabulary * _FLOAT
        moved = 0.0 if self.card.is_host else size / TO_HOST_BYTES_S
        return moved + size / SAMPLE_BYTES_S

    @property
    def counts(self) -> Parameters:
        """What a rank holds."""
        return count_parameters(self.shape, self.tp)


def rate_of(card: Card, weights: str) -> float:
    """Returns the operations a second that products with such weights reach.

    Args:
        card: The device.
        weights: Precision. NF4 is unpacked to half precision before it is multiplied.
    """
    if card.is_host:
        kind = weights if weights in card.tflops else "float32"
        return card.tflops[kind] * 1e12 * HOST_PART
    kind = {"float32": "float32", "int8": "int8"}.get(weights, "half")
    rate = card.tflops[kind] * 1e12 * COMPUTE_PART
    return rate / _INT16_PRODUCTS if weights == "int8" else rate
