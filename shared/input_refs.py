"""References to inputs outside Redis, and addresses of stores: no I/O here."""

import hashlib
import re
from typing import Final

import msgspec

from .errors import InputUnreadable, InvalidRequest
from .messages import InputRef, JobRequest, Message
from .validate import TENANT

LOCAL_SCHEMES: Final = frozenset({"file", "local"})
"""A directory, which all hosts must mount at the same place."""
MOST_PAYLOAD_BYTES: Final = 64 * 1024
"""Of a request that names its input: whoever looks for such reads no larger ones."""
_NAME: Final = re.compile(rf"(?P<tenant>{TENANT.pattern})/(?P<sha256>[0-9a-f]{{64}})")
_URL: Final = re.compile(r"(?P<scheme>[a-z][a-z0-9+]*)://(?P<rest>[^?#]+)")


def is_input(name: str) -> bool:
    """Whether a name in the store, relative to its root, can be an input's."""
    return _NAME.fullmatch(name) is not None


def ref_of(tenant: str, content: bytes, holds: str) -> InputRef:
    """Returns the reference under which an input is stored.

    Args:
        tenant: Whose it is: tenants share no objects.
        content: The object.
        holds: `text` or `messages`.
    """
    sha256 = hashlib.sha256(content).hexdigest()
    plain = {"name": f"{tenant}/{sha256}", "size": len(content), "sha256": sha256}
    return msgspec.convert({**plain, "holds": holds}, InputRef)


def url_problem(url: str) -> str | None:
    """Returns what is wrong with a store's address, without showing any of it."""
    match = _URL.fullmatch(url)
    if match is None:
        return "expected file:///directory, s3://bucket/prefix or another fsspec URL"
    if "@" in match["rest"]:
        return (
            "an address with credentials would be published to every producer; "
            "give them in the environment of each process"
        )
    if match["scheme"] == "memory":
        return "no other process sees what one has in its memory"
    if match["scheme"] in LOCAL_SCHEMES and not match["rest"].startswith("/"):
        return "expected an absolute directory: file:///directory"
    return None


def check_ref(ref: InputRef, tenant: str, max_bytes: int) -> None:
    """Refuses a reference to anything but an input of this tenant.

    Args:
        ref: As a client wrote it.
        tenant: The job's.
        max_bytes: Largest object that is read.

    Raises:
        InputUnreadable: It names another place, or is too large.
    """
    match = _NAME.fullmatch(ref.name)
    if match is None or match["sha256"] != ref.sha256 or match["tenant"] != tenant:
        raise InputUnreadable(
            "text_ref.name",
            f"{ref.name[:160]!r} is not an input of this job; expected "
            f"'{tenant}/<SHA-256 as in text_ref.sha256>'",
        )
    if not 1 <= ref.size <= max_bytes:
        raise InputUnreadable(
            "text_ref.size",
            f"{ref.size} bytes; expected 1 to {max_bytes} (storage.max_input_bytes)",
        )


def with_input(request: JobRequest, content: bytes) -> JobRequest:
    """Returns the request with its input in place of the reference.

    Raises:
        InvalidRequest: The object does not hold what the reference says.
    """
    assert request.text_ref is not None
    holds = request.text_ref.holds
    try:
        if holds == "messages":
            messages = msgspec.json.decode(content, type=tuple[Message, ...])
            return msgspec.structs.replace(request, text_ref=None, messages=messages)
        text = content.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        what = "text in UTF-8" if holds == "text" else "a JSON array of messages"
        raise InvalidRequest(
            "text_ref", f"the object does not hold {what}: {error}"
        ) from None
    return msgspec.structs.replace(request, text_ref=None, text=text)
