"""Our structs in the OpenAPI document: what an endpoint takes, answers and refuses."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from starlette.responses import Response

from .errors import ErrorBody

_WHY: Final[Mapping[int, str]] = {
    400: "Something in the request is wrong; `param` names it.",
    401: "No API key, or one that is unknown or revoked.",
    403: "The key has not the scope, is another tenant's, or a quota is used up.",
    404: "There is none of this id for this tenant.",
    409: "It is at odds with what is there.",
    413: "More bytes than are taken.",
    422: "It could not be done by its deadline, and asked to be refused then.",
    429: "The queue or a quota is full; `Retry-After` says when to try again.",
    504: "It was not done in its time.",
    503: "Redis, the store or a worker is not there; `Retry-After` says when.",
}
_JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
_PREFIX: Final = "#/$defs/"


class StructResponse(Response):
    """An answer of one of our structs.

    Args:
        content: The struct.
        status_code: HTTP status.
        headers: Further headers.
    """

    media_type = _JSON

    def __init__(
        self,
        content: msgspec.Struct,
        status_code: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(msgspec.json.encode(content), status_code, headers)


def schema_of(kind: type) -> dict[str, Any]:
    """Returns the JSON schema of a struct without references to other places."""
    schema = msgspec.json.schema(kind)
    whole: dict[str, Any] = _inline(schema, schema.get("$defs", {}))
    return whole


def takes(kind: type) -> dict[str, Any]:
    """Returns the `openapi_extra` of an endpoint whose body is JSON of this kind."""
    content = {_JSON: {"schema": schema_of(kind)}}
    return {"requestBody": {"required": True, "content": content}}


def answers(
    kind: type | None,
    *refusals: int,
    status: int = 200,
    also: Mapping[int, str] | None = None,
    media_type: str = _JSON,
) -> dict[int | str, dict[str, Any]]:
    """Returns the `responses` of an endpoint.

    Args:
        kind: What it answers; None: bytes or text.
        refusals: Statuses of its errors, besides those that every endpoint has.
        status: Of its answer.
        also: Further statuses with the same answer -> when.
        media_type: Of its answer.
    """
    schema = {"type": "string"} if kind is None else schema_of(kind)
    if media_type == EVENTS:
        schema = event_schema(schema)
    content = {media_type: {"schema": schema}}
    found: dict[int | str, dict[str, Any]] = {
        status: {"description": "Done.", "content": content}
    }
    for other, when in (also or {}).items():
        found[other] = {"description": when, "content": content}
    refused = {_JSON: {"schema": schema_of(ErrorBody)}}
    for code in sorted({400, 401, 403, 503, *refusals}):
        found[code] = {"description": _WHY[code], "content": refused}
    found["4XX"] = {"description": "Any other refusal.", "content": refused}
    return found


def event_schema(data: Mapping[str, Any], last: str | None = None) -> dict[str, Any]:
    """Returns the schema of one event of a stream.

    Args:
        data: Schema of what its data says, as JSON.
        last: What the last event says instead, if it is no JSON.
    """
    content = {"anyOf": [data, schema_of(ErrorBody)]}
    told: dict[str, Any] = {"contentMediaType": _JSON, "contentSchema": content}
    if last is not None:
        told = {"anyOf": [{"const": last}, told]}
    text = {"type": "string"}
    properties = {"data": {**text, **told}, "id": text, "event": text}
    return {"type": "object", "properties": properties}


def _inline(schema: Any, kinds: Mapping[str, Any]) -> Any:  # noqa: ANN401 - JSON
    if isinstance(schema, dict):
        reference = schema.get("$ref")
        if reference is not None:
            return _inline(kinds[reference.removeprefix(_PREFIX)], kinds)
        if "prefixItems" in schema:
            schema = _without_places(schema)
        return {k: _inline(v, kinds) for k, v in schema.items() if k != "$defs"}
    if isinstance(schema, list):
        return [_inline(entry, kinds) for entry in schema]
    return schema


def _without_places(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Few readers of OpenAPI know arrays whose places have types of their own."""
    kept = {k: v for k, v in schema.items() if k not in ("prefixItems", "items")}
    return {**kept, "items": {"anyOf": schema["prefixItems"]}}
