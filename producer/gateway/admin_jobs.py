"""The dashboard's jobs: a list to search, one job in full, its text, its end."""

import contextlib
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Depends, Header, Query, Response
from starlette.responses import Response as PlainResponse

from ...shared.errors import ProtocolError
from ...shared.keys import JobId
from ...shared.lifecycle import TERMINAL, State
from ...shared.messages import JobRequest
from ..info import JobInfo
from ..job import Job
from ..listing import recent_jobs
from ..outcome import unknown_job
from .admin_models import CancelAnswer, JobDetail, JobPage
from .auth import Caller, Scope, require
from .context import Gateway, gateway
from .documented import StructResponse, answers
from .errors import ApiError
from .jobs_cursor import Cursor
from .jobs_events import job_events
from .jobs_models import JobDelta
from .live_views import tenant_seen
from .sse import EventStream

router: Final = APIRouter(prefix="/v1/admin/jobs", tags=["dashboard"])
MOST_LISTED: Final = 500
INPUT_CHARACTERS: Final = 20_000
"""Of a prompt that is shown; the rest is cut off."""
_Viewer = Annotated[Caller, Depends(require(Scope.READ))]
_Gateway = Annotated[Gateway, Depends(gateway)]


@router.get("", responses=answers(JobPage))
async def list_jobs(
    caller: _Viewer,
    owner: _Gateway,
    state: State | None = None,
    q: Annotated[str, Query(max_length=200)] = "",
    limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 100,
) -> Response:
    """Lists the newest jobs; `q` is an id or a part of one."""
    found = await recent_jobs(
        owner.client.session,
        limit + 1,
        None if state is None else state.value,
        tenant=tenant_seen(caller),
        contains=q,
    )
    page = JobPage(data=tuple(found[:limit]), more=len(found) > limit)
    return StructResponse(page)


@router.get(
    "/{job_id:path}/stream",
    response_class=PlainResponse,
    responses={
        **answers(JobDelta, 404, media_type="text/event-stream"),
        204: {"description": "`Last-Event-ID` is that of the end: nothing follows."},
    },
)
async def stream(
    job_id: str,
    caller: _Viewer,
    owner: _Gateway,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Follows a job's output as it comes; a viewer that leaves cancels nothing."""
    job, _ = await _find(owner, caller, job_id)
    cursor = Cursor.parse(last_event_id or "")
    if cursor.ended:
        return Response(status_code=204)
    return EventStream(owner, job_events(owner, job, cursor), limit_s=0)


@router.post("/{job_id:path}/cancel", responses=answers(CancelAnswer, 404))
async def cancel(job_id: str, caller: _Viewer, owner: _Gateway) -> Response:
    """Asks a job to stop; needs the scope that submits jobs."""
    job, info = await _find(owner, caller, job_id)
    if not _may_cancel(caller, info):
        raise ApiError(
            403,
            f"this key may look and not cancel: that needs the scope "
            f"'{Scope.INFERENCE}'",
            code="insufficient_scope",
        )
    return StructResponse(CancelAnswer(status=await job.cancel()))


@router.get("/{job_id:path}", responses=answers(JobDetail, 404))
async def job_detail(job_id: str, caller: _Viewer, owner: _Gateway) -> Response:
    """One job: its record, how it ended, and to its own tenant its prompt."""
    job, _ = await _find(owner, caller, job_id)
    result = None
    # A job without a readable result is shown by its record alone.
    with contextlib.suppress(ProtocolError):
        if await job.done():
            result = job.outcome
    # Read after the result, so that the two never disagree about the end.
    _, info = await _find(owner, caller, job_id)
    return StructResponse(
        JobDetail(
            job=info,
            seed=str(info.seed),
            error=None if result is None else result.error,
            usage=None if result is None else result.usage,
            input=await _input(owner, caller, job.job_id, info),
            may_cancel=info.state not in TERMINAL and _may_cancel(caller, info),
        )
    )


def _may_cancel(caller: Caller, info: JobInfo) -> bool:
    return caller.sees(info.tenant) and caller.may(Scope.INFERENCE)


async def _find(owner: Gateway, caller: Caller, job_id: str) -> tuple[Job, JobInfo]:
    """Returns a job that the caller may see; another tenant's is as if it were not.

    Raises:
        UnknownJob: There is none for this caller.
        ProtocolError: Its record cannot be read.
    """
    job = owner.client.job(job_id)
    try:
        info = await job.info()
    except ProtocolError as error:
        if Scope.ADMIN not in caller.scopes:
            raise unknown_job(job.id) from None
        info = JobInfo.unreadable(job.id, str(error))
    if not caller.sees(info.tenant):
        raise unknown_job(job.id)
    return job, info


async def _input(
    owner: Gateway, caller: Caller, job_id: JobId, info: JobInfo
) -> str | None:
    """The prompt, for its own tenant alone: an administrator reads nobody else's."""
    if not caller.owns(info.tenant):
        return None
    name = str(job_id)
    (raw,) = await owner.client.session.read(("GET", job_id.keys.input(name)))
    if raw is None:
        return None
    try:
        request = msgspec.json.decode(raw, type=JobRequest)
    except msgspec.DecodeError:
        return "(the request is not in a form that can be shown)"
    if request.text_ref is not None:
        return f"({request.text_ref.size:,} bytes in the store of large inputs)"
    text = request.text or ""
    if request.messages is not None:
        text = "\n\n".join(f"{one.role}:\n{one.content}" for one in request.messages)
    if len(text) > INPUT_CHARACTERS:
        return f"{text[:INPUT_CHARACTERS]}\n… {len(text) - INPUT_CHARACTERS:,} more"
    return text
