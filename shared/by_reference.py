"""Inputs too large for Redis: the request names an object, and the object is stored."""

import msgspec

from .errors import PayloadTooLarge
from .input_refs import ref_of
from .messages import INPUT_REF_VERSION, InputRef, JobRequest, encode


def by_reference(
    request: JobRequest, tenant: str, max_bytes: int
) -> tuple[JobRequest, tuple[InputRef, bytes]]:
    """Takes the input out of a request.

    Args:
        request: With text or messages.
        tenant: Whose input it is.
        max_bytes: Largest object of the store.

    Returns:
        The request that names the object instead, and what is to be stored.

    Raises:
        PayloadTooLarge: The store takes no object of this size.
    """
    if request.messages is None:
        holds, content = "text", (request.text or "").encode()
    else:
        holds, content = "messages", encode(request.messages)
    if len(content) > max_bytes:
        raise PayloadTooLarge(
            holds,
            f"the input takes {len(content)} bytes and the pool's store accepts "
            f"{max_bytes} (storage.max_input_bytes); shorten the text",
        )
    ref = ref_of(tenant, content, holds)
    version = max(request.v, INPUT_REF_VERSION)
    named = msgspec.structs.replace(
        request, v=version, text_ref=ref, text=None, messages=None
    )
    return named, (ref, content)
