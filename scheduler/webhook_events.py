"""What a webhook says: of a job from its record and result, of others as announced."""

import datetime as dt
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import redis.asyncio
import structlog

from ..shared.errors import UnknownJob
from ..shared.keys import JobId
from ..shared.lifecycle import TERMINAL
from ..shared.messages import JobResult
from ..shared.script_endings import moment
from ..shared.script_runner import text

MOST_OUTPUT_BYTES: Final = 16 * 1024
"""Longest output, over all choices, that a webhook carries; the result has the rest."""
_FIELDS: Final = (
    *("state", "webhook", "tenant", "class"),
    *("enqueued_ms", "started_ms", "first_ms", "finished_ms"),
)


_log = structlog.get_logger(__name__)


class JobEnd(msgspec.Struct, frozen=True, kw_only=True):
    """A job that has ended and had a webhook."""

    url: str
    type: str
    tenant: str
    at_ms: int
    data: bytes
    """JSON, without the output: that is added from the result while it is there."""


async def job_end(client: "redis.asyncio.Redis", job_id: str) -> JobEnd | str:
    """Reads the end of a job.

    Returns:
        What is to be told, or the state of a job of which nothing is: its present one
        while it goes on, `none` when there is no such job or it has no webhook.
    """
    try:
        parsed = JobId.parse(job_id)
    except UnknownJob:
        return "none"
    keys = parsed.keys
    pipe = client.pipeline(transaction=False)
    pipe.hmget(keys.job(job_id), list(_FIELDS))
    pipe.get(keys.output(job_id))
    row, raw = await pipe.execute()
    record = dict(zip(_FIELDS, map(text, row), strict=True))
    if not record["state"] or not record["webhook"]:
        return "none"
    if record["state"] not in TERMINAL:
        return record["state"]
    result = _result(raw, job_id, record["state"], parsed.model)
    return JobEnd(
        url=record["webhook"],
        type=f"job.{record['state']}",
        tenant=record["tenant"],
        at_ms=moment(record["finished_ms"]) or 0,
        data=msgspec.json.encode(_data(result, record)),
    )


def _result(raw: bytes | None, job_id: str, state: str, model: str) -> JobResult:
    """The result, or what the record says where it cannot be read."""
    if raw is not None:
        try:
            return msgspec.json.decode(raw, type=JobResult)
        except msgspec.MsgspecError:
            # A stranger's bytes: the end is told all the same.
            _log.warning("result_unreadable", job=job_id)
    return JobResult(id=job_id, state=state, model=model)


def _data(result: JobResult, record: Mapping[str, str]) -> dict[str, Any]:
    names = ("enqueued_ms", "started_ms", "first_ms", "finished_ms")
    return {
        "id": result.id,
        "state": record["state"],
        "model": result.model,
        "tenant": record["tenant"],
        "class": record["class"],
        "usage": result.usage,
        "timings": result.timings,
        **{name: moment(record[name]) for name in names if moment(record[name])},
        **({} if result.error is None else {"error": result.error}),
    }


async def output_of(client: "redis.asyncio.Redis", job_id: str) -> dict[str, Any]:
    """Returns the part of an event that is never kept: a job's output.

    Returns:
        `output`, one object for each choice, or `output_omitted` and why: `too_large`,
        or `gone` once the result has expired.
    """
    try:
        keys = JobId.parse(job_id).keys
    except UnknownJob:
        return {}
    raw = await client.get(keys.output(job_id))
    if raw is None:
        return {"output_omitted": "gone"}
    choices = _result(raw, job_id, "", "").choices
    if sum(len(choice.text.encode()) for choice in choices) > MOST_OUTPUT_BYTES:
        return {"output_omitted": "too_large"}
    return {
        "output": [
            {"index": c.index, "text": c.text, "finish_reason": c.finish_reason}
            for c in choices
        ]
    }


def body_of(event_type: str, at_ms: int, data: bytes, more: Mapping[str, Any]) -> bytes:
    """Returns the JSON that is sent.

    Args:
        event_type: What happened.
        at_ms: When, by the clock of Redis.
        data: JSON object that was kept.
        more: Fields added to it.
    """
    told = msgspec.json.decode(data, type=dict[str, Any])
    at = dt.datetime.fromtimestamp(at_ms / 1000, dt.UTC)
    stamp = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return msgspec.json.encode(
        {"type": event_type, "timestamp": stamp, "data": {**told, **more}}
    )
