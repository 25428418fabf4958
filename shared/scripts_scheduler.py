"""Scripts that the scheduler uses: leadership, dispatch, reject, dead letters."""

from collections.abc import Mapping, Sequence
from typing import cast

from .errors import ProtocolError
from .messages import DEFAULT_VERSION
from .redis import translate
from .script_runner import (
    LOOKUPS,
    Argument,
    ScriptRunner,
    chunks,
    number,
    text,
)
from .script_types import (
    DispatchItem,
    DispatchReply,
    DispatchStatus,
    EngineCounters,
    GroupInfo,
)


class SchedulerScripts(ScriptRunner):
    """The scheduler's side of the protocol. `fence` comes from `acquire_scheduler`."""

    async def acquire_scheduler(self, owner: str, lease_ms: int) -> int | None:
        """Takes or renews the lease of the active scheduler.

        Args:
            owner: This incarnation's random name.
            lease_ms: Length of the lease.

        Returns:
            The fence number while the owner is active, else None.
        """
        reply = await self.run(
            "acquire_scheduler", [self._keys.scheduler], [owner, lease_ms]
        )
        return number(reply) or None

    async def release_scheduler(self, owner: str) -> bool:
        """Gives the lease up; whether the owner held it."""
        reply = await self.run("release_scheduler", [self._keys.scheduler], [owner])
        return number(reply) == 1

    async def groups(self) -> list[GroupInfo]:
        """Returns the groups that are alive, with their credit."""
        with translate():
            members = await self._redis.zrange(self._keys.groups, 0, -1)
            names = [text(member) for member in members]
            if not names:
                return []
            pipe = self._redis.pipeline(transaction=False)
            for name in names:
                pipe.hgetall(self._keys.group(name))
            rows = await pipe.execute()
        return [group_info(row) for row in rows if row]

    async def dispatch(
        self,
        *,
        fence: int,
        group: str,
        batch: str,
        lease_ms: int,
        items: Sequence[DispatchItem],
    ) -> list[DispatchReply]:
        """Promises queued jobs to a group. Safe to repeat with the same batch name.

        Args:
            fence: The active scheduler's.
            group: Who gets them.
            batch: A name for this batch, new for every batch.
            lease_ms: How long the group has to start them.
            items: The jobs.

        Returns:
            One reply for each item, in order.
        """
        found: list[DispatchReply] = []
        for chunk in chunks(items, lambda item: len(item.token_ids)):
            shared: list[Argument] = [fence, group, batch, lease_ms]
            replies = await self._dispatch(shared, group, chunk, {})
            for _ in range(LOOKUPS):
                moved = [i for i, reply in enumerate(replies) if reply[0] == "moved"]
                if not moved:
                    break
                hints = await self.hints([chunk[i].job_id for i in moved])
                streams = {
                    chunk[i].job_id: hint.entry_key
                    for i, hint in zip(moved, hints, strict=True)
                }
                again = await self._dispatch(
                    shared, group, [chunk[i] for i in moved], streams
                )
                for i, reply in zip(moved, again, strict=True):
                    replies[i] = reply
            found += [
                DispatchReply(
                    item.job_id,
                    cast("DispatchStatus", "gone" if status == "moved" else status),
                    epoch,
                )
                for item, (status, epoch) in zip(chunk, replies, strict=True)
            ]
        return found

    async def _dispatch(
        self,
        shared: Sequence[Argument],
        group: str,
        items: Sequence[DispatchItem],
        streams: dict[str, str],
    ) -> list[tuple[str, int]]:
        k = self._keys
        keys = [k.scheduler, k.load, k.lanes, k.lease]
        keys += (k.group(group), k.work(group), k.resume)
        args: list[Argument] = [*shared, len(items)]
        for item in items:
            stream = streams.get(item.job_id) or item.entry_key or k.resume
            keys += (k.job(item.job_id), k.ids(item.job_id), stream)
            args += (item.job_id, item.tokens, item.token_ids, item.cost_blocks)
            args += (item.bucket, item.entry_id, item.choices, int(item.alone))
        flat = await self.run_list("dispatch", keys, args)
        return [
            (text(status), number(epoch))
            for status, epoch in zip(flat[0::2], flat[1::2], strict=True)
        ]

    async def reject(
        self,
        *,
        fence: int,
        job_id: str,
        state: str,
        result: bytes,
        end: bytes,
        entry: tuple[str, str] | None = None,
    ) -> bool:
        """Ends a queued job that can never run.

        Args:
            fence: The active scheduler's.
            job_id: The job.
            state: `failed` or `expired`.
            result: JSON JobResult.
            end: JSON Delta with `end`.
            entry: Stream and id of an entry; only if that is the job's own is it
                ended.

        Returns:
            Whether it was queued and has now ended.
        """
        k = self._keys
        for _ in range(LOOKUPS):
            (hint,) = await self.hints([job_id])
            if entry is not None and hint.entry_key != entry[0]:
                return False
            job_keys = self.job_keys(job_id, hint.tenant, hint.idem)
            keys = [k.scheduler, k.deadline, k.load, k.lanes, k.done, k.resume]
            keys += (hint.entry_key or job_keys[0], k.usage, *job_keys)
            args: list[Argument] = [fence, job_id, state, hint.entry_key, result, end]
            args.append("" if entry is None else entry[1])
            status = text(await self.run("reject", keys, args))
            if status != "keys":
                return status == "rejected"
        raise ProtocolError(f"the record of job {job_id} changes while it is rejected")

    async def dead_letter(self, *, entry_key: str, entry_id: str, reason: str) -> None:
        """Moves an entry that cannot be understood to the dead letters.

        Args:
            entry_key: The stream it stands in.
            entry_id: Its stream id.
            reason: What is wrong with it.
        """
        k = self._keys
        lanes = f"{k.prefix}q:"
        lane = entry_key.removeprefix(lanes) if entry_key.startswith(lanes) else ""
        await self.run(
            "dead_letter", [entry_key, k.dead, k.lanes], [entry_id, reason, lane]
        )


