"""Every error tokenmill raises, as one tree.

    TokenmillError
    ├── ConfigError
    ├── InvalidRequest                              one request is wrong; not retried
    │   ├── PromptTooLong, PayloadTooLarge, InputUnreadable
    │   ├── ControlTokensInText, UnknownAdapter
    │   └── InvalidBatch
    ├── IdempotencyConflict, QueueFull, DeadlineUnreachable, ModelUnavailable
    ├── UnknownJob, UnknownRun, UnknownVersion      no record, or it has expired
    ├── VersionConflict, VersionFailed
    ├── JobFailed                                   it ended without success
    │   └── JobCancelled, JobExpired
    ├── ResultTimeout
    ├── ProtocolError                               not our wire format
    │   └── NewerSchema
    ├── BulkItemsFailed, BulkRunConflict, BulkOutputFailed, BulkRunCancelled
    ├── IllegalTransition, LeaseLost                these never leave a process
    ├── RedisUnavailable, RedisUnsuitable, StorageUnavailable, MpsUnavailable
    ├── ModelLoadError
    │   └── HealthFailed
    └── EngineError                                 one request failed in the engine
        ├── AdapterUnavailable, KVPoolExhausted, NonFiniteLogits
        └── GroupLost                               a rank is dead: all restart

A message says what was wrong, what was expected and what to do. `exit_code` is the
command line's exit status for that kind; `code` is the name on the wire. Import
every kind from here; `errors_root` and `errors_refused` only hold a part of them.
"""

from .errors_refused import ControlTokensInText as ControlTokensInText
from .errors_refused import DeadlineUnreachable as DeadlineUnreachable
from .errors_refused import IdempotencyConflict as IdempotencyConflict
from .errors_refused import InputUnreadable as InputUnreadable
from .errors_refused import InvalidBatch as InvalidBatch
from .errors_refused import InvalidRequest as InvalidRequest
from .errors_refused import ModelUnavailable as ModelUnavailable
from .errors_refused import PayloadTooLarge as PayloadTooLarge
from .errors_refused import PromptTooLong as PromptTooLong
from .errors_refused import QueueFull as QueueFull
from .errors_refused import UnknownAdapter as UnknownAdapter
from .errors_root import TokenmillError as TokenmillError


class ConfigError(TokenmillError, code="invalid_config", exit_code=2):
    """A configuration key is unknown, unparsable or out of range.

    Args:
        key: The dotted key, for example ``worker.max_running``.
        problem: What was found, what was expected, and what to do.
        origin: Where the value came from (a file's path or a variable's name).
    """

    def __init__(self, key: str, problem: str, origin: str | None = None) -> None:
        self.key = key
        self.problem = problem
        self.origin = origin
        where = f" (from {origin})" if origin else ""
        super().__init__(f"configuration key '{key}'{where}: {problem}")


class UnknownJob(TokenmillError, code="unknown_job", exit_code=8):
    """There is no record of this job: the id is wrong or its retention has passed."""


class UnknownRun(TokenmillError, code="unknown_run", exit_code=8):
    """There is no record of this bulk run: it was never begun, or it has expired."""


class UnknownVersion(TokenmillError, code="unknown_version", exit_code=8):
    """The model has no version of that name."""


class VersionConflict(TokenmillError, code="version_conflict", exit_code=19):
    """A version's name is in use, or its state or share does not allow the change."""


class JobFailed(TokenmillError, code="job_failed", exit_code=9):
    """The job reached a terminal state other than success.

    Args:
        job_id: The job.
        error_code: The wire name of the cause, for example ``prompt_too_long``.
        message: The recorded message.
        field: The field of the request at fault, if one is.
    """

    def __init__(
        self, job_id: str, error_code: str, message: str, field: str | None = None
    ) -> None:
        self.job_id = job_id
        self.error_code = error_code
        self.message = message
        self.field = field
        super().__init__(f"job {job_id} {self.code}: [{error_code}] {message}")


