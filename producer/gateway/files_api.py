"""/v1/files: what batches read and write."""

import re
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import StreamingResponse

from ...shared.api_keys import Scope
from .auth import Caller, require
from .batches_open import open_of
from .context import Gateway, gateway
from .documented import StructResponse, answers
from .errors import ApiError
from .files import new_file_id
from .files_models import (
    FILE_ID,
    MOST_LISTED,
    FileDeleted,
    FileList,
    FileObject,
    FileRecord,
)
from .files_upload import Form, receive

router = APIRouter(prefix="/v1/files", tags=["files"])
_Caller = Annotated[Caller, Depends(require(Scope.BATCH))]
_Gateway = Annotated[Gateway, Depends(gateway)]
_UPLOAD: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                    },
                }
            }
        },
    }
}


@router.post("", responses=answers(FileObject, 413), openapi_extra=_UPLOAD)
async def upload(request: Request, caller: _Caller, owner: _Gateway) -> StructResponse:
    """Keeps a file for batches to read: JSONL, one request a line."""
    files, file_id, tenant = owner.files, new_file_id(), caller.tenant
    expected = _content_length(request)
    async with files.quota.room(files.records, tenant, file_id, expected) as most:
        too_large = (
            files.quota.too_many_bytes
            if most < owner.config.gateway.max_file_bytes
            else _too_large(most)
        )
        async with files.writing(tenant, file_id) as written:
            form = await receive(request, written, most, too_large)
            _check_fields(form)
        record = await files.keep(
            tenant,
            file_id,
            filename=form.filename or "",
            purpose="batch",
            num_bytes=written.num_bytes,
        )
    return StructResponse(FileObject.of(record))


def _content_length(request: Request) -> int | None:
    """What the whole form has, by its header; the server holds the sender to it."""
    told = request.headers.get("content-length", "")
    return int(told) if re.fullmatch("[0-9]{1,18}", told) else None


def _too_large(most: int) -> ApiError:
    return ApiError(
        413,
        f"file: has more than {most} bytes (gateway.max_file_bytes); split it",
        code="file_too_large",
        param="file",
    )


@router.get("", responses=answers(FileList))
async def list_files(
    caller: _Caller,
    owner: _Gateway,
    purpose: Annotated[Literal["batch", "batch_output"] | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = MOST_LISTED,
    order: Annotated[Literal["asc", "desc"], Query()] = "desc",
    after: Annotated[str | None, Query(max_length=80)] = None,
) -> StructResponse:
    """Lists the tenant's files; `after` is the id of the last one seen."""
    records, has_more = await owner.files.records.page(
        caller.tenant,
        limit,
        after,
        oldest_first=order == "asc",
        wanted=lambda record: purpose in (None, record.purpose),
    )
    shown = tuple(FileObject.of(record) for record in records)
    return StructResponse(
        FileList(
            data=shown,
            first_id=shown[0].id if shown else None,
            last_id=shown[-1].id if shown else None,
            has_more=has_more,
        )
    )


@router.get("/{file_id}", responses=answers(FileObject, 404))
async def retrieve(file_id: str, caller: _Caller, owner: _Gateway) -> StructResponse:
    """Says what is known of a file."""
    return StructResponse(FileObject.of(await find_file(owner, caller, file_id)))


@router.get(
    "/{file_id}/content",
    response_class=StreamingResponse,
    responses=answers(None, 404, media_type="application/octet-stream"),
)
async def content(file_id: str, caller: _Caller, owner: _Gateway) -> StreamingResponse:
    """Returns a file's content."""
    record = await find_file(owner, caller, file_id)
    chunks = (await owner.files.store()).read(record.name)
    try:
        first = await anext(chunks, b"")  # a missing object is told before the headers
    except FileNotFoundError:
        raise unknown_file(file_id) from None

    async def body() -> Any:  # noqa: ANN401 - an async generator of bytes
        yield first
        async for chunk in chunks:
            yield chunk

    return StreamingResponse(
        body(),
        media_type="application/octet-stream",
        headers={
            "Content-Length": str(record.num_bytes),
            "Content-Disposition": f'attachment; filename="{_ascii(record.filename)}"',
            "X-Content-Type-Options": "nosniff",
        },
    )


@router.delete("/{file_id}", responses=answers(FileDeleted, 404, 409))
async def delete(file_id: str, caller: _Caller, owner: _Gateway) -> StructResponse:
    """Removes a file that no batch reads any more."""
    record = await find_file(owner, caller, file_id)
    if record.purpose == "batch":
        await _check_unread(owner, record)
    await owner.files.delete(record)
    return StructResponse(FileDeleted(id=file_id))


async def find_file(owner: Gateway, caller: Caller, file_id: str) -> FileRecord:
    """Returns a file that the caller may see.

    Raises:
        ApiError: 404: there is none of this id, or it is another tenant's.
    """
    record = None
    if re.fullmatch(FILE_ID, file_id):
        record = await owner.files.records.get(file_id)
    if record is None or not caller.sees(record.tenant):
        raise unknown_file(file_id)
    return record


async def _check_unread(owner: Gateway, file: FileRecord) -> None:
    for batch in await open_of(owner.client.session, file.tenant):
        if batch.input_file_id == file.id:
            raise ApiError(
                409,
                f"{batch.id} reads the file until it has ended; it is {batch.status}. "
                "Wait for its end, or cancel it first",
                code="file_in_use",
            )


def unknown_file(file_id: str) -> ApiError:
    """Returns the answer for a file that is not there, or another tenant's."""
    return ApiError(
        404,
        f"there is no file '{file_id[:80]}': it was never uploaded by this tenant, or "
        "it has expired or was deleted",
        code="file_not_found",
    )


def _check_fields(form: Form) -> None:
    fields = dict(form.fields)
    purpose = fields.pop("purpose", None)
    if purpose != "batch":
        found = "is missing" if purpose is None else f"'{purpose[:40]}' is not possible"
        raise ApiError(
            400,
            f"purpose: {found}; expected 'batch'",
            code="invalid_request",
            param="purpose",
        )
    for name in fields:
        raise ApiError(
            400,
            f"{name[:80]}: is not a field that this gateway knows; expected file and "
            "purpose (how long files stay is gateway.files_keep_s)",
            code="unsupported_parameter",
            param=name[:80],
        )


def _ascii(filename: str) -> str:
    return "".join(c if c.isascii() else "_" for c in filename)
