"""From a prompt to what `enqueue` takes: checked, encoded, with an id and a bucket."""

import base64
import datetime as dt
import hashlib
import os
from typing import Final

import msgspec

from .adapters import unknown_adapter
from .by_reference import by_reference
from .input_refs import MOST_PAYLOAD_BYTES
from .keys import JobId, bucket_of, new_unique, partition_of
from .messages import (
    ADAPTER_VERSION,
    FIRST_VERSION,
    PIN_VERSION,
    AdapterRef,
    InputRef,
    JobRequest,
    ModelCard,
    PoolCard,
    Prompt,
    encode,
)
from .script_types import NewJob
from .validate import check_payload, validate_prompt

MESSAGE_TOKENS: Final = 6
"""What a chat template adds around one message, roughly."""
DEFAULT_BYTES_PER_TOKEN: Final = 3.5


class _Packed(msgspec.Struct, frozen=True):
    """A request as it travels."""

    payload: bytes
    hash: str
    v: int
    upload: tuple[InputRef, bytes] | None


def estimate_tokens(prompt: Prompt, card: ModelCard | None) -> int:
    """Returns the likely number of prompt tokens, from bytes; at least 1."""
    ratio = card.bytes_per_token if card else DEFAULT_BYTES_PER_TOKEN
    messages = prompt.messages or ()
    num_bytes = len((prompt.text or "").encode())
    num_bytes += sum(len(m.content.encode()) for m in messages)
    return max(1, round(num_bytes / max(ratio, 0.1)) + MESSAGE_TOKENS * len(messages))


def new_job(
    prompt: Prompt,
    card: ModelCard | None,
    pool: PoolCard,
    unique: str | None = None,
    adapter: AdapterRef | None = None,
) -> NewJob:
    """Checks a prompt and prepares its job.

    Args:
        prompt: A prompt whose types are right (`as_prompt`).
        card: What a worker says of the model, when one ever did.
        pool: The pool's settings.
        unique: The unique part of its id; None draws one.
        adapter: What stands under the prompt's adapter (`AdapterResolver`).

    Raises:
        InvalidRequest: One field is wrong, or the whole is too large.
    """
    pool = pool.of_model(prompt.model)
    packed = _packed(prompt, card, pool, adapter)
    unique = new_unique() if unique is None else unique
    key = prompt.idempotency_key
    partition = partition_of(prompt.tenant, key or unique, pool.partitions)
    num_tokens = estimate_tokens(prompt, card)
    seed = prompt.sampling.seed
    return NewJob(
        id=JobId(prompt.model, partition, unique),
        payload=packed.payload,
        payload_hash=packed.hash,
        job_class=prompt.job_class,
        tenant=prompt.tenant,
        priority=prompt.priority,
        bucket=bucket_of(num_tokens, pool.buckets),
        tokens=num_tokens,
        max_tokens=prompt.sampling.max_tokens * prompt.sampling.n,
        seed=_draw_seed() if seed is None else seed,
        deadline_ms=_milliseconds(prompt.deadline_s),
        delay_ms=_milliseconds(prompt.delay_s) or 0,
        not_before_ms=_moment(prompt.not_before),
        keep_ms=pool.retention_ms,
        idempotency_key=key,
        refuse_late=prompt.refuse_late,
        webhook=prompt.webhook,
        version=prompt.version,
        adapter=prompt.adapter,
        v=packed.v,
        upload=packed.upload,
    )


def _packed(
    prompt: Prompt,
    card: ModelCard | None,
    pool: PoolCard,
    adapter: AdapterRef | None,
) -> _Packed:
    if prompt.adapter is not None and adapter is None:
        raise unknown_adapter(prompt.model, prompt.adapter, ())
    has_store = pool.storage_url is not None
    most = max(pool.max_input_bytes, pool.max_payload_bytes) if has_store else None
    validate_prompt(prompt, card, pool, most)
    request = JobRequest(
        v=_lowest_version(prompt),
        text=prompt.text,
        messages=prompt.messages,
        sampling=prompt.sampling,
        control_tokens=prompt.control_tokens,
        adapter=adapter,
        version=prompt.version,
    )
    payload, upload, most_bytes = encode(request), None, pool.max_payload_bytes
    # Of what was asked for: whether it goes by the store may change before a retry.
    payload_hash = fingerprint(_asked_for(request, payload))
    if has_store and len(payload) > pool.offload_bytes:
        request, upload = by_reference(request, prompt.tenant, pool.max_input_bytes)
        payload, most_bytes = encode(request), min(MOST_PAYLOAD_BYTES, most_bytes)
    check_payload(payload, most_bytes)
    return _Packed(payload, payload_hash, request.v, upload)


def _lowest_version(prompt: Prompt) -> int:
    """The lowest schema version whose readers understand all of a request."""
    if prompt.version is not None:
        return PIN_VERSION
    return FIRST_VERSION if prompt.adapter is None else ADAPTER_VERSION


def _asked_for(request: JobRequest, payload: bytes) -> bytes:
    """What makes two calls the same: an adapter's name, whatever stands under it."""
    if request.adapter is None:
        return payload
    named = AdapterRef(request.adapter.name, "")
    return encode(msgspec.structs.replace(request, adapter=named))


def _draw_seed() -> int:
    return int.from_bytes(os.urandom(8), "little") >> 1


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)


def _moment(time: dt.datetime | None) -> int | None:
    return None if time is None else max(round(time.timestamp() * 1000), 0)


def fingerprint(payload: bytes) -> str:
    """Returns what tells one payload from another.

    96 bits in 16 characters: it is kept with every job.
    """
    return base64.b64encode(hashlib.blake2b(payload, digest_size=12).digest()).decode()
