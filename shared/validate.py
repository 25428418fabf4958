"""The limits of every request field, checked before the queue and again behind it.

A producer calls `validate_prompt` before it enqueues. The scheduler calls
`decode_request` and `validate_request` on what it reads, since a client in another
language may have checked nothing. Errors name the field, the value and the limit.
"""

import re
from typing import Final

from .adapters import check_name, check_ref
from .decode import decode_prompt as decode_prompt
from .decode import decode_request as decode_request
from .errors import InvalidRequest, PayloadTooLarge
from .keys import MODEL_NAME
from .messages import JobRequest, Message, ModelCard, PoolCard, Prompt, Sampling
from .routes import check_version_name
from .shadow_keys import SHADOW_TENANT
from .typed import shown
from .webhook_target import check_webhook as check_webhook

MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARACTERS: Final = 256
MAX_STOP_IDS: Final = 64
MAX_BIASED_TOKENS: Final = 1024
MAX_PRIORITY: Final = 100
MAX_DELAY_S: Final = 30 * 86400.0
"""Thirty days: beyond it a delay or deadline is taken for a mistake of unit."""
TENANT: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+-]{0,63}")
"""No colon and no white space: tenants stand in key names and hash fields."""
IDEMPOTENCY_KEY: Final = re.compile(r"[!-~]{1,200}")
"""Printable ASCII without blanks."""