class JobCancelled(JobFailed, code="job_cancelled", exit_code=10):
    """The job was cancelled before it finished."""


class JobExpired(JobFailed, code="job_expired", exit_code=11):
    """The job's deadline passed before it finished."""


class ResultTimeout(TokenmillError, TimeoutError, code="result_timeout", exit_code=12):
    """The caller's time-out passed while the job was still going; it goes on."""


class ProtocolError(TokenmillError, code="protocol_error", exit_code=13):
    """Something read from Redis is not in our wire format, or of another version."""


class NewerSchema(ProtocolError, code="newer_schema"):
    """A record of the next schema version: whoever reads that version will take it.

    Args:
        what: Which record.
        version: Its version.
        readable: The newest that this process reads.
    """

    def __init__(self, what: str, version: int, readable: int) -> None:
        self.version = version
        super().__init__(
            f"{what} has schema version {version}; this process reads up to "
            f"{readable}: upgrade it"
        )


class StorageUnavailable(TokenmillError, code="storage_unavailable", exit_code=16):
    """The store of large inputs does not answer, refuses, or is not configured."""


class BulkItemsFailed(TokenmillError, code="items_failed", exit_code=3):
    """A bulk command wrote every line, and some of them say that their item failed."""


class BulkRunConflict(TokenmillError, code="run_conflict", exit_code=18):
    """An output was begun with other options or another input, or is in use."""


class BulkOutputFailed(TokenmillError, code="output_failed", exit_code=74):
    """An output file cannot be written, as on a full disk."""


class BulkRunCancelled(TokenmillError, code="run_cancelled", exit_code=10):
    """Someone cancelled the run; what had ended by then has its line."""


class IllegalTransition(TokenmillError, code="illegal_transition"):
    """An event arrived that the job's state does not allow."""


class LeaseLost(TokenmillError):
    """Another gateway works on the batch now, or its record has gone."""


class RedisUnavailable(TokenmillError, code="redis_unavailable", exit_code=3):
    """Redis did not answer within the time-out."""


class RedisUnsuitable(TokenmillError, code="redis_unsuitable", exit_code=3):
    """Redis answers but cannot be used: too old, evicting, read-only, bad password."""


class ModelLoadError(TokenmillError, code="model_load_error", exit_code=14):
    """A model cannot be found or read, or its architecture is not supported."""


class HealthFailed(ModelLoadError, code="health_failed", exit_code=20):
    """A version of a model did not pass its health set; it takes no jobs."""


class VersionFailed(TokenmillError, code="version_failed", exit_code=20):
    """A version that was to be loaded cannot be, or was stopped meanwhile."""


class MpsUnavailable(TokenmillError, code="mps_unavailable", exit_code=21):
    """CUDA's MPS daemon does not start, or does not answer."""


class EngineError(TokenmillError, code="engine_error", exit_code=15):
    """A request failed inside the engine; its neighbours are untouched."""


class AdapterUnavailable(EngineError, code="adapter_unavailable"):
    """An adapter is not loaded, or there is no room for it while others are in use."""


class KVPoolExhausted(EngineError, code="kv_pool_exhausted"):
    """One request alone needs more KV blocks than the pool has."""


class NonFiniteLogits(EngineError, code="non_finite_logits"):
    """The model produced NaN or infinity for this request."""


class GroupLost(EngineError, code="group_lost"):
    """A rank of a tensor-parallel group is dead or hangs; the group has to restart."""


def kind_of(code: str) -> type[TokenmillError] | None:
    """Returns the kind of error that has this code on the wire.

    Args:
        code: For example ``prompt_too_long``.

    Returns:
        The class, or None for a code that this version does not know and for
        ``internal_error``, which says nothing of the kind.
    """
    kinds = list(TokenmillError.__subclasses__())
    for kind in kinds:
        if kind.code == code != TokenmillError.code:
            return kind
        kinds += kind.__subclasses__()
    return None
