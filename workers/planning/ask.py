"""What a plan is asked for."""

from __future__ import annotations

import msgspec

from ...shared.errors import ConfigError, PromptTooLong
from .cards import Fleet
from .service import Request
from .shape import ModelShape


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A model, the devices that are there, and what is wanted of them."""

    model: str
    """As it was named."""
    shape: ModelShape
    fleet: Fleet
    request: Request
    slo_ms: float | None = None
    """For the 99th percentile of a request, from its arrival to its last token."""
    rate: float | None = None
    """Requests a second, at random times."""
    degrees: tuple[int, ...] = (1,)
    """Of tensor parallelism that the model can be split into."""
    weights: str | None = None
    """The only precision to look at; None looks at all."""
    kv: str | None = None
    tp: int | None = None
    running: int | None = None
    """Most sequences of a replica; None finds the best number."""
    block_size: int = 8


def check_request(shape: ModelShape, request: Request) -> None:
    """Refuses requests that the model cannot hold.

    Raises:
        PromptTooLong: Prompt and output are longer than its context.
    """
    if request.tokens > shape.context:
        raise PromptTooLong(
            "prompt",
            f"{request.prompt} prompt and {request.output} output tokens are "
            f"{request.tokens}, and this model holds {shape.context}; ask for "
            f"{request.tokens - shape.context} fewer",
        )


def parse_target(text: str) -> float:
    """Reads a time such as 800ms, 1.5s or 800 (ms); returns milliseconds.

    Raises:
        ConfigError: Not a time above 0.
    """
    plain = text.strip().lower().replace(" ", "")
    number, factor = plain, 1.0
    if plain.endswith("ms"):
        number = plain[:-2]
    elif plain.endswith("s"):
        number, factor = plain[:-1], 1000.0
    try:
        value = float(number) * factor
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(
            "slo-p99",
            f"value {text!r}; expected a time above 0, as 800ms or 1.5s",
            "command line",
        )
    return value
