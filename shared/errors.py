"""Every error tokenmill raises, as one tree.

    TokenmillError
    ├── ConfigError               a setting is unknown, unparsable or out of range
    ├── InvalidRequest            a field of a prompt is wrong; never retried
    │   ├── PromptTooLong         prompt + max_tokens exceed what the model can hold
    │   ├── PayloadTooLarge       the encoded request exceeds the byte limit
    │   ├── InputUnreadable       an input by reference is missing, damaged or elsewhere
    │   ├── ControlTokensInText   user text spells one of the model's control tokens
    │   ├── UnknownAdapter        the model has no such adapter, or not for this tenant
    │   └── InvalidBatch          some prompts of a batch are wrong; none was enqueued
    ├── IdempotencyConflict       same key, different payload
    ├── QueueFull                 backpressure; carries limit and retry_after_s
    ├── DeadlineUnreachable       refused at submit: it could not be done in time
    ├── ModelUnavailable          no live worker serves the model
    ├── UnknownJob                no record of that job id (or it has expired)
    ├── UnknownRun                no record of that bulk run (or it has expired)
    ├── UnknownVersion            the model has no version of that name
    ├── VersionConflict           the state of versions or route does not allow it
    ├── JobFailed                 the job ended as failed; carries code and message
    │   ├── JobCancelled
    │   └── JobExpired
    ├── ResultTimeout             the caller's time-out passed; the job goes on
    ├── ProtocolError             bytes from Redis that are not our wire format
    │   └── NewerSchema           a record of the next version: it waits for a reader
    ├── StorageUnavailable        the store of large inputs does not answer or refuses
    ├── BulkItemsFailed           a bulk command came to its end, and some items failed
    ├── BulkRunConflict           an output belongs to other options, or is in use
    ├── BulkOutputFailed          an output file cannot be written
    ├── BulkRunCancelled          someone cancelled the run of a bulk command
    ├── IllegalTransition         an event that the job's state does not allow
    ├── RedisUnavailable          no connection within the time-out
    ├── RedisUnsuitable           server too old, evicting, read-only, wrong password
    ├── ModelLoadError            a model cannot be found, read or is unsupported
    │   └── HealthFailed          a version did not pass its health set
    ├── VersionFailed             a version that was to be loaded cannot be
    ├── MpsUnavailable            CUDA's MPS daemon does not start or does not answer
    └── EngineError               a request failed inside the engine
        ├── AdapterUnavailable    an adapter is not loaded, or has no room just now
        ├── KVPoolExhausted       a single request needs more KV blocks than exist
        ├── NonFiniteLogits       the model produced NaN or infinity for one request
        └── GroupLost             a rank of a split model is dead or hangs

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


class ConfigError(TokenmillError):
    """A configuration key is unknown, unparsable or out of range.

    Args:
        key: The dotted key, for example ``worker.max_running``.
        problem: What was found, what was expected, and what to do.
        origin: Where the value came from (a file's path or a variable's name).
    """

    code = "invalid_config"
    exit_code = 2

    def __init__(self, key: str, problem: str, origin: str | None = None) -> None:
        self.key = key
        self.problem = problem
        self.origin = origin
        where = f" (from {origin})" if origin else ""
        super().__init__(f"configuration key '{key}'{where}: {problem}")


class InvalidRequest(TokenmillError):
    """One field of a request is wrong. The job fails alone and is never retried.

    Args:
        field: The field's name as the caller wrote it, for example ``temperature``.
        problem: What was found, what the limit is, and what to do.
    """

    code = "invalid_request"
    exit_code = 4

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        self.problem = problem
        super().__init__(f"{field}: {problem}")


class PromptTooLong(InvalidRequest):
    """The prompt, with its output, does not fit the model's context or KV pool."""

    code = "prompt_too_long"


class PayloadTooLarge(InvalidRequest):
    """The encoded request is larger than the pool accepts."""

    code = "payload_too_large"


class InputUnreadable(InvalidRequest):
    """An input by reference is missing, damaged, too large, or not the job's own."""

    code = "input_unreadable"


class ControlTokensInText(InvalidRequest):
    """User text spells a control token of the model and the caller did not allow it."""

    code = "control_tokens_in_text"


class UnknownAdapter(InvalidRequest):
    """The model has no adapter of that name, or none that the tenant may use."""

    code = "unknown_adapter"


class InvalidBatch(InvalidRequest):
    """Some prompts of a batch are wrong; nothing of the batch was enqueued.

    Args:
        errors: Position in the batch -> what is wrong there.
    """

    code = "invalid_batch"
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


class IdempotencyConflict(TokenmillError):
    """The idempotency key was used before with a different payload."""

    code = "idempotency_conflict"
    exit_code = 5


class QueueFull(TokenmillError):
    """A limit of the queue or of the tenant is reached; nothing was recorded.

    Args:
        message: Which limit was reached and its value.
        retry_after_s: Seconds after which a retry has a chance.
        limit: Its name in the settings, as `max_waiting_jobs`.
    """

    code = "queue_full"
    exit_code = 6

    def __init__(self, message: str, retry_after_s: float, limit: str = "") -> None:
        self.retry_after_s = retry_after_s
        self.limit = limit
        super().__init__(f"{message}; retry after {retry_after_s:.1f} s")


