"""The only place that builds names in Redis.

Per model and partition everything carries one hash tag, so a script touches one slot:
`tm:{<model>:<partition>}:…`. Pool-wide names carry none; those of files and batches are
in `file_keys.py`, those of bulk runs in `bulk/keys.py`, those of webhooks in
`webhook_keys.py`, those of versions in `version_keys.py`. Which of all these may stay
for ever is in `permanent_keys.py`.
"""

import os
import re
import time
import zlib
from typing import Final

import msgspec

from .errors import UnknownJob

POOL: Final = "tm:pool"
"""string, JSON PoolCard; permanent."""
STORE: Final = "tm:store"
"""string, this pool's own directory in the store of large inputs; permanent."""
MODELS: Final = "tm:models"
"""hash, model -> JSON ModelCard; permanent."""
SHARDS: Final = "tm:shards"
"""set of `<model>:<partition>` that have ever had a job or a worker; permanent."""
WARM: Final = "tm:warm"
"""hash, model -> fingerprint of the tokenizer that a worker which is still loading
will name; schedulers load it meanwhile; permanent."""
SCRIPTS: Final = "tm:scripts"
"""hash, script name -> Lua source, for clients in other languages; permanent."""
API_KEYS: Final = "tm:api-keys"
"""hash, SHA-256 of an API key in hex -> JSON KeyRecord, revoked ones too; permanent."""
PROCESSES: Final = "tm:processes"
"""zset, `<kind>:<id>` -> Redis ms of the process's last sign; permanent, trimmed."""
HISTORY: Final = "tm:history"
"""Stream of samples of the pool, one each ten seconds, field s; permanent, trimmed."""
JANITOR_QUEUE: Final = "tm:arq:janitor"
"""zset, arq's queue of housekeeping tasks; arq adds keys under `arq:` of its own."""
INPUTS: Final = "tm:{*}:in:*"
"""Pattern of the requests of every shard, registered or not."""

LANES: Final = 256
"""Tenants are hashed into this many lanes per class and bucket."""
BEYOND: Final = "beyond"
"""Bucket of prompts longer than the last bound."""

MODEL_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,95}")
"""Names that may stand in keys and ids: no braces, no colon, no white space."""
_JOB_ID: Final = re.compile(
    rf"(?P<model>{MODEL_NAME.pattern})"
    r"\.(?P<partition>0|[1-9][0-9]{0,2})\.(?P<unique>[a-z0-9]{16,40})"
)
SHARD: Final = re.compile(rf"(?P<model>{MODEL_NAME.pattern}):(0|[1-9][0-9]{{0,2}})")
"""A member of `tm:shards`."""


def is_shard(member: str) -> bool:
    """Whether a member of `tm:shards` can be `<model>:<partition>`."""
    return SHARD.fullmatch(member) is not None


def tokenizer_key(fingerprint: str) -> str:
    """string, gzip of a JSON object of tokenizer files; permanent."""
    return f"tm:tokenizer:{fingerprint}"


def session_key(fingerprint: str) -> str:
    """string, fingerprint of an API key: a browser's session, named by the SHA-256 of
    its cookie in hex; expires.
    """
    return f"tm:session:{fingerprint}"


def process_key(member: str) -> str:
    """string, JSON ProcessCard of a member of `tm:processes`; expires, is renewed."""
    return f"tm:process:{member}"


def partition_of(tenant: str, key: str, partitions: int) -> int:
    """Returns the partition of a job: CRC-32 of tenant, NUL and key, modulo.

    Args:
        tenant: The job's tenant.
        key: Its idempotency key, or its unique part where there is none.
        partitions: How many the pool has, at least 1.
    """
    return zlib.crc32(f"{tenant}\0{key}".encode()) % partitions


def lane_of(tenant: str) -> int:
    """Returns the lane of a tenant: CRC-32 of its name modulo 256."""
    return zlib.crc32(tenant.encode()) % LANES


def bucket_of(num_tokens: int, bounds: tuple[int, ...]) -> str:
    """Returns the name of the length bucket: the first bound that holds the prompt.

    Args:
        num_tokens: Prompt length in tokens, estimated or exact.
        bounds: Upper bounds, rising, inclusive.
    """
    for bound in bounds:
        if num_tokens <= bound:
            return str(bound)
    return BEYOND


class JobId(msgspec.Struct, frozen=True):
    """A job's id taken apart: `<model>.<partition>.<unique>`."""

    model: str
    partition: int
    unique: str

    def __str__(self) -> str:
        return f"{self.model}.{self.partition}.{self.unique}"

    @property
    def keys(self) -> "Keys":
        """Names of the shard that holds this job."""
        return Keys(self.model, self.partition)

    @classmethod
    def parse(cls, text: str) -> "JobId":
        """Takes an id apart.

        Raises:
            UnknownJob: `text` cannot be a job id.
        """
        match = _JOB_ID.fullmatch(text)
        if match is None:
            raise UnknownJob(
                f"'{text[:80]}' cannot be a job id; "
                "expected <model>.<partition>.<16 to 40 of a-z and 0-9>"
            )
        return cls(match["model"], int(match["partition"]), match["unique"])


