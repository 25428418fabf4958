"""The dashboard's API: the pool live, bulk runs and dead letters; jobs are beside it.

A key with the scope `read` sees its own tenant, one with `admin` every tenant. What
changes something needs the scope that the same act needs elsewhere.
"""

from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from starlette.responses import Response as PlainResponse

from .admin_models import (
    CancelAnswer,
    DeadPage,
    DeadRow,
    History,
    LettersNamed,
    LiveView,
    Me,
    ModelChoice,
    PurgeAnswer,
    RequeueAnswer,
)
from .auth import Caller, Scope, identify, require
from .bulk_api import cancel_bulk_run
from .context import Gateway, gateway
from .documented import StructResponse, answers, takes
from .errors import ApiError
from .live_views import LiveViews, tenant_seen
from .sse import EventStream

router: Final = APIRouter(prefix="/v1/admin", tags=["dashboard"])
_MOST_BODY_BYTES: Final = 1024 * 1024
_Anyone = Annotated[Caller, Depends(identify)]
_Viewer = Annotated[Caller, Depends(require(Scope.READ))]
_Admin = Annotated[Caller, Depends(require(Scope.ADMIN))]
_Gateway = Annotated[Gateway, Depends(gateway)]


def _views(request: Request) -> LiveViews:
    found = request.app.state.live_views
    assert isinstance(found, LiveViews)
    return found


_Views = Annotated[LiveViews, Depends(_views)]


@router.get("/me", responses=answers(Me))
async def me(caller: _Anyone, owner: _Gateway) -> Response:
    """Who is looking, what that key may do, and which models there are.

    Any key is told: one that may submit and not look has the playground.
    """
    models = await owner.client.models()
    return StructResponse(
        Me(
            auth="keys" if caller.key_id else "none",
            tenant=caller.tenant,
            is_admin=Scope.ADMIN in caller.scopes,
            scopes=tuple(sorted(caller.scopes)),
            models=tuple(
                ModelChoice(
                    name=model.name,
                    is_served=model.num_groups > 0,
                    has_chat_template=bool(model.card and model.card.has_chat_template),
                )
                for model in models
            ),
        )
    )


@router.get("/snapshot", responses=answers(LiveView))
async def snapshot(caller: _Viewer, views: _Views) -> Response:
    """The pool at this moment, once; its newest jobs as of the last second."""
    return StructResponse(await views.once(caller))


@router.get(
    "/events",
    response_class=PlainResponse,
    responses=answers(LiveView, media_type="text/event-stream"),
)
async def events(caller: _Viewer, owner: _Gateway, views: _Views) -> Response:
    """The pool each second as server-sent events, for as long as someone watches.

    `snapshot` is a view of the pool, `sample` a new sample of the history, `problem`
    says why there is no view. Nothing is missed by who comes back: each view is whole.
    """
    return EventStream(owner, views.watch(caller), limit_s=0)


@router.get("/history", responses=answers(History))
async def history(
    _caller: _Viewer,
    owner: _Gateway,
    last: Annotated[int, Query(ge=1, le=360)] = 360,
) -> Response:
    """The last hour in samples of ten seconds."""
    samples = await owner.client.history(last)
    return StructResponse(History(data=tuple(samples)))


@router.post("/runs/{run}/cancel", responses=answers(CancelAnswer, 404))
async def cancel_run(run: str, caller: _Viewer, owner: _Gateway) -> Response:
    """Ends a bulk run; needs the scope `batch`."""
    if not caller.may(Scope.BATCH):
        raise ApiError(
            403,
            f"this key may look and not cancel: that needs the scope '{Scope.BATCH}'",
            code="insufficient_scope",
        )
    status = await cancel_bulk_run(owner, caller, run)
    return StructResponse(CancelAnswer(status=status))


@router.get("/dead", responses=answers(DeadPage))
async def dead_letters(
    caller: _Viewer,
    owner: _Gateway,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> Response:
    """Lists dead letters; those without a job's record belong to no tenant."""
    tenant = tenant_seen(caller)
    rows = [
        DeadRow.of(letter)
        for letter in await owner.client.dead_letters()
        if tenant is None or (letter.job is not None and letter.job.tenant == tenant)
    ]
    page = DeadPage(data=tuple(rows[:limit]), total=len(rows), more=len(rows) > limit)
    return StructResponse(page)


@router.post(
    "/dead/requeue",
    responses=answers(RequeueAnswer, 404, 413, 429),
    openapi_extra=takes(LettersNamed),
)
async def requeue(request: Request, _caller: _Admin, owner: _Gateway) -> Response:
    """Runs dead jobs again as new ones; a letter becomes one job, however often."""
    made = await owner.client.requeue(await _ids(request))
    return StructResponse(RequeueAnswer(data=tuple(made)))


@router.post(
    "/dead/purge",
    responses=answers(PurgeAnswer, 404, 413),
    openapi_extra=takes(LettersNamed),
)
async def purge(request: Request, _caller: _Admin, owner: _Gateway) -> Response:
    """Removes dead letters for good."""
    purged = await owner.client.purge(await _ids(request))
    return StructResponse(PurgeAnswer(purged=purged))


async def _ids(request: Request) -> list[str] | None:
    """Which letters are meant; None is all of them."""
    body = await request.body()
    if len(body) > _MOST_BODY_BYTES:
        raise ApiError(413, f"more than {_MOST_BODY_BYTES} bytes; name fewer letters")
    try:
        named = msgspec.json.decode(body, type=LettersNamed)
    except msgspec.DecodeError as error:
        raise ApiError(
            400,
            f'{error}; expected {{"ids": ["…"]}} or {{"all": true}}',
            code="invalid_request",
        ) from None
    if bool(named.ids) == named.all:
        raise ApiError(
            400,
            "ids: give the ids of letters, or all=true, and not both",
            code="invalid_request",
            param="ids",
        )
    return None if named.all else list(named.ids)
