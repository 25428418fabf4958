"""What a run and its items must satisfy, checked before anything is recorded."""

from typing import Final

from ..adapters import check_name
from ..errors import InvalidRequest
from ..keys import MODEL_NAME
from ..validate import MAX_PRIORITY, TENANT
from .job_ids import MOST_GENERATION, MOST_SEQ
from .messages import Item, RunSpec

LEAST_WINDOW: Final = 64
"""Tokens of a window below which a summary of it makes no sense."""
MOST_WORDS: Final = 10_000
MOST_STYLE: Final = 2_000
"""Characters: it goes with every job."""


def check_spec(spec: RunSpec) -> None:
    """Checks what a run is to do.

    Raises:
        InvalidRequest: One field is wrong; the message names it and its limit.
    """
    if not TENANT.fullmatch(spec.tenant):
        raise InvalidRequest(
            "tenant",
            f"'{spec.tenant[:80]}' is not allowed; expected 1 to 64 letters, digits "
            "and . _ @ + -, beginning with a letter, a digit or _",
        )
    if not MODEL_NAME.fullmatch(spec.base):
        raise InvalidRequest(
            "model",
            f"'{spec.base[:80]}' cannot be a model's name; expected 1 to 96 letters, "
            "digits and . _ / -",
        )
    if spec.adapter is not None:
        check_name(spec.adapter)
    _check_number("priority", spec.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _check_number("max_words", spec.max_words, 1, MOST_WORDS)
    _check_number("window_tokens", spec.window_tokens, LEAST_WINDOW, 2**20)
    _check_number("overlap_tokens", spec.overlap_tokens, 0, spec.window_tokens // 2)
    if len(spec.style or "") > MOST_STYLE:
        raise InvalidRequest(
            "style",
            f"it has {len(spec.style or '')} characters; expected at most {MOST_STYLE}",
        )


def check_item(item: Item) -> None:
    """Checks an item's numbers and that it has one thing to do.

    Raises:
        InvalidRequest: One field is wrong.
    """
    _check_number("seq", item.seq, 0, MOST_SEQ)
    _check_number("generation", item.generation, 0, MOST_GENERATION)
    if (item.prompt is None) == (item.document is None):
        raise InvalidRequest("item", "expected exactly one of prompt and document")


def _check_number(field: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidRequest(
            field, f"{value} is out of range; expected {least} to {most}"
        )
