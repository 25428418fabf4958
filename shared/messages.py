"""What travels: requests, token deltas, results. Frozen msgspec structs, JSON bytes.

JSON rather than msgpack on the wire that clients see, so that a developer in any
language needs nothing but a Redis library (docs/adr/0002-json-on-the-wire.md).
"""

import datetime as dt
from enum import StrEnum
from typing import Final, Literal

import msgspec

from .cards import ModelCard as ModelCard
from .cards import ModelTerms as ModelTerms
from .cards import PoolCard as PoolCard

SCHEMA_VERSION: Final = 3
"""Newest version of the records below that this code reads. A writer stamps each
record with the lowest version whose readers understand it
(docs/adr/0015-schema-versions.md)."""
FIRST_VERSION: Final = 1
"""Of records without any newer field; a record without `v` is of this version."""
INPUT_REF_VERSION: Final = 2
"""From here on a request may name its input instead of holding it."""
ADAPTER_VERSION: Final = 3
"""From here on a request may name an adapter."""
PIN_VERSION: Final = 3
"""From here on a request may be for one version of its model alone."""

DEFAULT_TENANT: Final = "default"
DEFAULT_MODEL: Final = "smollm2-135m"
DEFAULT_VERSION: Final = "v1"
"""Of a model whose settings name no version, and of groups that name none."""


class JobClass(StrEnum):
    """How urgent a job is; each class has its own streams."""

    INTERACTIVE = "interactive"
    """Someone is waiting."""
    BULK = "bulk"
    """Fills what interactive work leaves."""


class FinishReason(StrEnum):
    """Why a choice ended."""

    STOP = "stop"
    """End-of-sequence token, a stop string or a stop id."""
    LENGTH = "length"
    """max_tokens or the context was reached."""
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    ERROR = "error"


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class Sampling(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """How output tokens are chosen. `shared.validate` holds the limits."""

    max_tokens: int = 128
    """Most output tokens per choice."""
    min_tokens: int = 0
    """No stop of any kind before this many output tokens."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output, as in transformers; 1 is none."""
    presence_penalty: float = 0.0
    """Over output, as in OpenAI's API."""
    frequency_penalty: float = 0.0
    seed: int | None = None
    """Drawn at enqueue when absent, and recorded."""
    stop: tuple[str, ...] = ()
    """Strings that end the output; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    """How many alternatives to report per token; 0 is the chosen token's alone."""
    n: int = 1
    """Number of choices."""


class Prompt(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What a caller submits: text or messages, how to sample, how to queue.

    Exactly one of `text` and `messages` is given. `Prompt("Hello")` is enough.
    """

    text: str | None = None
    messages: tuple[Message, ...] | None = None
    model: str = DEFAULT_MODEL
    sampling: Sampling = Sampling()
    job_class: JobClass = JobClass.INTERACTIVE
    tenant: str = DEFAULT_TENANT
    priority: int = 0
    """Within the class; a smaller number is more urgent."""
    idempotency_key: str | None = None
    deadline_s: float | None = None
    """Seconds from enqueue after which the job expires, waiting or running."""
    delay_s: float = 0.0
    """Seconds to wait before the job is queued."""
    control_tokens: Literal["refuse", "as_text", "allow"] = "refuse"
    """What to do where the text spells a control token such as <|im_end|>."""
    not_before: dt.datetime | None = None
    """When the job is to be queued, instead of `delay_s`: a time with its zone, by the
    clock of Redis."""
    refuse_late: bool = False
    """Refuse the job at once when it cannot meet its deadline at the measured rate."""
    webhook: str | None = None
    """http(s) address that is told of the job's end; see docs/webhooks.md."""
    adapter: str | None = None
    """Name of a LoRA adapter of the model; the model `m:a` means the same."""
    version: str | None = None
    """Only this version of the model is to run it; see docs/models.md. None: as the
    model's route says."""


class InputRef(msgspec.Struct, frozen=True, kw_only=True):
    """A large input outside Redis, in the pool's store. Since version 2."""

    name: str
    """Relative to the store: `<tenant>/<sha256>`, and nothing else."""
    size: int
    """Bytes of the object."""
    sha256: str
    """Of the object, in hex."""
    holds: Literal["text", "messages"] = "text"
    """The prompt's text in UTF-8, or its messages as a JSON array."""


class AdapterRef(msgspec.Struct, frozen=True):
    """An adapter as a job names it. Since version 3."""

    name: str
    digest: str
    """SHA-256 of its files, in hex: the job gets these weights or none."""


class JobRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`in:<id>`: the part of a prompt that decides its output. Unknown keys refused
    by `forbid_unknown_fields` would break rolling upgrades, so `v` is checked instead.
    """

    v: int = FIRST_VERSION
    text_ref: InputRef | None = None
    """Instead of `text` and `messages`; such a request has version 2."""
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    sampling: Sampling = Sampling()
    control_tokens: Literal["refuse", "as_text", "allow"] = "refuse"
    adapter: AdapterRef | None = None
    """Such a request has version 3."""
    version: str | None = None
    """Only this version of the model may run it; such a request has version 3."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of the chosen token and of the most likely others."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log probability), most likely first."""


class JobError(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a job failed, as recorded and shown."""

    code: str
    message: str
    field: str | None = None


CANCELLED: Final = JobError("cancelled", "cancelled on request")
"""Recorded with every cancelled job, whoever noticed the request."""
EXPIRED: Final = JobError("expired", "the deadline passed before the job finished")
"""Recorded with every expired job, waiting or running."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens counted, over all choices and epochs."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds since enqueue, by the clock of Redis; None: never reached."""

    queued_ms: float | None = None
    """Enqueue to start on a worker."""
    ttft_ms: float | None = None
    """Enqueue to the first token."""
    total_ms: float | None = None
    """Enqueue to the end."""


class Choice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One complete output."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    """The stop string or stop token id that matched."""
    logprobs: tuple[TokenLogprob, ...] | None = None


class JobResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`out:<id>`: how a job ended. Written once."""

    v: int = FIRST_VERSION
    id: str
    state: str
    """A terminal `State`."""
    model: str
    choices: tuple[Choice, ...] = ()
    usage: Usage = Usage()
    timings: Timings = Timings()
    error: JobError | None = None
    weights_version: str | None = None
    version: str | None = None
    """Of the model, that ran it."""
    adapter: AdapterRef | None = None
    """What it ran with."""

    @property
    def text(self) -> str:
        """Text of the first choice, or the empty string when there is none."""
        return self.choices[0].text if self.choices else ""


class End(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Last record of a stream: the job is terminal."""

    state: str
    finish_reasons: tuple[FinishReason, ...] = ()
    """By choice."""
    usage: Usage = Usage()
    error: JobError | None = None


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run of new tokens of one choice, or the end of the job.

    The same bytes stand in field `d` of the `tok:<id>` stream and in the message on
    the `wake:<id>` channel. Subscribers dedupe by (choice, offset).
    """

    choice: int = 0
    offset: int = 0
    """Index in the output of the first token here."""
    token_ids: tuple[int, ...] = ()
    text: str = ""
    """May be empty while bytes or a possible stop string are held back."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    """Set on the last delta of this choice."""
    stop_reason: str | int | None = None
    end: End | None = None


_encoder = msgspec.json.Encoder()


def encode(message: object) -> bytes:
    """Returns `message` as JSON bytes."""
    return _encoder.encode(message)
