"""OpenAI's bodies become prompts, results become its answers; what is not supported is
refused by name.
"""

import msgspec
import pytest
from openai.types.chat import ChatCompletionMessage

from tokenmill.producer.openai_chunks import ChatChunks, CompletionChunks
from tokenmill.producer.openai_form import (
    CHAT_URL,
    COMPLETION_URL,
    answer,
    decode_body,
    job_id_of,
    param_of,
    prompts_of,
)
from tokenmill.producer.openai_logprobs import spelled
from tokenmill.shared.errors import InvalidRequest
from tokenmill.shared.messages import (
    Choice,
    Delta,
    FinishReason,
    JobClass,
    JobResult,
    Message,
    TokenLogprob,
    Usage,
)

USER = {"role": "user", "content": "hi"}
JOB = "m.0.0123456789abcdef"


def chat(**fields: object):
    return decode_body(CHAT_URL, {"model": "m", "messages": [USER], **fields})


def completion(**fields: object):
    return decode_body(COMPLETION_URL, {"model": "m", "prompt": "hi", **fields})


def refused(decode, **fields: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        decode(**fields)
    return raised.value


def to_json(struct: object) -> object:
    return msgspec.json.decode(msgspec.json.encode(struct))


# --- requests -------------------------------------------------------------------------
def test_a_chat_with_everything_becomes_a_prompt() -> None:
    (prompt,) = prompts_of(
        chat(
            n=2,
            max_completion_tokens=7,
            temperature=0.5,
            top_p=0.9,
            seed=3,
            stop="END",
            presence_penalty=1,
            frequency_penalty=-1,
            logit_bias={"5": -100},
            logprobs=True,
            top_logprobs=4,
            top_k=9,
            min_p=0.1,
            priority=-3,
            job_class="bulk",
            deadline_s=9,
            idempotency_key="k",
        )
    )
    sampling = prompt.sampling
    assert prompt.messages == (Message("user", "hi"),)
    assert (sampling.n, sampling.max_tokens, sampling.temperature) == (2, 7, 0.5)
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (0.9, 9, 0.1)
    assert (sampling.seed, sampling.stop, sampling.logprobs) == (3, ("END",), 4)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1)
    assert sampling.logit_bias == {5: -100}
    assert (prompt.priority, prompt.job_class) == (-3, JobClass.BULK)
    assert (prompt.deadline_s, prompt.idempotency_key) == (9, "k")


def test_defaults_are_those_of_openai() -> None:
    (prompt,) = prompts_of(completion())
    assert (prompt.sampling.max_tokens, prompt.sampling.temperature) == (16, 1.0)
    assert prompt.sampling.logprobs is None
    (prompt,) = prompts_of(chat(logprobs=False))
    assert prompt.sampling.logprobs is None
    (prompt,) = prompts_of(chat(logprobs=True))
    assert prompt.sampling.logprobs == 0


def test_a_limit_that_nobody_gave_stays_within_the_context() -> None:
    assert prompts_of(chat())[0].sampling.max_tokens == 1024
    assert prompts_of(chat(), 200)[0].sampling.max_tokens == 200
    assert prompts_of(chat(max_tokens=300), 200)[0].sampling.max_tokens == 300


def test_several_prompts_are_several_jobs() -> None:
    prompts = prompts_of(completion(prompt=["a", "b"], stop=["x", "y"]))
    assert [prompt.text for prompt in prompts] == ["a", "b"]
    assert prompts[1].sampling.stop == ("x", "y")


def test_text_parts_are_joined_and_a_developer_speaks_as_the_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": parts}, USER]
    (prompt,) = prompts_of(chat(messages=messages))
    assert prompt.messages == (Message("system", "a\nb"), Message("user", "hi"))


def test_null_and_what_asks_for_nothing_is_as_if_not_given() -> None:
    body = chat(
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        store=False,
        metadata={},
        service_tier="auto",
        temperature=None,
        stop=None,
        user="u",
        messages=[
            {"role": "assistant", "content": "x", "tool_calls": [], "name": None}
        ],
    )
    (prompt,) = prompts_of(body)
    assert prompt.sampling == prompts_of(chat())[0].sampling
    assert prompt.messages == (Message("assistant", "x"),)
    assert completion(echo=False, suffix="", best_of=1) == completion()
    assert completion(n=3, best_of=3) == completion(n=3)


def test_an_answer_is_taken_back_as_a_turn_of_the_conversation() -> None:
    """As `messages.append(answer.choices[0].message.model_dump())` does it."""
    answer = ChatCompletionMessage(role="assistant", content="x").model_dump()
    assert len(answer) > 2
    assert answer["annotations"] is None
    for turn in (answer, {**answer, "annotations": []}, {**answer, "reasoning": None}):
        (prompt,) = prompts_of(chat(messages=[USER, turn]))
        assert prompt.messages == (Message("user", "hi"), Message("assistant", "x"))


