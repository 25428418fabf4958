"""Lines of a request file as prompts, and what is wrong with them."""

from typing import Any

import msgspec
import pytest

from tokenmill.producer.bulk.accepted import Accepted
from tokenmill.producer.bulk.answers import RequestForm
from tokenmill.producer.bulk.flow import Done, Fed, Refused
from tokenmill.producer.bulk.line_source import Parsed, job_error
from tokenmill.producer.bulk.requests import RequestReader, read_id
from tokenmill.shared.bulk.messages import Item, Outcome
from tokenmill.shared.errors import InvalidRequest, PromptTooLong
from tokenmill.shared.messages import (
    Choice,
    FinishReason,
    JobResult,
    ModelCard,
    PoolCard,
    Prompt,
    Usage,
)

CARD = ModelCard(
    model="m",
    max_context=512,
    vocab_size=100,
    tokenizer="bytes",
    has_chat_template=False,
    weights_version="w",
)
POOL = Accepted(PoolCard(max_payload_bytes=10_000), {"m": CARD, "chatty": None})
CHAT: dict[str, Any] = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "chatty", "messages": [{"role": "user", "content": "hi"}]},
}
COMPLETION = {
    **CHAT,
    "url": "/v1/completions",
    "body": {"model": "m", "prompt": "hi", "temperature": 0.5, "stop": "x"},
}


def read(line: object) -> Parsed:
    data = line if isinstance(line, bytes) else msgspec.json.encode(line)
    return RequestReader(POOL, "m").read(data)


def changed(line: dict[str, Any], **body: object) -> dict[str, Any]:
    return {**line, "body": {**line["body"], **body}}


def prompt_of(line: object) -> Prompt:
    parsed = read(line)
    assert isinstance(parsed.content, Prompt), parsed.error
    assert parsed.error is None
    return parsed.content


def test_openai_lines_are_what_the_endpoint_takes() -> None:
    completion = prompt_of(COMPLETION)
    assert (completion.text, completion.model) == ("hi", "m")
    assert completion.sampling.temperature == 0.5
    assert completion.sampling.stop == ("x",)
    assert completion.sampling.max_tokens == 16
    chat = prompt_of(CHAT)
    assert chat.messages is not None
    assert chat.messages[0].content == "hi"
    assert chat.sampling.max_tokens == 1024
    assert prompt_of({**COMPLETION, "note": "kept by its owner"}) == completion


def test_simple_lines_have_options() -> None:
    line = {"id": 5, "prompt": "hi", "options": {"max_tokens": 3, "top_k": 2}}
    prompt = prompt_of(line)
    assert (prompt.text, prompt.model) == ("hi", "m")
    assert (prompt.sampling.max_tokens, prompt.sampling.top_k) == (3, 2)
    assert (read(line).label, read(line).custom_id) == ("number", "5")
    messages = [{"role": "user", "content": "hi"}]
    other = {"id": "x", "messages": messages, "options": {"model": "chatty"}}
    assert prompt_of(other).messages is not None
    assert prompt_of({"id": "x", "prompt": "a", "options": None}).text == "a"


def test_what_may_be_an_id_is_said() -> None:
    with pytest.raises(
        InvalidRequest, match=r"characters or a whole number, found 1\.0"
    ):
        read_id(1.0)
    with pytest.raises(InvalidRequest, match=r"is missing.*or a whole number"):
        read_id(None)


