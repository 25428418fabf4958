"""From what a caller gives to a prompt; how its job is made stands in `shared`."""

import msgspec

from ..shared.decode import decode_prompt
from ..shared.errors import InvalidBatch, InvalidRequest
from ..shared.messages import Prompt
from ..shared.new_job import estimate_tokens as estimate_tokens
from ..shared.new_job import fingerprint
from ..shared.new_job import new_job as new_job
from ..shared.script_types import NewJob


def as_prompt(source: Prompt | str) -> Prompt:
    """Returns a prompt with the right types; text alone is enough for one.

    Raises:
        InvalidRequest: A field has a wrong type.
    """
    if isinstance(source, str):
        return Prompt(source)
    if isinstance(source, Prompt):
        return decode_prompt(source)
    raise InvalidRequest(
        "prompt", f"expected a Prompt or text, got `{type(source).__name__}`"
    )


def hashed_together(jobs: list[NewJob]) -> list[NewJob]:
    """Returns jobs whose idempotency keys hold for all of them as one request."""
    whole = fingerprint(" ".join(job.payload_hash for job in jobs).encode())
    return [msgspec.structs.replace(job, payload_hash=whole) for job in jobs]


def raise_all(errors: dict[int, InvalidRequest]) -> None:
    """Reports every wrong prompt of a batch at once.

    Raises:
        InvalidBatch: There is at least one.
    """
    if errors:
        raise InvalidBatch(errors)
