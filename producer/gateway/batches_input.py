"""The input of a batch: OpenAI's lines for one endpoint, and whether any is of use."""

import asyncio
import threading

import msgspec

from ...shared.errors import InvalidRequest, PayloadTooLarge
from ..bulk.flow import Refused
from ..bulk.line_source import LineReader, LineSource, Parsed
from ..openai_form import CHAT_URL
from .batches_models import MOST_ERRORS, BatchFault


class BatchReader:
    """Reads lines of a batch's input.

    Args:
        reader: Of lines in any form.
        endpoint: Path that each line is to name.
    """

    def __init__(self, reader: LineReader, endpoint: str) -> None:
        self._reader = reader
        self._endpoint = endpoint
        self._label = "chat" if endpoint == CHAT_URL else "completions"

    @property
    def max_bytes(self) -> int:
        """Of a line."""
        return self._reader.max_bytes

    def read(self, data: bytes) -> Parsed:
        """Reads a line; what is wrong with it is part of what is returned."""
        parsed = self._reader.read(data)
        if parsed.label == self._label:
            return parsed
        return msgspec.structs.replace(
            parsed,
            label=self._label,
            id_field="custom_id",
            content=None,
            error=self._error(parsed),
        )

    def _error(self, parsed: Parsed) -> InvalidRequest:
        if parsed.error is not None and parsed.error.field == "line":
            return parsed.error  # no object at all
        if parsed.id_field != "custom_id":
            return InvalidRequest(
                "custom_id",
                "is missing; expected an object of custom_id, method, url and body",
            )
        return InvalidRequest(
            "url", f"is not that of the batch; expected {self._endpoint}"
        )


class InputBounds:
    """Stops the reading of an input that is too long, or that nobody wants any more.

    Blank lines count: a few kB of gzip can be millions of them.

    Args:
        stop: Set by another thread when nobody wants to know any more.
        max_lines: `gateway.max_batch_lines`.
        max_bytes: `gateway.max_batch_bytes`.
    """

    def __init__(self, stop: threading.Event, max_lines: int, max_bytes: int) -> None:
        self._stop = stop
        self._max_lines = max_lines
        self._max_bytes = max_bytes

    def __call__(self, num_lines: int, num_bytes: int) -> None:
        """Looks at how far a reading is.

        Raises:
            CancelledError: `stop` was set.
            PayloadTooLarge: There is more than one batch may have.
        """
        if self._stop.is_set():
            raise asyncio.CancelledError
        if num_lines > self._max_lines:
            raise PayloadTooLarge(
                "file",
                f"has more than {self._max_lines} lines, blank ones included "
                "(gateway.max_batch_lines); make several batches of it",
            )
        if num_bytes > self._max_bytes:
            raise PayloadTooLarge(
                "file",
                f"has more than {self._max_bytes} bytes, unpacked "
                "(gateway.max_batch_bytes); make several batches of it",
            )


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What a look at the whole input found."""

    total: int
    """Lines that are not blank."""
    num_wrong: int
    faults: tuple[BatchFault, ...]
    """Of the first wrong lines."""

    @property
    def fails(self) -> bool:
        """Whether there is nothing to run."""
        return self.num_wrong == self.total


def check_input(source: LineSource, stop: threading.Event) -> Checked:
    """Reads the whole input once.

    Args:
        source: With an index that knows of no line yet.
        stop: Set by another thread when nobody wants to know any more.

    Raises:
        CancelledError: `stop` was set.
        InvalidRequest: The file cannot be read to its end, as damaged gzip, or is
            too long.
    """
    total, num_wrong = 0, 0
    faults: list[BatchFault] = []
    for entry in source.entries():
        if stop.is_set():
            raise asyncio.CancelledError
        total += 1
        if not isinstance(entry, Refused):
            continue
        num_wrong += 1
        if len(faults) < MOST_ERRORS:
            faults.append(
                BatchFault(
                    code=entry.error.code,
                    message=entry.error.message,
                    line=entry.line,
                    param=entry.error.field,
                )
            )
    if not total:
        faults.append(
            BatchFault(
                code="empty_file",
                message="the input file has no line; expected one request a line",
            )
        )
    return Checked(total=total, num_wrong=num_wrong, faults=tuple(faults))
