"""Dead letters: jobs that failed for good, and entries that nobody understood."""

from collections.abc import Sequence
from typing import Final, cast

import msgspec
from redis.exceptions import ResponseError

from .errors import ProtocolError
from .redis import translate
from .script_runner import Argument, ScriptRunner, chunks, number, text

MOST_LETTERS: Final = 10_000
"""Dead letters that a shard keeps; the scripts drop the oldest beyond."""


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a shard's dead letters, as it stands in Redis."""

    entry: str
    """Its stream id, which begins with the Redis ms of the burial."""
    job_id: str = ""
    """Empty for an entry of a waiting stream that could not be understood."""
    reason: str = ""
    """For a job `lease_losses`, `start_losses` or `attempts`; else what was wrong."""
    error: bytes = b""
    """JSON JobError; of an entry the stream and id where it stood."""

    @property
    def at_ms(self) -> int:
        """When it was buried, by the clock of Redis."""
        return int(self.entry.partition("-")[0])


class DeadScripts(ScriptRunner):
    """Reading, marking and purging the dead letters of a shard."""

    async def letters(self) -> list[Letter]:
        """Returns all dead letters, newest first; see `MOST_LETTERS`.

        Raises:
            ProtocolError: Something other than tokenmill wrote their key.
        """
        key = self._keys.dead
        with translate():
            try:
                rows = await self._redis.xrevrange(key, count=MOST_LETTERS)
            except ResponseError as error:
                if "WRONGTYPE" not in str(error):
                    raise
                raise ProtocolError(
                    f"the key {key} is no stream; something other than tokenmill wrote "
                    "it: delete it, and dead letters will be kept again"
                ) from None
        entries = cast("list[tuple[bytes, dict[bytes, bytes]]]", rows)
        return [_letter(text(entry), fields) for entry, fields in entries]

    async def purge_letters(self, letters: Sequence[Letter]) -> int:
        """Removes letters, and lets go of what they kept.

        Args:
            letters: Of this shard.

        Returns:
            How many of them were still there.
        """
        k, removed = self._keys, 0
        for chunk in chunks(letters):
            keys = [k.dead]
            args: list[Argument] = [len(chunk)]
            for letter in chunk:
                job_id = letter.job_id
                names = (k.job(job_id), k.input(job_id), k.output(job_id))
                keys += names if job_id else (k.dead,) * 3
                args += (letter.entry, job_id)
            removed += sum(map(number, await self.run_list("purge_dead", keys, args)))
        return removed

    async def mark_requeued(self, pairs: Sequence[tuple[str, str]]) -> list[str]:
        """Notes under which ids dead jobs run again.

        Args:
            pairs: Id of a dead job and of the job that was made from it.

        Returns:
            For each pair the id that is noted; empty when the record is gone.
        """
        noted: list[str] = []
        for chunk in chunks(pairs):
            keys = [self._keys.job(dead) for dead, _ in chunk]
            replies = await self.run_list("mark_requeued", keys, [n for _, n in chunk])
            noted += map(text, replies)
        return noted


def _letter(entry: str, fields: dict[bytes, bytes]) -> Letter:
    if b"id" in fields:
        return Letter(
            entry=entry,
            job_id=text(fields[b"id"]),
            reason=text(fields.get(b"reason")),
            error=fields.get(b"error", b""),
        )
    where = f"{text(fields.get(b'stream'))} {text(fields.get(b'entry'))}"
    return Letter(entry=entry, reason=text(fields.get(b"reason")), error=where.encode())
