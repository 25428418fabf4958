"""Errors of a request that is not taken: it is wrong, or there is no room for it."""

from typing import ClassVar

from .errors_root import TokenmillError


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
