"""What a started job becomes for the engine, earlier epochs' output included."""

from collections.abc import Iterable
from typing import Final

import msgspec
import structlog

from ..shared.adapters import key_of
from ..shared.decode import decode_request
from ..shared.errors import InvalidRequest, ProtocolError
from ..shared.messages import (
    SCHEMA_VERSION,
    Choice,
    Delta,
    JobClass,
    JobRequest,
    TokenLogprob,
)
from ..shared.script_types import Started
from ..shared.tokens import ids_from_bytes
from .engine.request import Emitted, EngineRequest

_requests: Final = msgspec.json.Decoder(JobRequest)
_deltas: Final = msgspec.json.Decoder(Delta)


def read_request(started: Started) -> JobRequest:
    """Returns the payload of a started job.

    Raises:
        InvalidRequest: The payload is not a request.
        NewerSchema: It is of the next version: not for this worker.
        ProtocolError: It is of a version that nobody can have.
    """
    try:
        request = _requests.decode(started.payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # The slower decoder names the field that is wrong.
        return decode_request(started.payload)
    if 1 <= request.v <= SCHEMA_VERSION:
        return request
    return decode_request(started.payload)


def engine_request(started: Started, request: JobRequest) -> EngineRequest:
    """Returns what the engine gets for a started job.

    The engine's id carries the epoch, so that output of an epoch that was lost here
    can never be taken for output of a later one.

    Raises:
        ProtocolError: The exact token ids are missing or damaged.
    """
    return EngineRequest(
        id=f"{started.job_id}@{started.epoch}",
        token_ids=_token_ids(started),
        sampling=request.sampling,
        seed=started.seed,
        job_class=JobClass(started.job_class),
        priority=started.priority,
        cache_salt=started.tenant,
        adapter=None if request.adapter is None else key_of(request.adapter),
        emitted=emitted_choices(started, request.sampling.n),
    )


def _token_ids(started: Started) -> tuple[int, ...]:
    raw = started.token_ids
    if not raw or len(raw) % 4:
        raise ProtocolError(
            f"job {started.job_id}: {len(raw)} bytes of prompt token ids; expected "
            "a multiple of 4 and at least one token"
        )
    return tuple(ids_from_bytes(raw))


def emitted_choices(started: Started, num_choices: int) -> tuple[Emitted, ...]:
    """Returns, by choice, the output that earlier epochs have published.

    Args:
        started: A job with its log, oldest delta first.
        num_choices: How many outputs the request asks for.

    Returns:
        One entry a choice, or nothing at all when the log is empty.

    Raises:
        InvalidRequest: `num_choices` is not a possible number.
    """
    if not started.log:
        return ()
    if num_choices < 1:
        raise InvalidRequest("n", f"value {num_choices}; expected at least 1")
    return tuple(
        _joined(started.job_id, choice, log)
        for choice, log in enumerate(_by_choice(started, num_choices))
    )


def _by_choice(started: Started, num_choices: int) -> list[list[Delta]]:
    logs: list[list[Delta]] = [[] for _ in range(num_choices)]
    for raw in started.log:
        try:
            delta = _deltas.decode(raw)
        except msgspec.DecodeError as error:
            raise ProtocolError(
                f"job {started.job_id}: its token log holds something that is not a "
                f"delta ({error})"
            ) from error
        if delta.end is None and 0 <= delta.choice < num_choices:
            logs[delta.choice].append(delta)
    return logs


def _joined(job_id: str, choice: int, log: Iterable[Delta]) -> Emitted:
    token_ids: list[int] = []
    texts: list[str] = []
    logprobs: list[TokenLogprob] = []
    last: Delta | None = None
    for delta in log:
        if delta.offset != len(token_ids):
            # Sampling is keyed by position: what is cut here comes out again, equal.
            structlog.get_logger().warning(
                "log_cut", job=job_id, choice=choice, offset=delta.offset
            )
            break
        token_ids += delta.token_ids
        texts.append(delta.text)
        logprobs += delta.logprobs or ()
        last = delta
    return Emitted(
        token_ids=tuple(token_ids),
        text="".join(texts),
        logprobs=tuple(logprobs) if logprobs else None,
        finish_reason=last.finish_reason if last else None,
        stop_reason=last.stop_reason if last else None,
    )


def completed(request: EngineRequest) -> tuple[Choice, ...] | None:
    """Returns the whole output if an earlier epoch published all of it, else None.

    That worker died between the last delta and the recorded end.
    """
    done: list[Choice] = []
    for index, part in enumerate(request.emitted):
        if part.finish_reason is None:
            return None
        done.append(
            Choice(
                index=index,
                text=part.text,
                token_ids=part.token_ids,
                finish_reason=part.finish_reason,
                stop_reason=part.stop_reason,
                logprobs=part.logprobs,
            )
        )
    return tuple(done) or None
