"""What the queue accepts, from the settings into Redis, where `enqueue` reads it."""

import asyncio
from collections.abc import Sequence
from typing import Final

import structlog

from ..shared.config import Config
from ..shared.errors import RedisUnsuitable
from ..shared.model_terms import limits_for
from ..shared.scripts import Limits, Scripts, TenantLimits
from .groups import GroupReader
from .snapshot import GroupView

WRITE_EVERY_S: Final = 30.0
"""A flush removes what was written."""
_log = structlog.get_logger(__name__)


def limits_of(config: Config, service_ms: int = 0, model: str | None = None) -> Limits:
    """Returns the limits that these settings ask for.

    Args:
        config: The pool's settings.
        service_ms: Least time that a job takes once it is dispatched.
        model: Whose queue it is; None: of a model without limits of its own.
    """
    limits = config.limits if model is None else limits_for(config, model)
    return Limits(
        max_waiting_jobs=limits.max_waiting_jobs,
        max_waiting_tokens=limits.max_waiting_tokens,
        max_waiting_bytes=limits.max_waiting_bytes,
        tenant_waiting_jobs=limits.tenant_waiting_jobs,
        tenant_waiting_tokens=limits.tenant_waiting_tokens,
        tenant_tokens_per_minute=limits.tenant_tokens_per_minute,
        max_payload_bytes=limits.max_payload_bytes,
        service_ms=service_ms,
        tenants={
            name: TenantLimits(
                waiting_jobs=tenant.waiting_jobs,
                waiting_tokens=tenant.waiting_tokens,
                tokens_per_minute=tenant.tokens_per_minute,
            )
            for name, tenant in config.tenants.items()
        },
    )


def least_service_ms(groups: Sequence[GroupView]) -> int:
    """Returns a step of the fastest group: no job takes less. 0 where none is measured.

    Args:
        groups: The shard's live groups.
    """
    steps = [group.step_ms for group in groups if group.step_ms > 0]
    return round(min(steps, default=0.0))


async def keep_limits(scripts: Scripts, groups: GroupReader, config: Config) -> None:
    """Writes the limits of one shard, now and whenever they differ, until cancelled.

    Args:
        scripts: Of the shard.
        groups: A reader of its groups that nobody else uses.
        config: The pool's settings.
    """
    while True:
        service_ms = least_service_ms(await groups.current())
        limits = limits_of(config, service_ms, scripts.keys.model)
        try:
            if await scripts.write_limits(limits):
                _log.debug("limits_written", shard=scripts.keys.shard)
        except RedisUnsuitable as error:
            # A full server: what waits must be able to leave all the same.
            _log.warning(
                "limits_not_written", shard=scripts.keys.shard, error=str(error)
            )
        await asyncio.sleep(WRITE_EVERY_S)
