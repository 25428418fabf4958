"""Scripts that worker groups use: register, take jobs, renew, fail, hand back."""

from collections.abc import Sequence
from typing import Final, cast

import msgspec
import structlog

from .errors import ProtocolError
from .keys import MODELS
from .messages import ModelCard, encode
from .redis import translate
from .script_endings import cancelled
from .script_runner import (
    LOOKUPS,
    Argument,
    ScriptRunner,
    chunks,
    number,
    text,
)
from .script_types import (
    DEAD_MS,
    FailStatus,
    GroupInfo,
    RenewStatus,
    Started,
    StartItem,
)
from .version_keys import cards_key, versions_key

_log: Final = structlog.get_logger(__name__)


class WorkerScripts(ScriptRunner):
    """The worker's side of the protocol. `group` is also the owner in fencing."""

    async def register_group(self, group: str, info: GroupInfo, ttl_ms: int) -> int:
        """Offers a group's capacity.

        Args:
            group: This incarnation's random name.
            info: Its model facts; the credit fields are ignored.
            ttl_ms: How long it lives without a heartbeat.

        Returns:
            Now in milliseconds by the clock of Redis.
        """
        await self.register_shard()
        k = self._keys
        with translate():
            members = await self._redis.zrange(k.lease, 0, -1)
        held = [text(member) for member in members]
        # Only a group that comes back after a silence has jobs; look for them.
        hints = await self.hints(held) if held else []
        mine = [j for j, hint in zip(held, hints, strict=True) if hint.owner == group]
        keys = [k.group(group), k.groups, k.bell, *(k.job(job_id) for job_id in mine)]
        return number(await self.run("register", keys, _facts(group, info, ttl_ms)))

    async def publish_card(self, version: str, card: ModelCard) -> None:
        """Says what a version of the model can do.

        Producers take it for the model's own where the model has no route, or the
        version has a share of it.

        Args:
            version: Of the model.
            card: What its workers say.
        """
        keys = [versions_key(card.model), cards_key(card.model), MODELS]
        await self.run("route_card", keys, [card.model, version, encode(card)])

    async def heartbeat(self, group: str, info: GroupInfo, ttl_ms: int) -> int:
        """Renews a group; registers it again when it had expired.

        Args:
            group: This incarnation's name.
            info: Its facts now: step time, state, capacity.
            ttl_ms: How long it lives without the next heartbeat.

        Returns:
            Now in milliseconds by the clock of Redis.
        """
        k = self._keys
        keys = [k.group(group), k.groups, k.bell]
        now = number(await self.run("heartbeat", keys, _facts(group, info, ttl_ms)))
        return now or await self.register_group(group, info, ttl_ms)

    async def leave(self, group: str) -> None:
        """Removes a group. Its leases stay: `release` the jobs first."""
        k = self._keys
        await self.run("leave", [k.group(group), k.groups, k.work(group)], [group, "0"])

    async def start(
        self, *, group: str, lease_ms: int, items: Sequence[StartItem]
    ) -> list[Started]:
        """Takes dispatched jobs. Safe to repeat.

        Args:
            group: This incarnation's name.
            lease_ms: Length of the lease.
            items: Entries of the group's work stream.

        Returns:
            One for each item, in order.
        """
        k = self._keys
        found: list[Started] = []
        for chunk in chunks(items):
            keys = [k.lease, k.work(group)]
            args: list[Argument] = [group, lease_ms, len(chunk)]
            for item in chunk:
                keys += self.job_keys(item.job_id)[:3]
                keys.append(k.log(item.job_id))
                args += (item.job_id, item.epoch, item.entry_id)
            replies = await self.run_list("start", keys, args)
            found += [
                _started_or_lost(item, cast("list[bytes]", reply))
                for item, reply in zip(chunk, replies, strict=True)
            ]
        return found

    async def renew(
        self, *, group: str, lease_ms: int, jobs: Sequence[tuple[str, int]]
    ) -> list[RenewStatus]:
        """Extends the leases of all jobs of a group: pairs of id and epoch."""
        k = self._keys
        found: list[RenewStatus] = []
        for chunk in chunks(jobs):
            keys = [k.lease, *(k.job(job_id) for job_id, _ in chunk)]
            args: list[Argument] = [group, lease_ms, len(chunk)]
            for job in chunk:
                args += job
            replies = await self.run_list("renew", keys, args)
            found += [cast("RenewStatus", text(reply)) for reply in replies]
        return found

    async def fail(
        self,
        *,
        group: str,
        job_id: str,
        epoch: int,
        error: str,
        delay_ms: int,
        max_attempts: int,
        result: bytes,
        end: bytes,
        dead_ms: int = DEAD_MS,
    ) -> FailStatus:
        """Reports an application fault of a running job.

        Args:
            group: This incarnation's name.
            job_id: The job.
            epoch: Its epoch as dispatched.
            error: JSON JobError.
            delay_ms: Back-off before the next run, jitter included.
            max_attempts: Runs that may end in a fault.
            result: JSON JobResult, recorded when attempts are used up.
            end: JSON Delta with `end`, likewise.
            dead_ms: How long the record, input and result of a dead letter stay.
        """
        k = self._keys
        shard = [k.lease, k.deadline, k.delayed, k.load, k.done, k.dead, k.bell]
        tenant = idem = ""
        for _ in range(LOOKUPS):
            keys = [*shard, k.group(group), k.usage]
            keys += self.job_keys(job_id, tenant, idem)
            args: list[Argument] = [group, job_id, epoch, error, delay_ms, max_attempts]
            args += (result, end, *cancelled(job_id), dead_ms)
            status = text(await self.run("fail", keys, args))
            if status != "keys":
                return cast("FailStatus", status)
            (hint,) = await self.hints([job_id])
            tenant, idem = hint.tenant, hint.idem
        raise ProtocolError(f"the record of job {job_id} changes while it fails")

    async def release(
        self, *, group: str, jobs: Sequence[tuple[str, int]]
    ) -> list[bool]:
        """Hands jobs back to the queue at no cost to them: pairs of id and epoch.

        Returns:
            For each job whether it was still held (and so is queued again, or ended
            when its cancel was asked for).
        """
        k = self._keys
        found: list[bool] = []
        for chunk in chunks(jobs):
            hints = await self.hints([job_id for job_id, _ in chunk])
            keys = [k.lease, k.deadline, k.load, k.done, k.bell]
            keys += (k.group(group), k.work(group), k.resume, k.usage)
            args: list[Argument] = [group, len(chunk)]
            for (job_id, epoch), hint in zip(chunk, hints, strict=True):
                keys += self.job_keys(job_id, hint.tenant, hint.idem)
                args += (job_id, epoch, *cancelled(job_id, hint))
            replies = await self.run_list("release", keys, args)
            found += [text(reply) in ("released", "cancelled") for reply in replies]
        return found


