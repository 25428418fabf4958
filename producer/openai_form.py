"""OpenAI's form of requests and answers, as pure mappings to and from ours.

The gateway serves them over HTTP and bulk runs read them from files; both take the
same bodies and refuse the same fields.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ..shared.errors import InvalidRequest
from ..shared.messages import JobResult
from .openai_answers import (
    CHAT_ID,
    COMPLETION_ID,
    ChatCompletion,
    Completion,
    chat_answer,
    completion_answer,
)
from .openai_logprobs import Spell as Spell
from .openai_requests import Body as Body
from .openai_requests import (
    ChatBody,
    CompletionBody,
    decode_chat,
    decode_completion,
)
from .openai_requests import prompts_of as prompts_of

CHAT_URL: Final = "/v1/chat/completions"
COMPLETION_URL: Final = "/v1/completions"
ENDPOINTS: Final[Mapping[str, Callable[[bytes | Mapping[str, object]], Body]]] = {
    CHAT_URL: decode_chat,
    COMPLETION_URL: decode_completion,
}
"""Path of an endpoint -> what reads its bodies."""
_NAMES: Final = {"text": "prompt"}


def decode_body(url: str, source: bytes | Mapping[str, object]) -> Body:
    """Reads the body of a line of a batch.

    Args:
        url: Path of the endpoint, as a line of a batch names it.
        source: JSON, or what it says.

    Raises:
        InvalidRequest: No such endpoint, or a field is wrong or not supported; it is
            named.
    """
    decode = ENDPOINTS.get(url)
    if decode is None:
        raise InvalidRequest(
            "url", f"'{url[:80]}' is not one of {', '.join(ENDPOINTS)}"
        )
    body = decode(source)
    if body.tenant is not None:
        raise InvalidRequest(
            "tenant", "is that of the batch; leave it out of its lines"
        )
    return body


def answer(
    body: Body,
    results: Sequence[JobResult],
    *,
    created: int,
    spell: Spell | None = None,
) -> ChatCompletion | Completion:
    """Returns the answer to a request.

    Args:
        body: The request.
        results: Of its jobs, in the order of `prompts_of`; all succeeded.
        created: When it was asked for, as Unix time in seconds.
        spell: Bytes of a token id; None leaves log probabilities out.
    """
    if isinstance(body, ChatBody):
        return chat_answer(results[0], created=created, spell=spell)
    assert isinstance(body, CompletionBody)
    return completion_answer(results, created=created, spell=spell)


def param_of(field: str) -> str:
    """Returns OpenAI's name for a field of a prompt.

    Args:
        field: As `sampling.top_p`, which is `top_p`.
    """
    return _NAMES.get(field, field.removeprefix("sampling."))


def job_id_of(text: str) -> str:
    """Returns the job's id in the id of an answer; any other text as it is.

    Args:
        text: As `chatcmpl-<job id>`.
    """
    for prefix in (CHAT_ID, COMPLETION_ID):
        if text.startswith(prefix):
            return text.removeprefix(prefix)
    return text
