"""Scripts that bring output to Redis: deltas while a job runs, then its end."""

from collections.abc import Sequence
from typing import cast

from .script_runner import CHUNK_BYTES, CHUNK_JOBS, Argument, ScriptRunner, chunks, text
from .script_types import EmitItem, EmitStatus, FinishItem, FinishStatus

_Call = tuple[str, list[str], list[Argument]]
_NO_IDEM = ("", "")


class PublishScripts(ScriptRunner):
    """The worker's output. `group` is also the owner in fencing."""

    async def emit(self, *, group: str, items: Sequence[EmitItem]) -> list[EmitStatus]:
        """Publishes deltas; several of one job are allowed, in order.

        Args:
            group: This incarnation's name.
            items: The deltas.

        Returns:
            One status for each delta, in order.
        """
        found: list[EmitStatus] = []
        for chunk in chunks(items, _delta_size):
            replies = await self.run_list(*self._emit_call(group, chunk))
            found += [cast("EmitStatus", text(reply)) for reply in replies]
        return found

    async def finish(
        self, *, group: str, items: Sequence[FinishItem]
    ) -> list[FinishStatus]:
        """Records how jobs ended. Once: repeated calls change nothing.

        Args:
            group: This incarnation's name.
            items: The ends.

        Returns:
            One status for each item, in order.
        """
        found: list[FinishStatus] = []
        for chunk in chunks(items, _end_size):
            call = self._finish_call(group, chunk, [_NO_IDEM] * len(chunk))
            found += await self._settled(group, chunk, await self.run_list(*call))
        return found

    async def emit_and_finish(
        self, *, group: str, deltas: Sequence[EmitItem], ends: Sequence[FinishItem]
    ) -> tuple[list[EmitStatus], list[FinishStatus]]:
        """Publishes last deltas and records the ends in one round trip.

        Redis runs both in this order, so a subscriber sees the same as from `emit`
        and then `finish`. Where a full server refuses the deltas, the ends are held
        back; the error is raised and both are to be sent again.

        Args:
            group: This incarnation's name.
            deltas: As for `emit`.
            ends: As for `finish`.

        Returns:
            What `emit` and `finish` return.
        """
        size = sum(map(_delta_size, deltas)) + sum(map(_end_size, ends))
        if size > CHUNK_BYTES or max(len(deltas), len(ends)) > CHUNK_JOBS:
            emitted = await self.emit(group=group, items=deltas)
            return emitted, await self.finish(group=group, items=ends)
        written, recorded = await self.run_in_turn(
            [
                self._emit_call(group, deltas),
                self._finish_call(group, ends, [_NO_IDEM] * len(ends), follows=True),
            ]
        )
        statuses = [cast("EmitStatus", text(reply)) for reply in written]
        return statuses, await self._settled(group, ends, recorded)

    def _emit_call(self, group: str, items: Sequence[EmitItem]) -> _Call:
        k = self._keys
        keys = [k.group(group), k.load, k.bell]
        args: list[Argument] = [group, len(items)]
        for item in items:
            job_id = item.job_id
            keys += (k.job(job_id), k.log(job_id), k.wake(job_id))
            args += (job_id, item.epoch, item.seq, item.delta)
        return "emit", keys, args

    def _finish_call(
        self,
        group: str,
        items: Sequence[FinishItem],
        idems: Sequence[tuple[str, str]],
        *,
        follows: bool = False,
    ) -> _Call:
        k = self._keys
        keys = [k.lease, k.deadline, k.load, k.done, k.bell]
        keys += (k.group(group), k.work(group), k.usage)
        args: list[Argument] = [group, len(items)]
        for item, (tenant, idem) in zip(items, idems, strict=True):
            keys += self.job_keys(item.job_id, tenant, idem)
            args += (item.job_id, item.epoch, item.seq, item.state)
            args += (item.result, item.end, item.error)
        if follows:
            args.append(1)
        return "finish", keys, args

    async def _settled(
        self, group: str, items: Sequence[FinishItem], replies: Sequence[object]
    ) -> list[FinishStatus]:
        """Asks again, with its name, for jobs that have an idempotency key.

        And for those held back though no delta was refused: a stranger has shortened
        their log.
        """
        statuses = [text(reply) for reply in replies]
        late = [i for i, status in enumerate(statuses) if status in ("keys", "held")]
        if late:
            hints = await self.hints([items[i].job_id for i in late])
            idems = [(hint.tenant, hint.idem) for hint in hints]
            call = self._finish_call(group, [items[i] for i in late], idems)
            for i, reply in zip(late, await self.run_list(*call), strict=True):
                statuses[i] = "lost" if text(reply) == "keys" else text(reply)
        return cast("list[FinishStatus]", statuses)


def _delta_size(item: EmitItem) -> int:
    return len(item.delta)


def _end_size(item: FinishItem) -> int:
    return len(item.result) + len(item.end)
