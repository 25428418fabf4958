"""How a request is to be queued: headers, or fields of its body of the same meaning."""

from typing import Final

import msgspec
from fastapi import Request

from ...shared.errors import InvalidRequest
from ...shared.messages import JobClass, Prompt
from ..queue_fields import QueueFields as QueueFields
from ..queue_fields import with_fields
from .auth import TENANT_HEADER as TENANT_HEADER
from .auth import Caller, for_tenant

PRIORITY: Final = "X-Tokenmill-Priority"
CLASS: Final = "X-Tokenmill-Class"
DEADLINE: Final = "X-Tokenmill-Deadline"
IDEMPOTENCY: Final = "Idempotency-Key"
KEEP: Final = "X-Tokenmill-Keep-On-Disconnect"
WEBHOOK: Final = "X-Tokenmill-Webhook"
_HEADERS: Final = {
    PRIORITY: "priority",
    CLASS: "job_class",
    DEADLINE: "deadline_s",
    IDEMPOTENCY: "idempotency_key",
    WEBHOOK: "webhook",
}
_ASSENT: Final = frozenset({"1", "true", "yes"})
_DISSENT: Final = frozenset({"", "0", "false", "no"})


class SubmitOptions(QueueFields, frozen=True, kw_only=True):
    """How a request is to be queued, and for whom."""

    tenant: str
    keep_on_disconnect: bool = False
    """A caller that leaves does not cancel its job."""

    def apply(self, prompt: Prompt, index: int = 0) -> Prompt:
        """Returns the prompt with these options.

        Args:
            prompt: What to run.
            index: Its position among the prompts of the request. Each has an
                idempotency key of its own, the first one the request's, so that no
                other request may use it.
        """
        changed = with_fields(prompt, self)
        key = self.idempotency_key
        if key is not None and index > 0:
            key = f"{key}:{index}"
        return msgspec.structs.replace(
            changed, tenant=self.tenant, idempotency_key=key or changed.idempotency_key
        )


def options_of(request: Request, body: QueueFields | None = None) -> SubmitOptions:
    """Reads how a request is to be queued. A header goes before its field.

    Args:
        request: One whose caller is known, since the endpoint depends on `require`.
        body: The decoded body.

    Raises:
        InvalidRequest: A header cannot be read; it is named.
        ApiError: The body names a tenant for whom the caller may not act.
    """
    caller = request.scope.get("tokenmill.caller")
    assert isinstance(caller, Caller), "the endpoint depends on `require`"
    headers = request.headers
    given: dict[str, object] = {}
    if body is not None:
        given = {name: getattr(body, name) for name in QueueFields.__struct_fields__}
    for header, name in _HEADERS.items():
        text = headers.get(header)
        if text is not None:
            given[name] = _read(header, name, text)
    # Who sends a key means to come back for the same job.
    keep = _flag(KEEP, headers.get(KEEP, "")) or given.get("idempotency_key")
    # Where the header names one, the caller acts for that one already.
    if TENANT_HEADER not in headers:
        caller = for_tenant(caller, getattr(body, "tenant", None), "tenant")
    options = {"tenant": caller.tenant, "keep_on_disconnect": bool(keep), **given}
    return msgspec.convert(options, SubmitOptions)


def _read(header: str, name: str, text: str) -> object:
    """Returns the value of a header, of the type and within the bounds of its field."""
    try:
        fields = msgspec.convert({name: text}, QueueFields, strict=False)
    except msgspec.ValidationError as error:
        problem = str(error).partition(" - at ")[0]
        if name == "job_class":
            problem = f"expected one of {', '.join(JobClass)}"
        raise InvalidRequest(
            header, f"'{text[:80]}' cannot be read: {problem}"
        ) from None
    return getattr(fields, name)


def _flag(header: str, text: str) -> bool:
    word = text.strip().lower()
    if word in _ASSENT:
        return True
    if word in _DISSENT:
        return False
    raise InvalidRequest(header, f"'{text[:80]}' cannot be read: expected 1 or 0")
