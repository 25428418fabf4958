"""How long a worker may load and check a model: one that hangs has failed."""

import asyncio
import faulthandler
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from ..shared.errors import ModelLoadError

MARGIN_S: Final = 30.0
"""What asks politely goes first: it can say what was waited for."""
_T = TypeVar("_T")


async def loaded_within(loading: Awaitable[_T], limit_s: float) -> _T:
    """Waits for a model.

    Args:
        loading: The model, in the end.
        limit_s: Seconds that it may take.

    Returns:
        The model.

    Raises:
        ModelLoadError: It took longer. Whatever it hangs in goes on until the process
            ends.
    """
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await loading
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise ModelLoadError(
            f"the model was not loaded within {limit_s:g} s: its files answer too "
            "slowly, or not at all; give it longer with worker.load_timeout_s"
        ) from error


@contextmanager
def ending_after(limit_s: float) -> Iterator[None]:
    """Ends the process, with its stacks on stderr, if the block takes too long.

    For what holds Python's lock while it hangs, as native code may: nothing else in the
    process can end it then.

    Args:
        limit_s: Seconds that the block may take, before `MARGIN_S`.
    """
    faulthandler.dump_traceback_later(limit_s + MARGIN_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
