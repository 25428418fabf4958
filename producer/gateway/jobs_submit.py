"""From a request of POST /v1/jobs to a prompt."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from ...shared.decode import decode_prompt
from ...shared.errors import InvalidRequest
from ...shared.messages import Prompt
from ...shared.typed import parse
from .auth import for_tenant
from .errors import as_api_error
from .options import options_of

if TYPE_CHECKING:
    from fastapi import Request

    from .auth import Caller
    from .context import Gateway


class Submission(msgspec.Struct, frozen=True):
    """What is to be queued."""

    prompt: Prompt
    wait_for_worker: bool
    """Queue it even if no worker serves the model now."""


async def as_submission(
    request: "Request", caller: "Caller", owner: "Gateway"
) -> Submission:
    """Reads the body and the headers of a submit.

    Raises:
        InvalidRequest: Something in it is wrong; the error names the field.
        ApiError: 403: it is for a tenant that is not the caller's.
    """
    fields = _object(await request.body())
    # What stands under null is not given, as in the API of OpenAI.
    fields = {name: value for name, value in fields.items() if value is not None}
    if "class" in fields:
        short = fields.pop("class")
        if fields.setdefault("job_class", short) != short:
            raise InvalidRequest("class", "differs from job_class; give one of them")
    waits = fields.pop("wait_for_worker", False)
    if not isinstance(waits, bool):
        raise InvalidRequest("wait_for_worker", "expected true or false")
    if "model" not in fields:
        fields["model"] = await only_model(owner)
    prompt = decode_prompt(fields)
    options = options_of(request)
    if "tenant" in fields and prompt.tenant != caller.tenant:
        named = for_tenant(caller, prompt.tenant, "tenant")
        options = msgspec.structs.replace(options, tenant=named.tenant)
    return Submission(options.apply(prompt), waits)


@contextmanager
def named_as_written() -> Iterator[None]:
    """Errors name fields as this endpoint has them, not as OpenAI's API calls them."""
    try:
        yield
    except InvalidRequest as error:
        answer = as_api_error(error)
        answer.detail = msgspec.structs.replace(answer.detail, param=error.field)
        raise answer from None


async def only_model(owner: "Gateway") -> str:
    """Returns the model of a request that names none: the only one, or the default."""
    session = owner.client.session
    return await session.patiently(session.view.default_model)


def _object(body: bytes) -> Mapping[str, object]:
    fields = parse(body, "body")
    if not isinstance(fields, dict):
        raise InvalidRequest("body", "expected a JSON object")
    return fields