def group_info(row: Mapping[bytes, bytes]) -> GroupInfo:
    """Returns a group's hash as it stands in Redis, typed.

    Raises:
        ProtocolError: A field that is to be a number is none.
    """
    fields = {text(key): text(value) for key, value in row.items()}
    a, _, b = fields.get("step_fit_ms", "0 0").partition(" ")
    return GroupInfo(
        group=fields.get("group", ""),
        total_blocks=number(fields.get("total_blocks")),
        max_running=number(fields.get("max_running")),
        batch_tokens=number(fields.get("batch_tokens")),
        block_size=number(fields.get("block_size")),
        max_context=number(fields.get("max_context")),
        weights_version=fields.get("weights_version", ""),
        step_fit_ms=(float(a or 0), float(b or 0)),
        state="draining" if fields.get("state") == "draining" else "ready",
        schema=number(fields.get("schema")) or 1,
        version=fields.get("version") or DEFAULT_VERSION,
        tokenizer=fields.get("tokenizer", ""),
        credit_blocks=number(fields.get("credit_blocks")),
        credit_running=number(fields.get("credit_running")),
        credit_tokens=number(fields.get("credit_tokens")),
        bulk_blocks=number(fields.get("bulk_blocks")),
        bulk_running=number(fields.get("bulk_running")),
        bulk_tokens=number(fields.get("bulk_tokens")),
        alone=fields.get("alone", ""),
        serves=fields.get("serves") or "any",
        tp=number(fields.get("tp")) or 1,
        heartbeat_ms=number(fields.get("heartbeat_ms")),
        tokens_per_s=float(fields.get("tokens_per_s") or 0),
        output_tokens=number(fields.get("output_tokens")),
        adapters=frozenset(fields.get("adapters_in_memory", "").split()),
        counters=EngineCounters(
            **{
                name: number(fields.get(name))
                for name in EngineCounters.__struct_fields__
            }
        ),
    )