def test_what_clients_send_without_meaning_it_changes_nothing() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    cached = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    for fields in (
        {"foo": None, "bar": [], "baz": {}},
        {"parallel_tool_calls": False},
        {"tools": tools, "tool_choice": "none"},
        {"functions": [{"name": "f"}], "function_call": "none"},
        {"messages": [{**USER, "name": "bob"}]},
        {"messages": [{"role": "user", "content": [cached]}]},
    ):
        assert prompts_of(chat(**fields)) == prompts_of(chat()), fields


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "auto"),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "json_object"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy"}),
        ("prediction", {"type": "content", "content": "x"}),
        ("reasoning_effort", "high"),
        ("service_tier", "flex"),
        ("store", True),
        ("metadata", {"a": "b"}),
        ("web_search_options", {}),
        ("parallel_tool_calls", True),
    ],
)
def test_what_chats_do_not_support_is_refused_by_name(name: str, value: object) -> None:
    error = refused(chat, **{name: value})
    assert error.field == name
    assert "not supported" in error.problem


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("echo", True), ("suffix", "x"), ("best_of", 4)),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("response_format", {"type": "json_object"}),
    ],
)
def test_what_completions_do_not_support_is_refused_by_name(
    name: str, value: object
) -> None:
    error = refused(completion, **{name: value})
    assert error.field == name
    assert "not supported" in error.problem


@pytest.mark.parametrize(
    ("given", "kept"), [(-1, 2**63 - 1), (-(2**63), 0), (2**63 - 1, 2**63 - 1), (0, 0)]
)
def test_a_seed_may_be_negative(given: int, kept: int) -> None:
    for make in (chat, completion):
        (prompt,) = prompts_of(make(seed=given))
        assert prompt.sampling.seed == kept
    for wrong in (-(2**63) - 1, 2**63):
        assert refused(chat, seed=wrong).field == "seed"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, "messages[0].role"),
        ({"role": "function", "name": "f", "content": "x"}, "messages[0].role"),
        ({**USER, "nmae": "bob"}, "messages[0].nmae"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "more": 1}]},
            "messages[0].content[0].more",
        ),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls"),
        (
            {"role": "user", "content": [{"type": "image_url"}]},
            "messages[0].content",
        ),
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ("text", "messages[0]"),
    ],
)
def test_messages_that_cannot_be_understood_are_refused_by_place(
    message: object, field: str
) -> None:
    assert refused(chat, messages=[message]).field == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": [[1, 2]]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"temperature": 9}, "temperature"),
        ({"n": 0}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"no_such_field": False}, "no_such_field"),
        ({"deadline_s": -1}, "deadline_s"),
        ({"priority": 101}, "priority"),
        ({"job_class": "slow"}, "job_class"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, object], field: str) -> None:
    assert refused(completion, **fields).field == field


def test_fields_that_contradict_each_other_are_refused() -> None:
    assert refused(chat, top_logprobs=2).field == "top_logprobs"
    both = {"max_tokens": 1, "max_completion_tokens": 2}
    assert refused(chat, **both).field == "max_tokens"
    chat(max_tokens=2, max_completion_tokens=2)


@pytest.mark.parametrize("raw", [b"{", b"[]", b"\xff", b'"x"', b"[" * 100_000])
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    assert refused(decode_body, url=CHAT_URL, source=raw).field == "body"


def test_a_missing_field_is_named() -> None:
    error = refused(decode_body, url=CHAT_URL, source={"messages": [USER]})
    assert error.field == "model"
    assert error.problem == "is missing"


def test_a_line_of_a_batch_names_no_tenant() -> None:
    line = {"model": "m", "prompt": "x", "tenant": "other"}
    assert refused(decode_body, url=COMPLETION_URL, source=line).field == "tenant"


def test_another_endpoint_is_refused() -> None:
    assert refused(decode_body, url="/v1/embeddings", source={}).field == "url"


def test_names_of_fields_and_ids_go_both_ways() -> None:
    assert param_of("sampling.top_p") == "top_p"
    assert param_of("text") == "prompt"
    assert param_of("messages[0].content") == "messages[0].content"
    assert job_id_of(f"chatcmpl-{JOB}") == job_id_of(f"cmpl-{JOB}") == job_id_of(JOB)


# --- answers --------------------------------------------------------------------------
PIECES = {1: b"he", 2: b"llo", 3: b"\xe2\x82", 4: b"\xac"}
LOGPROBS = (TokenLogprob(-0.5, ((1, -0.5), (3, -2.0))), TokenLogprob(-1.0, ()))


