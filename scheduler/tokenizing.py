"""Decoding, checking and tokenizing. Tokenizers never meet two threads at once."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
import redis.asyncio
import structlog

from ..shared.collector import settle
from ..shared.errors import (
    InvalidRequest,
    ModelLoadError,
    PromptTooLong,
    ProtocolError,
    TokenmillError,
)
from ..shared.input_refs import MOST_PAYLOAD_BYTES, with_input
from ..shared.keys import tokenizer_key
from ..shared.messages import JobRequest, ModelCard
from ..shared.tokens import (
    BYTES,
    Tokenizer,
    ids_from_bytes,
    ids_to_bytes,
    load_tokenizer,
)
from ..shared.validate import check_payload, decode_request, validate_request

RETRY_LOAD_S: Final = 5.0
"""A tokenizer that could not be loaded is tried again after this long."""
INLINE_BYTES: Final = 4096
"""So little is tokenized in less time than it takes to wake a thread and be woken."""
_log = structlog.get_logger(__name__)


class RawJob(msgspec.Struct, frozen=True):
    """What Redis has of a job that is to be tokenized."""

    payload: bytes
    token_ids: bytes | None
    """From an earlier dispatch; the text is then not tokenized again."""
    blob: bytes | None = None
    """The input, where the payload only names it."""


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


_UNSEEN: Final = TokenmillError("the job was not tokenized")
_ENDS_THE_PROCESS: Final = (KeyboardInterrupt, SystemExit, asyncio.CancelledError)
T = TypeVar("T")
Outcome = Prepared | TokenmillError
"""ProtocolError: the bytes are no request at all. The root of the tree itself: a fault
of ours that this job met, logged with its traceback."""


def prepare(
    raw: Sequence[RawJob], tokenizer: Tokenizer, card: ModelCard, max_bytes: int
) -> list[Outcome]:
    """Decodes, checks and tokenizes requests; an error stands for its job alone.

    Args:
        raw: The jobs.
        tokenizer: The model's; used by this thread alone.
        card: The model's limits.
        max_bytes: Longest payload.

    Returns:
        One outcome for each, in order.
    """
    outcomes: list[Outcome] = []
    pending: list[tuple[int, JobRequest]] = []
    for index, job in enumerate(raw):
        opened = alone(partial(_opened, job, card, max_bytes))
        if isinstance(opened, JobRequest):
            pending.append((index, opened))
            opened = _UNSEEN
        outcomes.append(opened)
    encoded = _encoded([request for _, request in pending], tokenizer, card)
    for (index, request), ids in zip(pending, encoded, strict=True):
        outcomes[index] = (
            alone(partial(_measured, request, ids, card))
            if isinstance(ids, list)
            else ids
        )
    return outcomes


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


def _opened(job: RawJob, card: ModelCard, max_bytes: int) -> JobRequest | Prepared:
    request = _decoded(job, card, max_bytes)
    if not job.token_ids:
        return request
    return _sized(request, ids_from_bytes(job.token_ids), job.token_ids, 0, card)


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


def _decoded(job: RawJob, card: ModelCard, max_bytes: int) -> JobRequest:
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
    validate_request(request, card)
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
    return Prepared(len(ids), packed, asked, request.sampling.n, size, request.v)


class TokenizerThread:
    """Runs `prepare` off the event loop, or on it when that is the shorter way.

    One thread owns the tokenizers; the loop uses them only while the thread is idle.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._loaded: dict[str, Tokenizer] = {BYTES: load_tokenizer(BYTES)}
        self._retry_at: dict[str, float] = {}
        self._in_thread: list[Future[Any]] = []
        """Work of the thread: while any is not done, tokenizers are its own."""

    async def ready(self, client: "redis.asyncio.Redis", card: ModelCard) -> bool:
        """Makes sure that the model's tokenizer is loaded.

        Returns:
            False while it cannot be had; the cause is logged.
        """
        return await self.load(client, card.model, card.tokenizer)

    async def load(
        self, client: "redis.asyncio.Redis", model: str, fingerprint: str
    ) -> bool:
        """The same for a tokenizer that is known by name, before its model's card."""
        if fingerprint in self._loaded:
            return True
        loop = asyncio.get_running_loop()
        if loop.time() < self._retry_at.get(fingerprint, 0.0):
            return False
        self._retry_at[fingerprint] = loop.time() + RETRY_LOAD_S
        bundle = await client.get(tokenizer_key(fingerprint))
        if bundle is None:
            _log.warning("tokenizer_missing", model=model, tokenizer=fingerprint)
            return False
        try:
            tokenizer = await self._run(partial(load_tokenizer, bundle))
        except (ModelLoadError, ProtocolError) as error:
            _log.error("tokenizer_unusable", model=model, error=str(error))
            return False
        except Exception:  # noqa: BLE001 - a bundle may make a loader raise anything
            _log.exception("tokenizer_unusable", model=model)
            return False
        _log.info("tokenizer_loaded", model=model, tokenizer=fingerprint)
        self._loaded[fingerprint] = tokenizer
        settle()  # now, while no job waits, and not in the midst of many
        return True

    async def prepare(
        self, raw: Sequence[RawJob], card: ModelCard, max_bytes: int
    ) -> list[Outcome]:
        """See `prepare`; `ready` was true for this card."""
        work = partial(prepare, raw, self._loaded[card.tokenizer], card, max_bytes)
        size = sum(len(job.payload) + len(job.blob or b"") for job in raw)
        if size <= INLINE_BYTES and all(f.done() for f in self._in_thread):
            return work()
        return await self._run(work)

    async def _run(self, work: Callable[[], T]) -> T:
        # Kept by the work itself: whoever waits for it can be cancelled.
        future = self._executor.submit(work)
        self._in_thread = [f for f in self._in_thread if not f.done()] + [future]
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Ends the thread after its present work."""
        self._executor.shutdown(wait=False, cancel_futures=True)
