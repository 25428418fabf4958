"""What the endpoints that submit say of themselves in the OpenAPI document."""

from typing import Any, Final

from ...shared.messages import JobClass
from ...shared.validate import MAX_DELAY_S, MAX_PRIORITY
from .documented import EVENTS, answers, event_schema, schema_of, takes
from .options import CLASS, DEADLINE, IDEMPOTENCY, KEEP, PRIORITY
from .sse import DONE_WORD

_REFUSALS: Final = (404, 409, 413, 422, 429, 504)
_HEADERS: Final[dict[str, tuple[str, dict[str, object]]]] = {
    PRIORITY: (
        "Within the class; a smaller number is more urgent.",
        {"type": "integer", "minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY},
    ),
    CLASS: ("How urgent it is.", {"type": "string", "enum": [*JobClass]}),
    DEADLINE: (
        "Seconds after which the job expires.",
        {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_DELAY_S},
    ),
    IDEMPOTENCY: (
        "The same key is the same job.",
        {"type": "string", "pattern": "^[!-~]{1,200}$"},
    ),
    KEEP: (
        "1: a client that leaves does not cancel the job.",
        {"type": "string", "enum": ["0", "1"]},
    ),
}


def documented(
    answer: type, chunk: type, example: dict[str, object]
) -> dict[int | str, dict[str, Any]]:
    """Returns the `responses` of an endpoint that streams on request.

    Args:
        answer: Whole.
        chunk: JSON of an event of a stream.
        example: An answer.
    """
    found = answers(answer, *_REFUSALS)
    content = found[200]["content"]
    content["application/json"]["example"] = example
    content[EVENTS] = {"schema": event_schema(schema_of(chunk), DONE_WORD)}
    return found


def taken(body: type, example: dict[str, object]) -> dict[str, Any]:
    """Returns the `openapi_extra` of an endpoint that submits.

    Args:
        body: What it takes.
        example: One of those.
    """
    extra = takes(body)
    extra["requestBody"]["content"]["application/json"]["example"] = example
    extra["parameters"] = [
        {
            "name": name,
            "in": "header",
            "required": False,
            "description": text,
            "schema": schema,
        }
        for name, (text, schema) in _HEADERS.items()
    ]
    return extra
