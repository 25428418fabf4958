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
command line's exit status for that kind; `code` is the name on the wire.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar


class TokenmillError(Exception):
    """Root of the tree: catch this to catch everything tokenmill raises."""

    code: ClassVar[str] = "internal_error"
    exit_code: ClassVar[int] = 1
    enqueued: tuple[str, ...] = ()
    """Ids of the jobs that a call for many had enqueued before this error."""
    refused: "Mapping[int, TokenmillError]" = MappingProxyType({})
    """Position in a call for many -> why that job was not enqueued; the others were,
    unless the whole call broke off."""

    def __init_subclass__(cls, code: str = "", exit_code: int = 0) -> None:
        """Takes `code` and `exit_code` of a kind; those not given are its parent's."""
        super().__init_subclass__()
        cls.code = code or cls.code
        cls.exit_code = exit_code or cls.exit_code


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


class InvalidRequest(TokenmillError, code="invalid_request", exit_code=4):
    """One field of a request is wrong. The job fails alone and is never retried.

    Args:
        field: The field's name as the caller wrote it, for example ``temperature``.
        problem: What was found, what the limit is, and what to do.
    """

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        self.problem = problem
        super().__init__(f"{field}: {problem}")


class PromptTooLong(InvalidRequest, code="prompt_too_long"):
    """The prompt, with its output, does not fit the model's context or KV pool."""


class PayloadTooLarge(InvalidRequest, code="payload_too_large"):
    """The encoded request is larger than the pool accepts."""


class InputUnreadable(InvalidRequest, code="input_unreadable"):
    """An input by reference is missing, damaged, too large, or not the job's own."""


class ControlTokensInText(InvalidRequest, code="control_tokens_in_text"):
    """User text spells a control token of the model and the caller did not allow it."""


class UnknownAdapter(InvalidRequest, code="unknown_adapter"):
    """The model has no adapter of that name, or none that the tenant may use."""


class InvalidBatch(InvalidRequest, code="invalid_batch"):
    """Some prompts of a batch are wrong; nothing of the batch was enqueued.

    Args:
        errors: Position in the batch -> what is wrong there.
    """

    num_shown: ClassVar[int] = 20
    """Errors that the message spells out; all of them are in `errors`."""

    def __init__(self, errors: dict[int, InvalidRequest]) -> None:
        self.errors = errors
        shown = [f"[{i}] {e}" for i, e in list(errors.items())[: self.num_shown]]
        if len(errors) > self.num_shown:
            shown.append(f"and {len(errors) - self.num_shown} more")
        super().__init__(
            "prompts",
            f"{len(errors)} are wrong and none was enqueued: {'; '.join(shown)}",
        )


class IdempotencyConflict(TokenmillError, code="idempotency_conflict", exit_code=5):
    """The idempotency key was used before with a different payload."""


class QueueFull(TokenmillError, code="queue_full", exit_code=6):
    """A limit of the queue or of the tenant is reached; nothing was recorded.

    Args:
        message: Which limit was reached and its value.
        retry_after_s: Seconds after which a retry has a chance.
        limit: Its name in the settings, as `max_waiting_jobs`.
    """

    def __init__(self, message: str, retry_after_s: float, limit: str = "") -> None:
        self.retry_after_s = retry_after_s
        self.limit = limit
        super().__init__(f"{message}; retry after {retry_after_s:.1f} s")


class DeadlineUnreachable(TokenmillError, code="deadline_unreachable", exit_code=17):
    """The job asked to be refused when late, and it would be; nothing was recorded.

    Args:
        needed_s: Seconds until it would be done, at the measured rate.
        deadline_s: Seconds that it was given.
    """

    def __init__(self, needed_s: float, deadline_s: float) -> None:
        self.needed_s = needed_s
        self.deadline_s = deadline_s
        super().__init__(
            f"the job would be done in about {needed_s:.1f} s by what waits before it "
            f"and the measured rate, and its deadline is in {deadline_s:.1f} s; give "
            "it more time, or submit it without refuse_late to try all the same"
        )


class ModelUnavailable(TokenmillError, code="model_unavailable", exit_code=7):
    """No live worker serves the model, and the caller chose not to wait for one.

    Args:
        message: Which model, and which are served.
        cure: What to do, as the Python client and the command line have it.
        is_known: Whether the pool is to serve the model or ever did.
    """

    def __init__(self, message: str, cure: str = "", *, is_known: bool = True) -> None:
        self.problem = message
        self.is_known = is_known
        super().__init__(f"{message}. {cure}" if cure else message)


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