def _facts(group: str, info: GroupInfo, ttl_ms: int) -> list[Argument]:
    a, b = info.step_fit_ms
    counters = {} if info.counters is None else msgspec.structs.asdict(info.counters)
    # One that has loaded some has always some: what it says is never to be taken back.
    adapters = " ".join(sorted(info.adapters))
    return [
        *(group, ttl_ms, info.total_blocks, info.max_running, info.batch_tokens),
        *("block_size", info.block_size, "max_context", info.max_context),
        *("weights_version", info.weights_version, "step_fit_ms", f"{a:.6g} {b:.6g}"),
        *("state", info.state, "serves", info.serves, "schema", info.schema),
        *("version", info.version, "tokenizer", info.tokenizer),
        *("tp", info.tp),
        *("tokens_per_s", f"{info.tokens_per_s:.4g}"),
        *("output_tokens", info.output_tokens),
        *(part for pair in counters.items() for part in pair),
        *(("adapters_in_memory", adapters) if adapters else ()),
    ]


def _started_or_lost(item: StartItem, reply: list[bytes]) -> Started:
    """One damaged record must not stop its neighbours: it is left to lose its leases,
    which ends in the dead letters.
    """
    try:
        return _started(item, reply)
    except ProtocolError as error:
        _log.warning("record_unreadable", job_id=item.job_id, error=str(error))
        return Started(status="lost", job_id=item.job_id, epoch=item.epoch)


def _started(item: StartItem, reply: list[bytes]) -> Started:
    status = text(reply[0])
    if status != "started":
        return Started(
            status="cancelled" if status == "cancelled" else "lost",
            job_id=item.job_id,
            epoch=item.epoch,
        )
    deadline, weights = reply[12], reply[13]
    return Started(
        status="started",
        job_id=item.job_id,
        epoch=item.epoch,
        payload=reply[1],
        token_ids=reply[2],
        seed=number(reply[3]),
        job_class=text(reply[4]),
        priority=number(reply[5]),
        tenant=text(reply[6]),
        attempts=number(reply[7]),
        lease_losses=number(reply[8]),
        enqueued_ms=number(reply[9]),
        started_ms=number(reply[10]),
        first_ms=number(reply[11]) if reply[11] else None,
        deadline_ms=number(deadline) if deadline else None,
        weights=text(weights) if weights else None,
        log=tuple(reply[14:]),
    )
