"""/v1/bulk: bulk runs of commands and batches, to look at and to cancel."""

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Depends, Query

from ...shared.api_keys import Scope
from ...shared.bulk.keys import RUN_ID
from ...shared.bulk.messages import RunState
from ...shared.bulk.store import RunStore, list_runs
from ...shared.errors import UnknownRun
from .admin_models import RunRow
from .auth import Caller, require
from .context import Gateway, gateway
from .documented import StructResponse, answers

router = APIRouter(prefix="/v1/bulk", tags=["batches"])
_Caller = Annotated[Caller, Depends(require(Scope.BATCH))]
_Gateway = Annotated[Gateway, Depends(gateway)]


class RunList(msgspec.Struct, frozen=True, kw_only=True):
    """Bulk runs, newest first."""

    object: Literal["list"] = "list"
    data: tuple[RunRow, ...]


@router.get("", responses=answers(RunList))
async def list_bulk_runs(
    caller: _Caller,
    owner: _Gateway,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
) -> StructResponse:
    """Lists the tenant's runs among so many newest of the pool."""
    session = owner.client.session
    views = await session.patiently(lambda: list_runs(owner.redis, limit=limit))
    rows = (RunRow.of(view) for view in views if view.spec.tenant == caller.tenant)
    return StructResponse(RunList(data=tuple(rows)))


@router.get("/{run}", responses=answers(RunRow, 404))
async def retrieve(run: str, caller: _Caller, owner: _Gateway) -> StructResponse:
    """Shows a run."""
    await _find(owner, caller, run)
    return StructResponse(await _row(owner, run))


@router.post("/{run}/cancel", responses=answers(RunRow, 404))
async def cancel(run: str, caller: _Caller, owner: _Gateway) -> StructResponse:
    """Ends a run: what has not run is cancelled; one that is complete stays so."""
    await cancel_bulk_run(owner, caller, run)
    return StructResponse(await _row(owner, run))


async def cancel_bulk_run(owner: Gateway, caller: Caller, run: str) -> RunState:
    """Ends a run that the caller may see, and returns the state it is in then.

    Raises:
        UnknownRun: There is none for this caller.
    """
    store = await _find(owner, caller, run)
    return await owner.client.session.patiently(store.cancel)


async def _find(owner: Gateway, caller: Caller, run: str) -> RunStore:
    if RUN_ID.fullmatch(run):
        store = RunStore(owner.redis, run)
        view = await owner.client.session.patiently(store.view)
        if caller.sees(view.spec.tenant):
            return store
    raise UnknownRun(f"no record of bulk run {run[:40]} of this tenant")


async def _row(owner: Gateway, run: str) -> RunRow:
    store = RunStore(owner.redis, run)
    return RunRow.of(await owner.client.session.patiently(store.view))
