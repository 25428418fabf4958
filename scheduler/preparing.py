"""From requests to exact sizes: decoded, checked, tokenized. Pure, but for the log."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Final, TypeVar

import msgspec
import structlog

from ..shared.adapters import short_digest
from ..shared.errors import (
    InvalidRequest,
    PromptTooLong,
    ProtocolError,
    TokenmillError,
)
from ..shared.input_refs import MOST_PAYLOAD_BYTES, with_input
from ..shared.messages import JobRequest, ModelCard
from ..shared.tokens import Tokenizer, ids_from_bytes, ids_to_bytes
from ..shared.validate import check_payload, decode_request, validate_request

_log = structlog.get_logger(__name__)


class RawJob(msgspec.Struct, frozen=True):
    """What Redis has of a job that is to be tokenized."""

    payload: bytes
    token_ids: bytes | None
    """From an earlier dispatch; the text is then not tokenized again."""
    blob: bytes | None = None
    """The input, where the payload only names it."""
    card: ModelCard | None = None
    """Of the version that the route gives it to, where that encodes otherwise than the
    model."""


class Prepared(msgspec.Struct, frozen=True):
    """A job's exact size."""

    tokens: int
    token_ids: bytes
    """Little-endian int32."""
    max_tokens: int
    choices: int
    text_bytes: int
    """Bytes of the user's text; 0 where it was not tokenized now."""
    schema: int = 1
    """Version of the request: who runs it must read that."""
    version: str = ""
    """The only version of the model that may run it."""
    tokenizer: str = ""
    """What encoded it; empty for ids from an earlier dispatch."""
    adapter: str = ""
    """The one that it runs with, shortened; empty without one."""


class Later(msgspec.Struct, frozen=True):
    """A job that cannot be encoded yet: its version's tokenizer is not loaded."""

    tokenizer: str


_UNSEEN: Final = TokenmillError("the job was not tokenized")
_ENDS_THE_PROCESS: Final = (KeyboardInterrupt, SystemExit, asyncio.CancelledError)
T = TypeVar("T")
Outcome = Prepared | Later | TokenmillError
"""ProtocolError: the bytes are no request at all. The root of the tree itself: a fault
of ours that this job met, logged with its traceback."""


class Versions(msgspec.Struct, frozen=True):
    """What jobs for one version of a model are prepared with."""

    cards: Mapping[str, ModelCard] = {}
    """By version."""
    tokenizers: Mapping[str, Tokenizer] = {}
    """By fingerprint, as far as they are loaded."""


_NO_VERSIONS: Final = Versions()
_Opened = tuple[JobRequest, ModelCard]


def prepare(
    raw: Sequence[RawJob],
    tokenizer: Tokenizer,
    card: ModelCard,
    max_bytes: int,
    versions: Versions = _NO_VERSIONS,
) -> list[Outcome]:
    """Decodes, checks and tokenizes requests; an error stands for its job alone.

    Args:
        raw: The jobs.
        tokenizer: The model's; used by this thread alone.
        card: The model's limits.
        max_bytes: Longest payload.
        versions: Of the model, where some have a card of their own.

    Returns:
        One outcome for each, in order.
    """
    outcomes: list[Outcome] = []
    pending: dict[str, list[tuple[int, _Opened]]] = {}
    for index, job in enumerate(raw):
        opened = alone(partial(_opened, job, card, max_bytes, versions.cards))
        if isinstance(opened, tuple):
            pending.setdefault(opened[1].tokenizer, []).append((index, opened))
            opened = _UNSEEN
        outcomes.append(opened)
    for name, some in pending.items():
        own = tokenizer if name == card.tokenizer else versions.tokenizers.get(name)
        if own is None:
            for index, _ in some:
                outcomes[index] = Later(name)
            continue
        encoded = _encoded_for([one for _, one in some], own)
        for (index, (request, limits)), ids in zip(some, encoded, strict=True):
            outcomes[index] = (
                alone(partial(_measured, request, ids, limits))
                if isinstance(ids, list)
                else ids
            )
    return outcomes


