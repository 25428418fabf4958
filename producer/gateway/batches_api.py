"""/v1/batches: OpenAI's batches, and bulk runs of whatever kind to look at."""

import hashlib
import re
import secrets
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Query, Request

from ...shared.api_keys import Scope
from ...shared.bulk.keys import new_run_id
from ...shared.typed import convert, parse
from ...shared.validate import check_webhook
from .auth import Caller, require
from .batches_adding import add_batch
from .batches_lease import batch_records
from .batches_models import (
    BATCH_ID,
    MOST_LISTED,
    WINDOW_MS,
    BatchBody,
    BatchList,
    BatchObject,
    BatchRecord,
)
from .context import Gateway, gateway
from .documented import StructResponse, answers, takes
from .errors import ApiError
from .files import new_file_id
from .files_api import find_file
from .options import options_of

router = APIRouter(prefix="/v1/batches", tags=["batches"])
_Caller = Annotated[Caller, Depends(require(Scope.BATCH))]
_Gateway = Annotated[Gateway, Depends(gateway)]


@router.post(
    "", responses=answers(BatchObject, 404, 409, 429), openapi_extra=takes(BatchBody)
)
async def create(request: Request, caller: _Caller, owner: _Gateway) -> StructResponse:
    """Begins a batch: the requests of an uploaded file, done within a day."""
    body = convert(parse(await request.body(), "body"), BatchBody, "body")
    options = options_of(request)
    source = await find_file(owner, caller, body.input_file_id)
    if source.purpose != "batch":
        raise ApiError(
            400,
            f"input_file_id: the file has the purpose '{source.purpose}'; expected one "
            "that was uploaded with 'batch'",
            param="input_file_id",
        )
    # Not one from `metadata`: what stands there is the caller's and means nothing here.
    webhook = options.webhook or body.webhook
    if webhook is not None:
        session = owner.client.session
        check_webhook(webhook, await session.patiently(session.view.pool))
    priority = body.priority if options.priority is None else options.priority
    record = await add_batch(
        owner,
        source,
        BatchRecord(
            id=_id_of(source.tenant, options.idempotency_key),
            tenant=source.tenant,
            run=new_run_id(),
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            output_id=new_file_id(),
            error_id=new_file_id(),
            priority=priority or 0,
            webhook=webhook,
            metadata=body.metadata,
            created_ms=0,
            expires_ms=WINDOW_MS,
        ),
    )
    owner.batches.look()
    return StructResponse(BatchObject.of(record))


@router.get("", responses=answers(BatchList))
async def list_batches(
    caller: _Caller,
    owner: _Gateway,
    limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 20,
    after: Annotated[str | None, Query(max_length=80)] = None,
) -> StructResponse:
    """Lists the tenant's batches, newest first; `after` is the last one seen."""
    records = batch_records(owner.client.session)
    page, has_more = await records.page(caller.tenant, limit, after)
    shown = tuple(BatchObject.of(record) for record in page)
    return StructResponse(
        BatchList(
            data=shown,
            first_id=shown[0].id if shown else None,
            last_id=shown[-1].id if shown else None,
            has_more=has_more,
        )
    )


@router.get("/{batch_id}", responses=answers(BatchObject, 404))
async def retrieve(batch_id: str, caller: _Caller, owner: _Gateway) -> StructResponse:
    """Shows a batch."""
    return StructResponse(BatchObject.of(await _find(owner, caller, batch_id)))


@router.post("/{batch_id}/cancel", responses=answers(BatchObject, 404, 409))
async def cancel(batch_id: str, caller: _Caller, owner: _Gateway) -> StructResponse:
    """Stops a batch; what is done by then is in its files."""
    await _find(owner, caller, batch_id)

    def stop(record: BatchRecord, now_ms: int) -> BatchRecord | None:
        if record.status not in ("validating", "in_progress"):
            return None
        return msgspec.structs.replace(
            record, status="cancelling", cancelling_ms=now_ms
        )

    record = await batch_records(owner.client.session).change(batch_id, stop)
    if record is None:
        raise _unknown(batch_id)
    if record.status not in ("cancelling", "cancelled"):
        raise ApiError(
            409,
            f"the batch is {record.status} and cannot be cancelled any more",
            code="batch_not_cancellable",
        )
    owner.batches.look(batch_id)
    return StructResponse(BatchObject.of(record))


async def _find(owner: Gateway, caller: Caller, batch_id: str) -> BatchRecord:
    record = None
    if re.fullmatch(BATCH_ID, batch_id):
        record = await batch_records(owner.client.session).get(batch_id)
    if record is None or not caller.sees(record.tenant):
        raise _unknown(batch_id)
    return record


def _unknown(batch_id: str) -> ApiError:
    return ApiError(
        404,
        f"there is no batch '{batch_id[:80]}': it was never made by this tenant, or "
        "its record has expired",
        code="batch_not_found",
    )


def _id_of(tenant: str, key: str | None) -> str:
    """The same for the same idempotency key."""
    if key is None:
        return f"batch_{secrets.token_hex(16)}"
    digest = hashlib.sha256(f"{tenant}\0{key}".encode()).hexdigest()
    return f"batch_{digest[:32]}"