WRONG: list[tuple[object, str, str | None]] = [
    (b"[1]", "line", None),
    (b'"text"', "line", None),
    (b'{"id": 1, "prompt": "a"', "line", None),
    (b'{"id": "\xff"}', "line", None),
    (b"[" * 100_000, "line", None),
    ({"prompt": "a"}, "id", None),
    ({"id": True, "prompt": "a"}, "id", None),
    ({"id": "", "prompt": "a"}, "id", None),
    ({"id": "x" * 600, "prompt": "a"}, "id", None),
    ({"id": 1.5, "prompt": "a"}, "id", None),
    ({"id": "a"}, "prompt", "a"),
    ({"id": "a", "prompt": "b", "messages": []}, "prompt", "a"),
    ({"id": "a", "prompt": ""}, "prompt", "a"),
    ({"id": "a", "prompt": "x" * 20_000}, "prompt", "a"),
    ({"id": "a", "prompt": "b", "max_tokens": 3}, "max_tokens", "a"),
    ({"id": "a", "prompt": "b", "options": [1]}, "options", "a"),
    ({"id": "a", "prompt": "b", "options": {"nope": 1}}, "options.nope", "a"),
    ({"id": "a", "prompt": "b", "options": {"n": 0}}, "options.n", "a"),
    ({"id": "a", "prompt": "b", "options": {"top_p": "x"}}, "options.top_p", "a"),
    (
        {"id": "a", "prompt": "b", "options": {"max_tokens": 999}},
        "options.max_tokens",
        "a",
    ),
    ({"id": "a", "prompt": "b", "options": {"model": "gone"}}, "options.model", "a"),
    ({"id": "a", "messages": [{"role": "x", "content": ""}]}, "messages[0].role", "a"),
    ({"id": "a", "messages": [{"role": "user", "content": "b"}]}, "messages", "a"),
    ({**CHAT, "custom_id": None}, "custom_id", None),
    ({**CHAT, "method": "GET"}, "method", "a"),
    ({**CHAT, "url": "/v1/embeddings"}, "url", "a"),
    ({**CHAT, "url": None}, "url", "a"),
    ({**CHAT, "body": "x"}, "body", "a"),
    ({"custom_id": "a"}, "method", "a"),
    (changed(CHAT, stream=True), "body.stream", "a"),
    (changed(CHAT, tools=[{}]), "body.tools", "a"),
    (
        changed(CHAT, response_format={"type": "json_object"}),
        "body.response_format",
        "a",
    ),
    (changed(CHAT, priority=3), "body.priority", "a"),
    (changed(CHAT, logprobs=True), "body.logprobs", "a"),
    (changed(COMPLETION, logprobs=0), "body.logprobs", "a"),
    (changed(COMPLETION, prompt=["a", "b"]), "body.prompt", "a"),
    (changed(COMPLETION, prompt=""), "body.prompt", "a"),
    (changed(COMPLETION, max_tokens=999), "body.max_tokens", "a"),
    (changed(COMPLETION, model="gone"), "body.model", "a"),
    (changed(COMPLETION, unheard_of=1), "body.unheard_of", "a"),
]


@pytest.mark.parametrize(("line", "field", "name"), WRONG)
def test_what_is_wrong_is_named(line: object, field: str, name: str | None) -> None:
    parsed = read(line)
    assert parsed.error is not None
    assert parsed.error.field == field
    assert parsed.custom_id == name
    assert str(parsed.error).startswith(f"{field}: ")


def test_who_can_spell_tokens_may_be_asked_for_logprobs() -> None:
    reader = RequestReader(POOL, "m", spells=True)
    line = msgspec.json.encode(changed(COMPLETION, logprobs=2))
    content = reader.read(line).content
    assert isinstance(content, Prompt)
    assert content.sampling.logprobs == 2


RESULT = JobResult(
    id="m.0.b" + "0" * 24,
    state="succeeded",
    model="m",
    choices=(
        Choice(index=0, text="hi", token_ids=(1,), finish_reason=FinishReason.LENGTH),
    ),
    usage=Usage(prompt_tokens=3, completion_tokens=1),
)


def line_of(label: str, **outcome: object) -> dict[str, Any]:
    item = Item(seq=4, custom_id="12", prompt=Prompt("a"))
    made = Outcome(seq=4, **{"state": "succeeded", "result": RESULT, **outcome})  # type: ignore[arg-type]
    settled = Done(fed=Fed(item=item, label=label, line=5), outcome=made)
    line = RequestForm("run0run0ab", now=lambda: 7.9)(settled)
    return msgspec.json.decode(line)


def test_answers_have_the_form_of_their_requests() -> None:
    assert line_of("number")["id"] == 12
    text = line_of("text")
    assert (text["id"], text["text"], text["finish_reason"]) == ("12", "hi", "length")
    assert text["usage"] == {"prompt_tokens": 3, "completion_tokens": 1}
    chat = line_of("chat")
    assert chat["id"] == "batch_req_run0run0ab-4"
    assert chat["custom_id"] == "12"
    assert chat["response"]["body"]["created"] == 7
    assert chat["response"]["body"]["choices"][0]["message"]["content"] == "hi"
    completion = line_of("completions")["response"]["body"]
    assert completion["choices"][0]["text"] == "hi"
    assert completion["usage"]["total_tokens"] == 4


def test_failures_have_the_form_of_their_requests() -> None:
    too_long = job_error(PromptTooLong("text", "has 9 tokens; expected 8"))
    failed = line_of("completions", state="failed", result=None, error=too_long)
    assert failed["response"]["status_code"] == 400
    assert failed["response"]["body"]["error"]["code"] == "prompt_too_long"
    assert failed["error"]["param"] == "prompt"
    assert failed["error"]["line"] == 5
    cancelled = line_of("chat", state="cancelled", result=None)
    assert cancelled["response"] is None
    assert cancelled["error"]["code"] == "cancelled"
    simple = line_of("text", state="failed", result=None, error=too_long)
    assert simple["error"]["field"] == "text"
    refused = Refused(seq=0, error=too_long, line=1)
    line = msgspec.json.decode(RequestForm("run0run0ab")(refused))
    assert (line["id"], line["error"]["line"]) == (None, 1)
