"""What is known of a batch, and how the API shows and takes one."""

from typing import Annotated, Final, Literal

import msgspec

from ...shared.messages import Usage
from ..openai_form import CHAT_URL, COMPLETION_URL

BATCH_ID: Final = r"batch_[0-9a-f]{32}"
WINDOW: Final = "24h"
WINDOW_MS: Final = 24 * 3600 * 1000
MOST_LISTED: Final = 100
MOST_ERRORS: Final = 100
"""Faults of the input that a batch names."""

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
ENDED: Final = frozenset({"failed", "completed", "expired", "cancelled"})
Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
ENDPOINTS: Final = (CHAT_URL, COMPLETION_URL)
_Key = Annotated[str, msgspec.Meta(max_length=64)]
_Value = Annotated[str, msgspec.Meta(max_length=512)]
Metadata = Annotated[dict[_Key, _Value], msgspec.Meta(max_length=16)]


class BatchFault(msgspec.Struct, frozen=True, kw_only=True):
    """Something in the input for which the batch failed."""

    code: str
    message: str
    line: int | None = None
    """From 1."""
    param: str | None = None


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`tm:batch:<id>`. Times are milliseconds of Redis' clock."""

    v: int = 1
    id: str
    tenant: str
    run: str
    """The bulk run that its requests are."""
    endpoint: str
    input_file_id: str
    output_id: str
    """Of the file that its answers will be..."""
    error_id: str
    """...and of that of its errors."""
    priority: int = 0
    webhook: str | None = None
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    created_ms: int
    expires_ms: int
    in_progress_ms: int | None = None
    finalizing_ms: int | None = None
    completed_ms: int | None = None
    failed_ms: int | None = None
    expired_ms: int | None = None
    cancelling_ms: int | None = None
    cancelled_ms: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: Usage = Usage()
    has_output: bool = False
    """Whether there are such files in the end."""
    has_errors: bool = False
    faults: tuple[BatchFault, ...] = ()
    driver: str = ""
    """The gateway that works on it..."""
    driver_until_ms: int = 0
    """...unless it is not heard of before then."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing about it changes any more."""
        return self.status in ENDED

    @property
    def name(self) -> str:
        """Of the parts of its output in the store."""
        return f"{self.tenant}/{self.id}"


class BatchBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A batch to be made."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] | None = None
    """Within bulk work; a smaller number is more urgent."""
    webhook: str | None = None
    """Told of the batch's end."""


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """Why a batch failed."""

    object: Literal["list"] = "list"
    data: tuple[BatchFault, ...]


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of a batch."""

    total: int
    completed: int
    failed: int


class CachedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Which input tokens were cheaper."""

    cached_tokens: int = 0


class ReasoningTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Which output tokens nobody sees."""

    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a batch."""

    input_tokens: int
    input_tokens_details: CachedTokens = CachedTokens()
    output_tokens: int
    output_tokens_details: ReasoningTokens = ReasoningTokens()
    total_tokens: int


class BatchObject(msgspec.Struct, frozen=True, kw_only=True):
    """A batch, as OpenAI's API shows it. Times are Unix seconds."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: Faults | None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: Counts
    usage: BatchUsage
    metadata: dict[str, str] | None

    @classmethod
    def of(cls, record: BatchRecord) -> "BatchObject":
        """Shows a record."""
        done, used = record.has_ended, record.usage
        return cls(
            id=record.id,
            endpoint=record.endpoint,
            errors=Faults(data=record.faults) if record.faults else None,
            input_file_id=record.input_file_id,
            status=record.status,
            output_file_id=record.output_id if done and record.has_output else None,
            error_file_id=record.error_id if done and record.has_errors else None,
            created_at=record.created_ms // 1000,
            in_progress_at=_seconds(record.in_progress_ms),
            expires_at=record.expires_ms // 1000,
            finalizing_at=_seconds(record.finalizing_ms),
            completed_at=_seconds(record.completed_ms),
            failed_at=_seconds(record.failed_ms),
            expired_at=_seconds(record.expired_ms),
            cancelling_at=_seconds(record.cancelling_ms),
            cancelled_at=_seconds(record.cancelled_ms),
            request_counts=Counts(
                total=record.total, completed=record.completed, failed=record.failed
            ),
            usage=BatchUsage(
                input_tokens=used.prompt_tokens,
                output_tokens=used.completion_tokens,
                total_tokens=used.prompt_tokens + used.completion_tokens,
            ),
            metadata=record.metadata,
        )


class BatchList(msgspec.Struct, frozen=True, kw_only=True):
    """Batches of a tenant, newest first, a page of them."""

    object: Literal["list"] = "list"
    data: tuple[BatchObject, ...]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


def _seconds(at_ms: int | None) -> int | None:
    return None if at_ms is None else at_ms // 1000
