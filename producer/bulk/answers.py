"""Lines of an output: what became of requests, in the form that they came in."""

import time
from collections.abc import Callable

import msgspec

from ...shared.errors import InvalidRequest, kind_of
from ...shared.messages import Choice, JobError, JobResult, Timings, Usage, encode
from ..openai_answers import (
    ChatCompletion,
    Completion,
    chat_answer,
    completion_answer,
    model_of,
)
from ..openai_form import Spell, param_of
from .flow import Done, Settled
from .requests import OPENAI


class LineFault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a line has no answer."""

    code: str
    message: str
    field: str | None = None
    line: int | None = None
    """Of the input, from 1."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the simple form: `text` and what goes with it, or `error`."""

    id: str | int | None
    text: str | None = None
    """Of the first choice."""
    finish_reason: str | None = None
    """Of the first choice."""
    choices: tuple[Choice, ...] = ()
    """All of them, with token ids and log probabilities, where more than one, or log
    probabilities, were asked for."""
    model: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    job: str | None = None
    error: LineFault | None = None


class OpenAIFault(msgspec.Struct, frozen=True, kw_only=True):
    """`error` of a line in OpenAI's form."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """What the endpoint would have answered to a wrong request."""

    error: dict[str, str | None]


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """What the endpoint would have answered."""

    status_code: int
    request_id: str
    body: ChatCompletion | Completion | Body


class OpenAILine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of OpenAI's batch output."""

    id: str
    custom_id: str | None
    response: Response | None
    error: OpenAIFault | None


class RequestForm:
    """Writes lines of request files.

    Args:
        run_id: The run; with the item's number it makes the line's id.
        spell: Bytes of a token id, for log probabilities in OpenAI's form.
        now: Unix time in seconds; replaced by tests.
    """

    def __init__(
        self,
        run_id: str,
        spell: Spell | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._run_id = run_id
        self._spell = spell
        self._now = now

    def __call__(self, settled: Settled) -> bytes:
        """Returns the line of a settled item."""
        if _label(settled) in OPENAI:
            return encode(self._openai(settled))
        return encode(_simple(settled))

    def _openai(self, settled: Settled) -> OpenAILine:
        name = f"{self._run_id}-{settled.seq}"
        result = result_of(settled)
        response: Response | None
        error: OpenAIFault | None = None
        if result is not None:
            response = Response(
                status_code=200,
                request_id=f"req-{name}",
                body=self._body(result, settled),
            )
        else:
            fault = fault_of(settled)
            param = None if fault.field is None else _param(fault.field)
            response = _refusal(fault, param, f"req-{name}")
            error = OpenAIFault(
                code=fault.code, message=fault.message, param=param, line=fault.line
            )
        return OpenAILine(
            id=f"batch_req_{name}",
            custom_id=_custom_id(settled),
            response=response,
            error=error,
        )

    def _body(self, result: JobResult, settled: Settled) -> ChatCompletion | Completion:
        created = int(self._now())
        if _label(settled) == "chat":
            return chat_answer(result, created=created, spell=self._spell)
        return completion_answer([result], created=created, spell=self._spell)


def result_of(settled: Settled) -> JobResult | None:
    """Returns the result of an item that succeeded."""
    if isinstance(settled, Done) and settled.outcome.state == "succeeded":
        return settled.outcome.result
    return None


def fault_of(settled: Settled) -> LineFault:
    """Returns why an item has no answer."""
    if isinstance(settled, Done):
        line, error = settled.fed.line, settled.outcome.error
        if error is None:
            state = settled.outcome.state
            error = JobError(state, f"the item ended as {state}")
    else:
        line, error = settled.line, settled.error
    return LineFault(
        code=error.code, message=error.message, field=error.field, line=line
    )


def _simple(settled: Settled) -> Answer:
    given = _custom_id(settled)
    id_: str | int | None = given
    if given is not None and _label(settled) == "number":
        id_ = int(given)
    result = result_of(settled)
    if result is None:
        return Answer(id=id_, error=fault_of(settled))
    first = result.choices[0] if result.choices else None
    has_more = len(result.choices) > 1 or (first and first.logprobs is not None)
    return Answer(
        id=id_,
        text=result.text,
        finish_reason=first.finish_reason.value if first else None,
        choices=result.choices if has_more else (),
        model=model_of(result),
        usage=result.usage,
        timings=result.timings,
        job=result.id,
    )


def _label(settled: Settled) -> str:
    return settled.fed.label if isinstance(settled, Done) else settled.label


def _custom_id(settled: Settled) -> str | None:
    if isinstance(settled, Done):
        return settled.fed.item.custom_id
    return settled.custom_id


def _param(field: str) -> str:
    return param_of(field.removeprefix("body."))


def _refusal(fault: LineFault, param: str | None, request_id: str) -> Response | None:
    """What the endpoint answers to such a request; None where it ran and failed."""
    kind = kind_of(fault.code)
    if kind is None or not issubclass(kind, InvalidRequest):
        return None
    words: dict[str, str | None] = {
        "message": fault.message,
        "type": "invalid_request_error",
        "param": param,
        "code": fault.code,
    }
    return Response(status_code=400, request_id=request_id, body=Body(error=words))