_PAYLOAD_LIMIT: Final = "limits.max_payload_bytes"
_INTEGERS: Final[dict[str, tuple[int, int]]] = {
    "logprobs": (0, 20),
    "n": (1, 16),
    "seed": (0, 2**63 - 1),
}
_FLOATS: Final[dict[str, tuple[float, float, bool]]] = {
    "temperature": (0.0, 5.0, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "repetition_penalty": (0.01, 10.0, True),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
}
"""field -> (least, most, whether the least itself is allowed)."""


def validate_prompt(
    prompt: Prompt,
    card: ModelCard | None,
    pool: PoolCard,
    max_bytes: int | None = None,
) -> None:
    """Checks every field of a prompt against its limits.

    Args:
        prompt: What the caller submits; its types are right (`decode_prompt`).
        card: What a worker says of the model, when one ever did.
        pool: The pool's settings.
        max_bytes: Longest text; None is what a request in Redis may take.

    Raises:
        InvalidRequest: One field is wrong; the message names it and its limit.
        PayloadTooLarge: The text alone exceeds the pool's limit of bytes.
    """
    if not MODEL_NAME.fullmatch(prompt.model):
        raise InvalidRequest(
            "model",
            f"{shown(prompt.model)} cannot be a model's name; expected 1 to 96 "
            "letters, digits and . _ / -",
        )
    if max_bytes is None or max_bytes <= pool.max_payload_bytes:
        _check_size(prompt, pool.max_payload_bytes, _PAYLOAD_LIMIT)
    else:
        _check_size(prompt, max_bytes, "storage.max_input_bytes")
    _check_content(prompt.text, prompt.messages, card)
    _check_sampling(prompt.sampling, card)
    _check_queueing(prompt)
    if prompt.adapter is not None:
        check_name(prompt.adapter)
    if prompt.version is not None:
        check_version_name(prompt.version)
    if prompt.webhook is not None:
        check_webhook(prompt.webhook, pool)


def validate_request(request: JobRequest, card: ModelCard | None) -> None:
    """Checks the part of a job that any client may have written.

    Args:
        request: The decoded `in:<id>`.
        card: What a worker says of the model, when one ever did.

    Raises:
        InvalidRequest: One field is wrong; the message names it and its limit.
    """
    if request.text_ref is None:
        _check_content(request.text, request.messages, card)
    elif request.text is not None or request.messages is not None:
        raise InvalidRequest(
            "text_ref", "is given beside text or messages; expected one of the three"
        )
    if request.adapter is not None:
        check_ref(request.adapter)
    if request.version is not None:
        check_version_name(request.version)
    _check_sampling(request.sampling, card)


def check_payload(payload: bytes, limit: int) -> None:
    """Refuses an encoded request that is larger than the pool accepts.

    Args:
        payload: The JSON JobRequest.
        limit: Most bytes.

    Raises:
        PayloadTooLarge: It is larger.
    """
    if len(payload) > limit:
        raise _too_large("request", len(payload), limit, _PAYLOAD_LIMIT)


def _check_size(prompt: Prompt, limit: int, setting: str) -> None:
    # Characters never outnumber UTF-8 bytes, so this refuses before any copy is made.
    field = "text" if prompt.messages is None else "messages"
    size = len(prompt.text or "")
    size += sum(len(m.content) for m in prompt.messages or ())
    if size > limit:
        raise _too_large(field, size, limit, setting)


def _too_large(field: str, size: int, limit: int, setting: str) -> PayloadTooLarge:
    return PayloadTooLarge(
        field,
        f"the request takes at least {size} bytes and the pool accepts {limit} "
        f"({setting}); shorten the text",
    )


def _check_content(
    text: str | None, messages: tuple[Message, ...] | None, card: ModelCard | None
) -> None:
    if (text is None) == (messages is None):
        both = "neither" if text is None else "both"
        raise InvalidRequest(
            "text", f"{both} of text and messages are given; expected exactly one"
        )
    if text is not None:
        if not text:
            raise InvalidRequest(
                "text", "the text is empty; expected at least one character"
            )
        _check_unicode("text", text)
        return
    assert messages is not None
    if not any(message.content for message in messages):
        raise InvalidRequest(
            "messages", "have no content; expected some in one of them at least"
        )
    for index, message in enumerate(messages):
        _check_unicode(f"messages[{index}].content", message.content)
    if card is not None and not card.has_chat_template:
        raise InvalidRequest(
            "messages",
            f"the model '{card.model}' has no chat template; send plain text instead",
        )


def _check_unicode(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            field,
            f"character {error.start} is {text[error.start]!r}, half of a surrogate "
            "pair, which has no UTF-8 form; decode the source with its right encoding",
        ) from None


def _check_sampling(sampling: Sampling, card: ModelCard | None) -> None:
    most = card.max_context if card else 2**31 - 1
    _check_integer("sampling.max_tokens", sampling.max_tokens, 1, most)
    _check_integer("sampling.min_tokens", sampling.min_tokens, 0, sampling.max_tokens)
    if sampling.top_k is not None:
        _check_integer("sampling.top_k", sampling.top_k, 1, 2**31 - 1)
    for field, (least, highest) in _INTEGERS.items():
        value = getattr(sampling, field)
        if value is not None:
            _check_integer(f"sampling.{field}", value, least, highest)
    for field, (low, high, inclusive) in _FLOATS.items():
        value = getattr(sampling, field)
        # NaN compares false with everything, so the test is for what is right.
        if not (low <= value <= high) or (value == low and not inclusive):
            bound = "at least" if inclusive else "more than"
            raise InvalidRequest(
                f"sampling.{field}",
                f"{value} is out of range; expected {bound} {low}, at most {high}",
            )
    _check_stops(sampling)
    _check_token_ids(sampling, card)


def _check_integer(field: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidRequest(
            field, f"{shown(value)} is out of range; expected {least} to {most}"
        )


def _check_stops(sampling: Sampling) -> None:
    if len(sampling.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            "sampling.stop",
            f"{len(sampling.stop)} strings; expected at most {MAX_STOP_STRINGS}",
        )
    for index, stop in enumerate(sampling.stop):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"sampling.stop[{index}]",
                f"{shown(stop)} has {len(stop)} characters; "
                f"expected 1 to {MAX_STOP_CHARACTERS}",
            )
        _check_unicode(f"sampling.stop[{index}]", stop)


def _check_token_ids(sampling: Sampling, card: ModelCard | None) -> None:
    vocab = card.vocab_size if card else 2**31
    if len(sampling.stop_token_ids) > MAX_STOP_IDS:
        raise InvalidRequest(
            "sampling.stop_token_ids",
            f"{len(sampling.stop_token_ids)} ids; expected at most {MAX_STOP_IDS}",
        )
    for token_id in sampling.stop_token_ids:
        _check_integer("sampling.stop_token_ids", token_id, 0, vocab - 1)
    if len(sampling.logit_bias) > MAX_BIASED_TOKENS:
        raise InvalidRequest(
            "sampling.logit_bias",
            f"{len(sampling.logit_bias)} tokens; expected at most {MAX_BIASED_TOKENS}",
        )
    for token_id, bias in sampling.logit_bias.items():
        _check_integer("sampling.logit_bias", token_id, 0, vocab - 1)
        if not -100.0 <= bias <= 100.0:
            raise InvalidRequest(
                "sampling.logit_bias",
                f"{bias} for token {token_id} is out of range; expected -100 to 100",
            )


def _check_queueing(prompt: Prompt) -> None:
    _check_integer("priority", prompt.priority, -MAX_PRIORITY, MAX_PRIORITY)
    if not TENANT.fullmatch(prompt.tenant) or prompt.tenant == SHADOW_TENANT:
        raise InvalidRequest(
            "tenant",
            f"{shown(prompt.tenant)} is not allowed; expected 1 to 64 letters, digits "
            "and . _ @ + -, beginning with a letter, a digit or _, and no owner of "
            "copies",
        )
    key = prompt.idempotency_key
    if key is not None and not IDEMPOTENCY_KEY.fullmatch(key):
        raise InvalidRequest(
            "idempotency_key",
            f"{shown(key)} is not allowed; expected 1 to 200 printable ASCII "
            "characters without blanks",
        )
    if not 0.0 <= prompt.delay_s <= MAX_DELAY_S:
        raise InvalidRequest(
            "delay_s", f"{prompt.delay_s} is out of range; expected 0 to {MAX_DELAY_S}"
        )
    _check_moment(prompt)
    deadline = prompt.deadline_s
    if prompt.refuse_late and deadline is None:
        raise InvalidRequest(
            "refuse_late", "is set without a deadline; give deadline_s as well"
        )
    if deadline is not None and not prompt.delay_s < deadline <= MAX_DELAY_S:
        raise InvalidRequest(
            "deadline_s",
            f"{deadline} is out of range; expected more than the delay "
            f"({prompt.delay_s} s) and at most {MAX_DELAY_S}",
        )


def _check_moment(prompt: Prompt) -> None:
    moment = prompt.not_before
    if moment is None:
        return
    if moment.tzinfo is None:
        raise InvalidRequest(
            "not_before",
            f"{moment.isoformat()} has no time zone; add one, as in "
            f"{moment.isoformat()}Z",
        )
    if prompt.delay_s:
        raise InvalidRequest(
            "not_before", f"is given beside a delay of {prompt.delay_s} s; give one"
        )