def new_unique() -> str:
    """Returns a new unique part: 11 hex digits of milliseconds, 20 random ones."""
    return f"{time.time_ns() // 1_000_000:011x}{os.urandom(10).hex()}"


class Keys:
    """Names of one shard: one model, one partition.

    Args:
        model: The model's public name.
        partition: Its partition, from 0.
    """

    __slots__ = ("model", "partition", "prefix")

    def __init__(self, model: str, partition: int) -> None:
        self.model = model
        self.partition = partition
        self.prefix = f"tm:{{{model}:{partition}}}:"

    @property
    def shard(self) -> str:
        """`<model>:<partition>`, the member of `tm:shards`."""
        return f"{self.model}:{self.partition}"

    @classmethod
    def of_shard(cls, shard: str) -> "Keys":
        """The names of a member of `tm:shards`."""
        model, _, partition = shard.rpartition(":")
        return cls(model, int(partition))

    # --- waiting ---------------------------------------------------------------
    def queue(self, job_class: str, bucket: str, lane: int) -> str:
        """Stream of waiting jobs: fields id, tokens (estimate), priority, deadline."""
        return f"{self.prefix}q:{job_class}:{bucket}:{lane}"

    @property
    def lanes(self) -> str:
        """zset, `<class>:<bucket>:<lane>` -> Redis ms of its oldest known entry."""
        return f"{self.prefix}lanes"

    @property
    def resume(self) -> str:
        """Stream of redelivered, retried and drained jobs, read first."""
        return f"{self.prefix}resume"

    @property
    def delayed(self) -> str:
        """zset, job id -> Redis ms at which it is due (delayed and retrying)."""
        return f"{self.prefix}delayed"

    # --- one job ---------------------------------------------------------------
    def job(self, job_id: str) -> str:
        """hash, the job's record."""
        return f"{self.prefix}job:{job_id}"

    def input(self, job_id: str) -> str:
        """string, JSON JobRequest."""
        return f"{self.prefix}in:{job_id}"

    def ids(self, job_id: str) -> str:
        """string, prompt token ids as little-endian int32, written at dispatch."""
        return f"{self.prefix}ids:{job_id}"

    def output(self, job_id: str) -> str:
        """string, JSON JobResult."""
        return f"{self.prefix}out:{job_id}"

    def log(self, job_id: str) -> str:
        """Stream `<epoch>-<seq>` of deltas: field d, JSON Delta."""
        return f"{self.prefix}tok:{job_id}"

    def wake(self, job_id: str) -> str:
        """channel, the same deltas, live."""
        return f"{self.prefix}wake:{job_id}"

    def idempotency(self, tenant: str, key: str) -> str:
        """string, `<job id> <payload hash>`."""
        return f"{self.prefix}idem:{tenant}:{key}"

    # --- who runs what -----------------------------------------------------------
    @property
    def lease(self) -> str:
        """zset, job id -> Redis ms at which its lease ends: the truth."""
        return f"{self.prefix}lease"

    @property
    def deadline(self) -> str:
        """zset, job id -> Redis ms of its deadline."""
        return f"{self.prefix}deadline"

    def work(self, group: str) -> str:
        """Stream of jobs dispatched to one group: fields id, epoch, batch."""
        return f"{self.prefix}work:{group}"

    def group(self, group: str) -> str:
        """Hash of one group (one incarnation of one worker); expires unless renewed."""
        return f"{self.prefix}group:{group}"

    @property
    def groups(self) -> str:
        """zset, group -> Redis ms of its last heartbeat."""
        return f"{self.prefix}groups"

    def control(self, group: str) -> str:
        """Channel to one group: cancels."""
        return f"{self.prefix}ctl:{group}"

    @property
    def bell(self) -> str:
        """Channel to the scheduler: something arrived or room was made."""
        return f"{self.prefix}bell"

    @property
    def scheduler(self) -> str:
        """hash, owner, fence, until (Redis ms), and schema, the newest version that it
        reads: the active scheduler's lease.
        """
        return f"{self.prefix}scheduler"

    # --- the shard -----------------------------------------------------------------
    @property
    def load(self) -> str:
        """hash, waiting jobs and tokens: in all, per class, per tenant."""
        return f"{self.prefix}load"

    @property
    def limits(self) -> str:
        """hash, what may wait, written by the active scheduler; permanent."""
        return f"{self.prefix}limits"

    @property
    def rates(self) -> str:
        """zset, tenant -> Redis ms at which its allowance of tokens is full again."""
        return f"{self.prefix}rates"

    @property
    def recent(self) -> str:
        """zset, job id -> Redis ms of enqueue, the newest 10,000."""
        return f"{self.prefix}recent"

    @property
    def done(self) -> str:
        """Stream of terminal events, trimmed."""
        return f"{self.prefix}done"

    @property
    def usage(self) -> str:
        """hash, `<day>:<tenant>` -> what ended jobs have used (`lua/lib/usage.lua`)."""
        return f"{self.prefix}usage"

    @property
    def webhooks(self) -> str:
        """zset, job id with a webhook that is not settled -> Redis ms of enqueue."""
        return f"{self.prefix}webhooks"

    @property
    def dead(self) -> str:
        """Stream of dead letters with the last error."""
        return f"{self.prefix}dlq"
