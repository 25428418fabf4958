"""From bytes or loosely typed objects to prompts and requests that can be read here."""

from collections.abc import Mapping

import msgspec

from .adapter_names import split_name
from .errors import InvalidRequest, NewerSchema, ProtocolError
from .messages import (
    ADAPTER_VERSION,
    INPUT_REF_VERSION,
    PIN_VERSION,
    SCHEMA_VERSION,
    JobRequest,
    Message,
    Prompt,
    Sampling,
)
from .typed import convert, parse, shown


def decode_prompt(source: bytes | Mapping[str, object] | Prompt) -> Prompt:
    """Returns a prompt whose fields all have the right types.

    A `Prompt` made in Python is checked as well: constructors check nothing.

    Args:
        source: JSON bytes, a mapping, or a prompt with any field types.

    Returns:
        The prompt, with sequences as tuples and names as enum members; the model
        `m:a` is taken apart into model and adapter.

    Raises:
        InvalidRequest: Not an object, an unknown field, or a wrong type.
    """
    plain: object = source
    if isinstance(source, Prompt):
        plain = _plain_prompt(source)
    elif isinstance(source, bytes):
        plain = parse(source, "prompt")
    return with_adapter(convert(plain, Prompt, "prompt"))


def with_adapter(prompt: Prompt) -> Prompt:
    """Returns a prompt whose model `m:a` is taken apart into model and adapter.

    Raises:
        InvalidRequest: It names another adapter as well.
    """
    model, adapter = split_name(prompt.model)
    if adapter is None:
        return prompt
    if prompt.adapter not in (None, adapter):
        raise InvalidRequest(
            "adapter",
            f"{shown(prompt.adapter)} differs from that of the model "
            f"{shown(prompt.model)}; give one of them",
        )
    return msgspec.structs.replace(prompt, model=model, adapter=adapter)


def decode_request(payload: bytes) -> JobRequest:
    """Returns the request in `in:<id>`, which any client may have written.

    Args:
        payload: JSON bytes.

    Returns:
        The request. Unknown fields of its sampling are refused, those of the
        request itself belong to later versions and are ignored.

    Raises:
        InvalidRequest: Not JSON, not an object, or a wrong type.
        NewerSchema: Of the next version: it may wait for someone who reads it.
        ProtocolError: Of a version that nobody beside this process can have.
    """
    plain = parse(payload, "request")
    # Before the fields are looked at: their types are those of the version.
    check_version(plain.get("v", 1) if isinstance(plain, dict) else 1, "the request")
    request = convert(plain, JobRequest, "request")
    if request.text_ref is not None and request.v < INPUT_REF_VERSION:
        raise InvalidRequest(
            "v",
            f"a request with text_ref has version {INPUT_REF_VERSION}, found "
            f"{request.v}; older readers would not see its input",
        )
    if request.adapter is not None and request.v < ADAPTER_VERSION:
        raise InvalidRequest(
            "v",
            f"a request with an adapter has version {ADAPTER_VERSION}, found "
            f"{request.v}; older readers would run it without",
        )
    if request.version is not None and request.v < PIN_VERSION:
        raise InvalidRequest(
            "v",
            f"a request for one version of its model has version {PIN_VERSION}, found "
            f"{request.v}; older readers would give it to any",
        )
    return request


def check_version(version: object, what: str) -> None:
    """Refuses a record that is newer than this code.

    Args:
        version: Its `v`. What is no whole number is left to the decoder.
        what: The record, for the message.

    Raises:
        NewerSchema: It is one version ahead, as during a rolling upgrade.
        ProtocolError: It is further ahead, or no version at all.
    """
    if not isinstance(version, int) or isinstance(version, bool):
        return
    if version == SCHEMA_VERSION + 1:
        raise NewerSchema(what, version, SCHEMA_VERSION)
    if not 1 <= version <= SCHEMA_VERSION:
        raise ProtocolError(
            f"{what} has schema version {version}; this process reads 1 to "
            f"{SCHEMA_VERSION}, and a pool's parts may be one version apart at most"
        )


def _plain_prompt(prompt: Prompt) -> dict[str, object]:
    plain = msgspec.structs.asdict(prompt)
    if isinstance(prompt.sampling, Sampling):
        plain["sampling"] = msgspec.structs.asdict(prompt.sampling)
    if isinstance(prompt.messages, list | tuple):
        plain["messages"] = [
            msgspec.structs.asdict(m) if isinstance(m, Message) else m
            for m in prompt.messages
        ]
    return plain