def result(
    *texts: str, logprobs: tuple[TokenLogprob, ...] | None = None, prompt: int = 4
) -> JobResult:
    return JobResult(
        id=JOB,
        state="succeeded",
        model="m",
        choices=tuple(
            Choice(
                index=index,
                text=text,
                token_ids=(1, 2),
                finish_reason=FinishReason.LENGTH if index else FinishReason.STOP,
                logprobs=logprobs,
            )
            for index, text in enumerate(texts)
        ),
        usage=Usage(prompt_tokens=prompt, completion_tokens=2 * len(texts)),
        weights_version="w",
    )


def test_a_chat_is_answered_in_openais_form() -> None:
    found = answer(chat(), [result("hello", "you")], created=12)
    assert to_json(found) == {
        "id": f"chatcmpl-{JOB}",
        "object": "chat.completion",
        "created": 12,
        "model": "m",
        "system_fingerprint": "w",
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": reason,
            }
            for index, (text, reason) in enumerate(
                [("hello", "stop"), ("you", "length")]
            )
        ],
        "usage": {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8},
    }


def test_choices_of_several_prompts_are_numbered_through() -> None:
    body = completion(prompt=["a", "b"], n=2)
    found = answer(body, [result("a", "b"), result("c", "d", prompt=1)], created=0)
    assert [(c.index, c.text) for c in found.choices] == [*enumerate("abcd")]
    assert found.usage.total_tokens == 5 + 8


def test_log_probabilities_carry_the_text_of_tokens() -> None:
    done = result("hello", logprobs=LOGPROBS)
    found = to_json(answer(chat(), [done], created=0, spell=PIECES.__getitem__))
    first, second = found["choices"][0]["logprobs"]["content"]
    assert first == {
        "token": "he",
        "logprob": -0.5,
        "bytes": [0x68, 0x65],
        "top_logprobs": [
            {"token": "he", "logprob": -0.5, "bytes": [0x68, 0x65]},
            {"token": "bytes:\\xe2\\x82", "logprob": -2.0, "bytes": [0xE2, 0x82]},
        ],
    }
    assert (second["token"], second["top_logprobs"]) == ("llo", [])
    found = answer(completion(), [done], created=0, spell=PIECES.__getitem__)
    assert to_json(found.choices[0].logprobs) == {
        "tokens": ["he", "llo"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"he": -0.5, "bytes:\\xe2\\x82": -2.0}, {}],
        "text_offset": [0, 2],
    }


def test_a_token_that_is_part_of_a_character_is_spelled_in_bytes() -> None:
    assert spelled("€".encode()) == "€"
    assert spelled(b"\xe2\x82") == "bytes:\\xe2\\x82"


# --- chunks ---------------------------------------------------------------------------
DELTAS = [
    Delta(offset=0, token_ids=(1,), text="he"),
    Delta(offset=1, token_ids=(3,), text=""),
    Delta(offset=2, token_ids=(4,), text="€", finish_reason=FinishReason.STOP),
]


def chunks(body, deltas, **options):
    writer = ChatChunks(JOB, "m", created=1, version="w", **options)
    return [to_json(chunk) for delta in deltas for chunk in writer.of(delta)]


def test_a_streamed_chat_says_who_speaks_then_what_then_why_it_ended() -> None:
    found = chunks(chat(), DELTAS)
    assert [chunk["choices"][0]["delta"] for chunk in found] == [
        {"role": "assistant", "content": ""},
        {"content": "he"},
        {"content": "€"},
        {},
    ]
    assert [c["choices"][0]["finish_reason"] for c in found] == [
        None,
        None,
        None,
        "stop",
    ]
    assert {chunk["id"] for chunk in found} == {f"chatcmpl-{JOB}"}
    assert all("usage" not in chunk for chunk in found)


def test_chunks_before_the_count_say_that_it_is_to_come() -> None:
    found = chunks(chat(), DELTAS, with_usage=True)
    assert all(chunk["usage"] is None for chunk in found)


def test_a_streamed_completion_counts_offsets_over_its_chunks() -> None:
    writer = CompletionChunks(JOB, "m", created=1, spell=PIECES.__getitem__)
    one = (TokenLogprob(-1.0),)
    deltas = [msgspec.structs.replace(delta, logprobs=one) for delta in DELTAS]
    found = [c for delta in deltas for c in writer.of(delta, 2)]
    assert [c.choices[0].text for c in found] == ["he", "", "€"]
    assert {c.choices[0].index for c in found} == {2}
    offsets = [c.choices[0].logprobs.text_offset for c in found]
    assert offsets == [[0], [2], [2]]
    assert found[-1].choices[0].finish_reason == "stop"
