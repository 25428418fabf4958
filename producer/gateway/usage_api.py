"""/v1/usage: what a tenant has used, by day and model."""

from typing import Annotated, Final, Literal

import msgspec
from fastapi import APIRouter, Depends, Query

from ...shared.api_keys import Scope
from ...shared.usage import UsageRow
from .auth import Caller, require
from .context import Gateway, gateway
from .documented import StructResponse, answers
from .errors import ApiError

MOST_DAYS: Final = 366
router = APIRouter(prefix="/v1/usage", tags=["usage"])


class UsageList(msgspec.Struct, frozen=True, kw_only=True):
    """Usage, the newest day first."""

    object: Literal["list"] = "list"
    data: tuple[UsageRow, ...]


@router.get("", responses=answers(UsageList))
async def usage(
    caller: Annotated[Caller, Depends(require(Scope.READ))],
    owner: Annotated[Gateway, Depends(gateway)],
    days: Annotated[int, Query(ge=1, le=MOST_DAYS)] = 30,
    all_tenants: Annotated[bool, Query()] = False,
) -> StructResponse:
    """Tells jobs and tokens of the last days, today included; days are of UTC."""
    if all_tenants and Scope.ADMIN not in caller.scopes:
        raise ApiError(
            403,
            "only keys with the scope 'admin' may see what other tenants use",
            code="insufficient_scope",
            param="all_tenants",
        )
    rows = await owner.client.usage(None if all_tenants else caller.tenant, days)
    return StructResponse(UsageList(data=tuple(rows)))