class DeadlineUnreachable(TokenmillError):
    """The job asked to be refused when late, and it would be; nothing was recorded.

    Args:
        needed_s: Seconds until it would be done, at the measured rate.
        deadline_s: Seconds that it was given.
    """

    code = "deadline_unreachable"
    exit_code = 17

    def __init__(self, needed_s: float, deadline_s: float) -> None:
        self.needed_s = needed_s
        self.deadline_s = deadline_s
        super().__init__(
            f"the job would be done in about {needed_s:.1f} s by what waits before it "
            f"and the measured rate, and its deadline is in {deadline_s:.1f} s; give "
            "it more time, or submit it without refuse_late to try all the same"
        )


class ModelUnavailable(TokenmillError):
    """No live worker serves the model, and the caller chose not to wait for one.

    Args:
        message: Which model, and which are served.
        cure: What to do, as the Python client and the command line have it.
        is_known: Whether the pool is to serve the model or ever did.
    """

    code = "model_unavailable"
    exit_code = 7

    def __init__(self, message: str, cure: str = "", *, is_known: bool = True) -> None:
        self.problem = message
        self.is_known = is_known
        super().__init__(f"{message}. {cure}" if cure else message)


class UnknownJob(TokenmillError):
    """There is no record of this job: the id is wrong or its retention has passed."""

    code = "unknown_job"
    exit_code = 8


class UnknownRun(TokenmillError):
    """There is no record of this bulk run: it was never begun, or it has expired."""

    code = "unknown_run"
    exit_code = 8


class UnknownVersion(TokenmillError):
    """The model has no version of that name."""

    code = "unknown_version"
    exit_code = 8


class VersionConflict(TokenmillError):
    """A version's name is in use, or its state or share does not allow the change."""

    code = "version_conflict"
    exit_code = 19


class JobFailed(TokenmillError):
    """The job reached a terminal state other than success.

    Args:
        job_id: The job.
        error_code: The wire name of the cause, for example ``prompt_too_long``.
        message: The recorded message.
        field: The field of the request at fault, if one is.
    """

    code = "job_failed"
    exit_code = 9

    def __init__(
        self, job_id: str, error_code: str, message: str, field: str | None = None
    ) -> None:
        self.job_id = job_id
        self.error_code = error_code
        self.message = message
        self.field = field
        super().__init__(f"job {job_id} {self.code}: [{error_code}] {message}")


class JobCancelled(JobFailed):
    """The job was cancelled before it finished."""

    code = "job_cancelled"
    exit_code = 10


class JobExpired(JobFailed):
    """The job's deadline passed before it finished."""

    code = "job_expired"
    exit_code = 11


class ResultTimeout(TokenmillError, TimeoutError):
    """The caller's time-out passed while the job was still going; it goes on."""

    code = "result_timeout"
    exit_code = 12


class ProtocolError(TokenmillError):
    """Something read from Redis is not in our wire format, or of another version."""

    code = "protocol_error"
    exit_code = 13


class NewerSchema(ProtocolError):
    """A record of the next schema version: whoever reads that version will take it.

    Args:
        what: Which record.
        version: Its version.
        readable: The newest that this process reads.
    """

    code = "newer_schema"

    def __init__(self, what: str, version: int, readable: int) -> None:
        self.version = version
        super().__init__(
            f"{what} has schema version {version}; this process reads up to "
            f"{readable}: upgrade it"
        )


class StorageUnavailable(TokenmillError):
    """The store of large inputs does not answer, refuses, or is not configured."""

    code = "storage_unavailable"
    exit_code = 16


class BulkItemsFailed(TokenmillError):
    """A bulk command wrote every line, and some of them say that their item failed."""

    code = "items_failed"
    exit_code = 3


class BulkRunConflict(TokenmillError):
    """An output was begun with other options or another input, or is in use."""

    code = "run_conflict"
    exit_code = 18


class BulkOutputFailed(TokenmillError):
    """An output file cannot be written, as on a full disk."""

    code = "output_failed"
    exit_code = 74


class BulkRunCancelled(TokenmillError):
    """Someone cancelled the run; what had ended by then has its line."""

    code = "run_cancelled"
    exit_code = 10


class IllegalTransition(TokenmillError):
    """An event arrived that the job's state does not allow."""

    code = "illegal_transition"


class RedisUnavailable(TokenmillError):
    """Redis did not answer within the time-out."""

    code = "redis_unavailable"
    exit_code = 3


class RedisUnsuitable(TokenmillError):
    """Redis answers but cannot be used: too old, evicting, read-only, bad password."""

    code = "redis_unsuitable"
    exit_code = 3


class ModelLoadError(TokenmillError):
    """A model cannot be found or read, or its architecture is not supported."""

    code = "model_load_error"
    exit_code = 14


class HealthFailed(ModelLoadError):
    """A version of a model did not pass its health set; it takes no jobs."""

    code = "health_failed"
    exit_code = 20


class VersionFailed(TokenmillError):
    """A version that was to be loaded cannot be, or was stopped meanwhile."""

    code = "version_failed"
    exit_code = 20


class MpsUnavailable(TokenmillError):
    """CUDA's MPS daemon does not start, or does not answer."""

    code = "mps_unavailable"
    exit_code = 21


class EngineError(TokenmillError):
    """A request failed inside the engine; its neighbours are untouched."""

    code = "engine_error"
    exit_code = 15


class AdapterUnavailable(EngineError):
    """An adapter is not loaded, or there is no room for it while others are in use."""

    code = "adapter_unavailable"


class KVPoolExhausted(EngineError):
    """One request alone needs more KV blocks than the pool has."""

    code = "kv_pool_exhausted"


class NonFiniteLogits(EngineError):
    """The model produced NaN or infinity for this request."""

    code = "non_finite_logits"


class GroupLost(EngineError):
    """A rank of a tensor-parallel group is dead or hangs; the group has to restart."""

    code = "group_lost"


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
