"""/v1/jobs: the pool's own jobs: submit, look, wait, follow, cancel."""

import asyncio
import contextlib
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from starlette.responses import Response as PlainResponse

from ...shared.api_keys import Scope
from ...shared.errors import JobFailed, ResultTimeout, TokenmillError
from ..info import JobInfo
from ..job import Job
from ..job_pages import jobs_page
from ..openai_form import job_id_of
from ..outcome import unknown_job
from .auth import Caller, require
from .context import Gateway, gateway
from .documented import StructResponse, answers
from .documented_calls import taken
from .jobs_cursor import Cursor
from .jobs_events import job_events
from .jobs_models import (
    LONGEST_WAIT_S,
    MOST_LISTED,
    JobBody,
    JobDelta,
    JobList,
    JobState,
    JobStopped,
    JobView,
)
from .jobs_submit import as_submission, named_as_written
from .leaving import unless_left
from .sse import EventStream

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])
_Caller = Annotated[Caller, Depends(require(Scope.INFERENCE))]
_Gateway = Annotated[Gateway, Depends(gateway)]
_Wait = Annotated[float, Query(ge=0, le=LONGEST_WAIT_S, allow_inf_nan=False)]
_ASKED: Final[dict[str, object]] = {
    "model": "smollm2-135m",
    "text": "The sky is blue because",
    "sampling": {"max_tokens": 32, "temperature": 0.7},
    "priority": -5,
}
_SUBMITTED: Final[dict[int, str]] = {
    200: "The idempotency key names this job, submitted before."
}


@router.post(
    "",
    status_code=202,
    responses=answers(JobView, 404, 409, 413, 422, 429, status=202, also=_SUBMITTED),
    openapi_extra=taken(JobBody, _ASKED),
)
async def submit(request: Request, caller: _Caller, owner: _Gateway) -> StructResponse:
    """Queues a job and answers at once; `Location` is where to look for it."""
    with named_as_written():
        submission = await as_submission(request, caller, owner)
        job = await owner.client.submit(
            submission.prompt,
            when_unserved="wait" if submission.wait_for_worker else "refuse",
        )
    view = await _view(owner, caller, job)
    status = 200 if job.duplicate else 202
    return StructResponse(view, status, {"Location": f"/v1/jobs/{job.id}"})


@router.get("", responses=answers(JobList))
async def list_jobs(
    caller: _Caller,
    owner: _Gateway,
    state: Annotated[JobState | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 50,
    after: Annotated[str | None, Query(max_length=200)] = None,
) -> StructResponse:
    """Lists the tenant's jobs, newest first; a page may be short and not the last."""
    page = await jobs_page(
        owner.client.session,
        limit=limit,
        tenant=caller.tenant,
        state=state,
        after=after,
    )
    jobs = tuple(JobView.of(info) for info in page.jobs)
    return StructResponse(JobList(data=jobs, cursor=page.cursor))


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
    caller: _Caller,
    owner: _Gateway,
    last_event_id: Annotated[str | None, Header()] = None,
    after: Annotated[str | None, Query()] = None,
    from_offset: Annotated[int, Query(alias="from", ge=0, le=2**31)] = 0,
    cancel_on_leave: Annotated[bool, Query()] = False,
) -> Response:
    """Follows a job's output as server-sent events: what is there, then live.

    Each event's `id` says how far every choice was read. Sent back as `Last-Event-ID`
    (or `after`), to any gateway, it goes on behind it. The event `end` is the last.
    """
    job, _ = await _find(owner, caller, job_id)
    if last_event_id:
        cursor = Cursor.parse(last_event_id)
    else:
        cursor = Cursor.parse(after or "", "after")
    if cursor.ended:
        return Response(status_code=204)
    events = job_events(
        owner, job, cursor, from_offset=from_offset, cancel_on_leave=cancel_on_leave
    )
    return EventStream(owner, events, limit_s=0)


@router.post("/{job_id:path}/cancel", responses=answers(JobStopped, 404))
async def cancel(job_id: str, caller: _Caller, owner: _Gateway) -> StructResponse:
    """Asks a job to stop; one that has ended stays as it is."""
    job, _ = await _find(owner, caller, job_id)
    return StructResponse(JobStopped(id=job.id, state=await job.cancel()))


@router.get("/{job_id:path}", responses=answers(JobView, 404))
async def retrieve(
    job_id: str,
    request: Request,
    caller: _Caller,
    owner: _Gateway,
    wait: _Wait = 0.0,
) -> StructResponse:
    """Shows a job; with `wait`, once it has ended or so many seconds have passed."""
    job, info = await _find(owner, caller, job_id)
    if wait and info.finished_ms is None:
        await _wait(owner, request, job, wait)
    return StructResponse(await _view(owner, caller, job))


@router.delete("/{job_id:path}", responses=answers(JobStopped, 404))
async def delete(job_id: str, caller: _Caller, owner: _Gateway) -> StructResponse:
    """The same as POST …/cancel: the record of a job stays for its retention."""
    return await cancel(job_id, caller, owner)


async def _find(owner: Gateway, caller: Caller, job_id: str) -> tuple[Job, JobInfo]:
    """Returns a job that the caller may see.

    Raises:
        UnknownJob: There is none, or it is another tenant's.
    """
    job = owner.client.job(job_id_of(job_id))
    info = await job.info()
    if not caller.sees(info.tenant):
        raise unknown_job(job.id)
    return job, info


async def _view(owner: Gateway, caller: Caller, job: Job) -> JobView:
    # The result first: a record read after it is at least as new.
    result = None
    with contextlib.suppress(TokenmillError):
        if await job.done():
            result = job.outcome
    _, info = await _find(owner, caller, job.id)
    return JobView.of(info, result)


async def _wait(owner: Gateway, request: Request, job: Job, seconds: float) -> None:
    async def ended() -> None:
        with contextlib.suppress(JobFailed, ResultTimeout):
            await job.result(seconds)

    work: asyncio.Task[Any] = asyncio.create_task(ended())
    try:
        if await unless_left(owner, request.receive, work) == "done":
            await work
    finally:
        work.cancel()
