"""Making copies: from a job that has ended to one for the version that is tried."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import redis.asyncio
import structlog

from ..shared.errors import TokenmillError
from ..shared.keys import JobId, Keys
from ..shared.messages import PIN_VERSION, JobClass, JobRequest, JobResult, encode
from ..shared.new_job import fingerprint
from ..shared.routes import Route
from ..shared.script_runner import count_of, text
from ..shared.script_types import NewJob
from ..shared.scripts import Scripts
from ..shared.shadow_keys import SHADOW_TENANT, source_key
from ..shared.shadow_report import SkipReason

PRIORITY: Final = 100
"""The least urgent there is."""
DEADLINE_MS: Final = 600_000
"""A copy that has not ended by then says nothing of today's traffic."""
KEEP_MS: Final = 600_000
MOST_BYTES: Final = 256 * 1024
"""Of a request: waiting copies count in no limit, so they are kept small."""
SOURCE_S: Final = 7200
"""A copy is compared or has expired long before."""
_FIELDS: Final = ("bucket", "tokens", "max_tokens", "seed", "version")
_log = structlog.get_logger(__name__)


class Made(msgspec.Struct, frozen=True):
    """What became of jobs that were to be copied."""

    copied: int = 0
    """Those that were copied before are counted in neither."""
    skipped: Mapping[SkipReason, int] = {}


class Copier:
    """Enqueues copies.

    Args:
        client: Redis; replies are bytes.
    """

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self._client = client

    async def copy(
        self, keys: Keys, route: Route, version: str, job_ids: Sequence[str]
    ) -> Made:
        """Copies jobs of a shard that have ended.

        Args:
            keys: The shard's names.
            route: Of its model.
            version: Where to.
            job_ids: The jobs.
        """
        pipe = self._client.pipeline(transaction=False)
        for job_id in job_ids:
            pipe.hmget(keys.job(job_id), list(_FIELDS))
            pipe.get(keys.input(job_id))
            pipe.get(keys.output(job_id))
        replies = await pipe.execute(raise_on_error=False) if job_ids else []
        jobs: dict[str, NewJob] = {}
        skipped: Counter[SkipReason] = Counter()
        for place, job_id in enumerate(job_ids):
            job = _copy_of(
                job_id, route, version, replies[3 * place : 3 * place + 3], keys
            )
            if isinstance(job, NewJob):
                jobs[job_id] = job
            else:
                skipped[job] += 1
        copied, refused = await self._enqueue(keys, jobs)
        skipped["refused"] += refused
        return Made(copied, skipped)

    async def _enqueue(self, keys: Keys, jobs: dict[str, NewJob]) -> tuple[int, int]:
        """Returns how many were enqueued, and how many were refused."""
        if not jobs:
            return 0, 0
        pipe = self._client.pipeline(transaction=False)
        for source, job in jobs.items():
            # Before the copy can end: its end is compared by this.
            pipe.set(source_key(str(job.id)), source, ex=SOURCE_S, nx=True)
        await pipe.execute()
        try:
            replies = await Scripts(self._client, keys).enqueue(list(jobs.values()))
        except TokenmillError as error:
            _log.warning("shadow_not_enqueued", shard=keys.shard, error=str(error))
            return 0, len(jobs)
        known = Counter(reply.status for reply in replies)
        return known["queued"], len(jobs) - known["queued"] - known["duplicate"]


def _not_copied(
    request: JobRequest, result: JobResult, route: Route, version: str, pinned: str
) -> SkipReason | None:
    if pinned:
        return "pinned"
    if result.version == version:
        return "served_it"
    if result.version not in route.shares:
        return "no_share"
    if request.text_ref is not None:
        return "stored_input"  # which is its tenant's own
    return "adapter" if request.adapter is not None else None  # of its base alone


def _copy_of(
    job_id: str, route: Route, version: str, replies: Sequence[object], keys: Keys
) -> NewJob | SkipReason:
    """Returns the copy of a job, or why it is not one to be copied."""
    record, payload, output = replies
    if not (
        isinstance(record, list)
        and isinstance(payload, bytes)
        and isinstance(output, bytes)
    ):
        return "gone"
    if len(payload) > MOST_BYTES:
        return "too_large"
    bucket, tokens, max_tokens, seed, pinned = map(text, record)
    try:
        request = msgspec.json.decode(payload, type=JobRequest)
        result = msgspec.json.decode(output, type=JobResult)
    except msgspec.MsgspecError:
        _log.warning("shadow_source_unreadable", job=job_id)
        return "unreadable"
    if not seed:
        return "gone"  # between its record and its output
    if (reason := _not_copied(request, result, route, version, pinned)) is not None:
        return reason
    request = msgspec.structs.replace(request, v=PIN_VERSION, version=version)
    copied = encode(request)
    unique = hashlib.blake2b(f"{version}\0{job_id}".encode(), digest_size=12)
    return NewJob(
        id=JobId(keys.model, keys.partition, unique.hexdigest()),
        payload=copied,
        payload_hash=fingerprint(copied),
        job_class=JobClass.BULK,
        tenant=SHADOW_TENANT,
        priority=PRIORITY,
        bucket=bucket,
        tokens=max(count_of(tokens), 1),
        max_tokens=max(count_of(max_tokens), 1),
        seed=count_of(seed),
        deadline_ms=DEADLINE_MS,
        keep_ms=KEEP_MS,
        version=version,
        v=PIN_VERSION,
    )
