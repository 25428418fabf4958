"""Taking an upload apart while it arrives: its file goes to the store in chunks.

The web framework's own parser writes each upload to a temporary file first, and knows
no limit but the disk.
"""

from collections.abc import AsyncIterator
from typing import Final

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from .errors import ApiError
from .files_store import CHUNK_BYTES, Written

_MOST_FIELD_BYTES: Final = 16 * 1024
_MOST_FIELDS: Final = 16
_MOST_NAME: Final = 200
FILE_FIELD: Final = "file"


class Begin(msgspec.Struct, frozen=True):
    """A part of the form begins."""

    name: str
    filename: str | None


class Form:
    """Fields of an upload, and what was said of its file."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None


class _Events:
    """What the parser finds, in order."""

    def __init__(self) -> None:
        self.found: list[Begin | bytes] = []
        self.is_whole = False
        self._header: bytearray = bytearray()
        self._value: bytearray = bytearray()
        self._headers: dict[bytes, bytes] = {}

    def on_part_begin(self) -> None:
        self._headers.clear()

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        if b"name" not in options:
            raise _broken("a part of the form has no name")
        filename = options.get(b"filename")
        self.found.append(
            Begin(
                _text(options[b"name"]), None if filename is None else _text(filename)
            )
        )

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        self.found.append(data[start:end])

    def on_end(self) -> None:
        self.is_whole = True


async def receive(
    request: Request, written: Written, max_bytes: int, too_large: ApiError
) -> Form:
    """Reads an upload to its end.

    Args:
        request: A POST of multipart/form-data.
        written: Where the content of its field `file` goes.
        max_bytes: Most bytes of that.
        too_large: Raised where there are more.

    Returns:
        The other fields, and the name that the file has at its sender.

    Raises:
        ApiError: It is no such form, has no file, two of them, or one too large.
    """
    form = _Reader(written, max_bytes, too_large)
    async for event in _events(request):
        await form.take(event)
    return await form.finish()


class _Reader:
    """Puts the parts of a form where they belong."""

    def __init__(self, written: Written, max_bytes: int, too_large: ApiError) -> None:
        self._written = written
        self._too_large = too_large
        self._max_bytes = max_bytes
        self._form = Form()
        self._part: Begin | None = None
        self._field = bytearray()
        self._chunk = bytearray()
        self._num_bytes = 0

    async def take(self, event: Begin | bytes) -> None:
        if isinstance(event, Begin):
            self._end_field()
            self._begin(event)
        elif self._is_file:
            await self._add(event)
        else:
            self._field += event
            if len(self._field) > _MOST_FIELD_BYTES:
                raise _broken("a field has more than 16 KiB; only `file` may be large")

    async def finish(self) -> Form:
        self._end_field()
        if self._form.filename is None:
            raise ApiError(
                400, "file: is missing; send one as multipart/form-data", param="file"
            )
        if self._chunk:
            await self._written.write(bytes(self._chunk))
        return self._form

    @property
    def _is_file(self) -> bool:
        return self._part is not None and self._part.name == FILE_FIELD

    def _begin(self, part: Begin) -> None:
        self._part = part
        if not self._is_file:
            return
        if self._form.filename is not None:
            raise ApiError(400, "file: is given twice; send one", param="file")
        self._form.filename = _safe(part.filename or "")

    def _end_field(self) -> None:
        if self._part is not None and not self._is_file:
            self._form.fields[self._part.name] = _text(bytes(self._field))
            if len(self._form.fields) > _MOST_FIELDS:
                raise _broken(f"more than {_MOST_FIELDS} fields")
        self._field.clear()

    async def _add(self, content: bytes) -> None:
        self._num_bytes += len(content)
        if self._num_bytes > self._max_bytes:
            raise self._too_large
        self._chunk += content
        if len(self._chunk) >= CHUNK_BYTES:
            await self._written.write(bytes(self._chunk))
            self._chunk.clear()


async def _events(request: Request) -> AsyncIterator[Begin | bytes]:
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise _broken("expected Content-Type: multipart/form-data with a boundary")
    events = _Events()
    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": events.on_part_begin,
                "on_header_field": events.on_header_field,
                "on_header_value": events.on_header_value,
                "on_header_end": events.on_header_end,
                "on_headers_finished": events.on_headers_finished,
                "on_part_data": events.on_part_data,
                "on_end": events.on_end,
            },
        )
        async for chunk in request.stream():
            parser.write(chunk)
            for event in events.found:
                yield event
            events.found.clear()
        parser.finalize()
        if not events.is_whole:
            raise _broken("it ends before its last boundary")
    except FormParserError as error:
        raise _broken(str(error)) from None


def _broken(problem: str) -> ApiError:
    return ApiError(400, f"the form cannot be read: {problem}", code="invalid_request")


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")


def _safe(filename: str) -> str:
    """The last part of a path, of printable characters, not too long."""
    last = filename.replace("\\", "/").rpartition("/")[2]
    kept = "".join(c for c in last if c.isprintable() and c not in '"<>:|?*')
    return kept.strip(". ")[-_MOST_NAME:] or "upload.jsonl"