def _encoded_for(
    jobs: Sequence[_Opened], tokenizer: Tokenizer
) -> list[list[int] | TokenmillError]:
    """Encodes jobs of one tokenizer, those of one card at once."""
    found: list[list[int] | TokenmillError] = []
    for card, some in groupby(jobs, key=itemgetter(1)):
        found += _encoded([request for request, _ in some], tokenizer, card)
    return found


def alone(work: Callable[[], T]) -> T | TokenmillError:
    """Does something for one job; whatever goes wrong there stands for it alone.

    Args:
        work: Decodes, checks, tokenizes or measures one job.

    Returns:
        What `work` returned, or why this job has to end. A fault that is no error of
        the tree is logged with its traceback.
    """
    try:
        return work()
    except TokenmillError as error:
        return error
    except BaseException as error:
        # What a tokenizer's Rust code panics with is no Exception.
        if isinstance(error, _ENDS_THE_PROCESS):
            raise
        return internal("preparing the job", error)


def internal(doing: str, error: BaseException) -> TokenmillError:
    """Logs a fault of ours and returns what to tell the one job that met it.

    Args:
        doing: What went wrong, for message and log.
        error: What was raised.
    """
    _log.error("internal_error", doing=doing, exc_info=error)
    return TokenmillError(
        f"{doing} met an unexpected {type(error).__name__}: a fault of tokenmill, "
        "not of the request; the scheduler's log has the traceback"
    )


def _opened(
    job: RawJob, card: ModelCard, max_bytes: int, cards: Mapping[str, ModelCard]
) -> _Opened | Prepared:
    request = _decoded(job, max_bytes)
    card = cards.get(request.version or "") or job.card or card
    validate_request(request, card)
    if not job.token_ids:
        return request, card
    ids = ids_from_bytes(job.token_ids)
    sized = _sized(request, ids, job.token_ids, 0, card)
    return msgspec.structs.replace(sized, tokenizer="")


def _encoded(
    requests: Sequence[JobRequest], tokenizer: Tokenizer, card: ModelCard
) -> Sequence[list[int] | TokenmillError]:
    """Encodes all at once, and one by one when that fails as a whole."""
    if len(requests) == 1:
        only = alone(lambda: tokenizer.encode_requests(requests, card.max_context))
        return [only] if isinstance(only, TokenmillError) else only
    try:
        return tokenizer.encode_requests(requests, card.max_context)
    except BaseException as error:
        if isinstance(error, _ENDS_THE_PROCESS):
            raise
        _log.warning("batch_tokenized_one_by_one", error=repr(error))
    return [_encoded([request], tokenizer, card)[0] for request in requests]


def _measured(request: JobRequest, ids: list[int], card: ModelCard) -> Prepared:
    return _sized(request, ids, ids_to_bytes(ids), _text_bytes(request), card)


def _decoded(job: RawJob, max_bytes: int) -> JobRequest:
    check_payload(job.payload, max_bytes)
    try:
        request = decode_request(job.payload)
    except InvalidRequest as error:
        if error.field in {"request", "prompt"}:
            raise ProtocolError(f"the payload is no request: {error}") from error
        raise
    if request.text_ref is not None:
        check_payload(job.payload, MOST_PAYLOAD_BYTES)
    if job.blob is not None:
        request = with_input(request, job.blob)
    return request


def _text_bytes(request: JobRequest) -> int:
    contents = [message.content for message in request.messages or ()]
    return sum(len(text.encode()) for text in (request.text or "", *contents))


def _sized(
    request: JobRequest, ids: list[int], packed: bytes, size: int, card: ModelCard
) -> Prepared:
    asked = request.sampling.max_tokens
    if len(ids) + asked > card.max_context:
        raise PromptTooLong(
            "sampling.max_tokens",
            f"the prompt has {len(ids)} tokens and max_tokens is {asked}, together "
            f"{len(ids) + asked}; the model holds {card.max_context}: ask for at most "
            f"{max(card.max_context - len(ids), 0)} or shorten the prompt",
        )
    return Prepared(
        tokens=len(ids),
        token_ids=packed,
        max_tokens=asked,
        choices=request.sampling.n,
        text_bytes=size,
        schema=request.v,
        version=request.version or "",
        tokenizer=card.tokenizer,
        adapter=short_digest(request.adapter.digest) if request.adapter else "",
    )
