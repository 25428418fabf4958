"""GET /healthz and /readyz: for whoever decides about this process, without a key."""

from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Depends

from .context import Gateway, gateway
from .documented import StructResponse, schema_of

router = APIRouter(tags=["health"])


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How it is."""

    status: Literal["ok", "unwell"]
    problems: list[str]
    """Why it is unwell, and what to do."""


_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    status: {
        "description": description,
        "content": {"application/json": {"schema": schema_of(Health)}},
    }
    for status, description in (
        (200, "Well."),
        (503, "Unwell; `problems` says why."),
    )
}
_Gateway = Annotated[Gateway, Depends(gateway)]


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz", responses=_RESPONSES)
async def healthz(owner: _Gateway) -> StructResponse:
    """Whether requests make progress, and not merely whether this process lives.

    Redis answers and takes writes, and no job waits for long beside a worker that has
    room, or without any worker.
    """
    look = await owner.progress.look()
    return _answer(list(look.problems))


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", responses=_RESPONSES)
async def readyz(owner: _Gateway) -> StructResponse:
    """Whether to send requests here: Redis answers, a worker lives, this is no end."""
    look = await owner.progress.look()
    problems = []
    if owner.is_unready or owner.draining.is_set():
        problems.append("this gateway is going down")
    if not look.is_reachable:
        problems += look.problems
    elif not look.num_groups:
        problems.append("no worker lives: every request would be refused")
    return _answer(problems)


def _answer(problems: list[str]) -> StructResponse:
    if not problems:
        return StructResponse(Health(status="ok", problems=[]))
    return StructResponse(Health(status="unwell", problems=problems), 503)
