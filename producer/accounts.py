"""Usage of tenants and deliveries of webhooks as methods of both clients."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..shared.errors import InvalidRequest, UnknownJob
from ..shared.keys import JobId
from ..shared.lifecycle import TERMINAL
from ..shared.usage import UsageRow
from ..shared.webhooks import (
    Delivery,
    DeliveryState,
    ask_again,
    deliveries,
    find_deliveries,
)
from .session import Session
from .usage import usage

if TYPE_CHECKING:
    from .client import Client
    from .sync import LoopThread


class AccountCalls:
    """What `Client` can say of tenants and of webhooks."""

    @property
    def _session(self) -> Session:
        raise NotImplementedError

    async def usage(self, tenant: str | None = None, days: int = 30) -> list[UsageRow]:
        """Returns what was used by day, tenant and model, newest day first.

        Args:
            tenant: Of one tenant, or of all.
            days: How many days, today included, in UTC.

        Raises:
            InvalidRequest: An argument is out of range.
        """
        session = self._session
        return await session.patiently(lambda: usage(session, tenant, days))

    async def webhooks(
        self,
        *,
        state: DeliveryState | None = None,
        tenant: str | None = None,
        limit: int = 50,
    ) -> list[Delivery]:
        """Returns deliveries of webhooks, the last changed first.

        Args:
            state: Only those `pending`, `delivered` or `given_up`.
            tenant: Only those of one tenant.
            limit: Most to return, among the newest 10,000.
        """
        client = self._session.redis
        return await self._session.patiently(
            lambda: deliveries(client, state=state, tenant=tenant, limit=limit)
        )

    async def redeliver(self, event_ids: Sequence[str]) -> None:
        """Has webhooks delivered once more, whatever became of them.

        Args:
            event_ids: As `webhooks` shows them, or jobs that had one.

        Raises:
            UnknownJob: There is nothing to deliver of such an id; none was asked for.
            InvalidRequest: A job goes on: its webhook comes with its end. None was
                asked for.
        """
        session = self._session
        found = await session.patiently(
            lambda: find_deliveries(session.redis, event_ids)
        )
        missing = [
            name for name, one in zip(event_ids, found, strict=True) if one is None
        ]
        for name in missing:
            await self._require_webhook(name)
        await session.patiently(lambda: ask_again(session.redis, event_ids))

    async def _require_webhook(self, job_id: str) -> None:
        try:
            key = JobId.parse(job_id).keys.job(job_id)
        except UnknownJob:
            url = state = None
        else:
            ((url, state),) = await self._session.read(
                ("HMGET", key, "webhook", "state")
            )
        if not url:
            raise UnknownJob(
                f"no webhook of '{job_id[:120]}'; `tokenmill webhooks list` shows "
                "those that there are"
            )
        name = (state or b"").decode(errors="replace")
        if name not in TERMINAL:
            raise InvalidRequest(
                "id",
                f"'{job_id[:120]}' is {name or 'in no state'}; expected a job that "
                "has ended: its webhook is delivered then, and needs no request",
            )


class SyncAccountCalls:
    """The same for `SyncClient`."""

    _client: "Client"

    @property
    def _thread(self) -> "LoopThread":
        raise NotImplementedError

    def usage(self, tenant: str | None = None, days: int = 30) -> list[UsageRow]:
        """Returns what was used by day, tenant and model; see `Client.usage`."""
        return self._thread.run(self._client.usage(tenant, days))

    def webhooks(
        self,
        *,
        state: DeliveryState | None = None,
        tenant: str | None = None,
        limit: int = 50,
    ) -> list[Delivery]:
        """Returns deliveries of webhooks; see `Client.webhooks`."""
        return self._thread.run(
            self._client.webhooks(state=state, tenant=tenant, limit=limit)
        )

    def redeliver(self, event_ids: Sequence[str]) -> None:
        """Has webhooks delivered once more; see `Client.redeliver`."""
        self._thread.run(self._client.redeliver(event_ids))
