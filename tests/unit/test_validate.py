"""Every limit, from both sides; every message names field, value and limit."""

import math
import tracemalloc

import msgspec
import pytest

from tokenmill.shared.errors import (
    InvalidRequest,
    NewerSchema,
    PayloadTooLarge,
    ProtocolError,
)
from tokenmill.shared.messages import (
    SCHEMA_VERSION,
    Delta,
    InputRef,
    JobRequest,
    JobResult,
    Message,
    ModelCard,
    PoolCard,
    Prompt,
    Sampling,
    encode,
)
from tokenmill.shared.typed import shown
from tokenmill.shared.validate import (
    check_payload,
    decode_prompt,
    decode_request,
    validate_prompt,
    validate_request,
)

CARD = ModelCard(
    model="m",
    max_context=2048,
    vocab_size=1000,
    tokenizer="bytes",
    has_chat_template=False,
    weights_version="1",
)
POOL = PoolCard()


def check(prompt: Prompt, card: ModelCard | None = CARD) -> None:
    validate_prompt(decode_prompt(prompt), card, POOL)


def sampling(**fields) -> Prompt:
    return Prompt("Hello", sampling=Sampling(**fields))


GOOD = [
    Prompt("Hello"),
    Prompt(" "),
    Prompt("grüße 👋"),
    sampling(max_tokens=1),
    sampling(max_tokens=2048, min_tokens=2048),
    sampling(temperature=5.0, top_p=1, top_k=1, min_p=1.0),
    sampling(repetition_penalty=10, presence_penalty=-2, frequency_penalty=2),
    sampling(seed=2**63 - 1, logprobs=20, n=16),
    sampling(seed=0, logprobs=0),
    sampling(stop=["x" * 256] * 16, stop_token_ids=[999] * 64),
    sampling(logit_bias=dict.fromkeys(range(1000), 100.0)),
    Prompt("x", job_class="bulk", tenant="a.b-c_d@e+f", priority=-100),
    Prompt("x", idempotency_key="~" * 200, deadline_s=0.5),
    Prompt("x", delay_s=10, deadline_s=20),
]

BAD = [
    ("text", "at least one", Prompt("")),
    ("text", "neither", Prompt()),
    ("text", "both", Prompt("x", messages=(Message("user", "y"),))),
    ("text", "surrogate", Prompt("ab\ud800c")),
    ("messages", "have no content", Prompt(messages=())),
    ("messages", "no chat template", Prompt(messages=(Message("user", "y"),))),
    ("model", "cannot be", Prompt("x", model="a b")),
    ("model", "cannot be", Prompt("x", model="")),
    (
        "sampling.max_tokens",
        "0 is out of range; expected 1 to 2048",
        sampling(max_tokens=0),
    ),
    ("sampling.max_tokens", "-5", sampling(max_tokens=-5)),
    ("sampling.max_tokens", "2049", sampling(max_tokens=2049)),
    ("sampling.min_tokens", "expected 0 to 3", sampling(max_tokens=3, min_tokens=4)),
    ("sampling.temperature", "-0.1", sampling(temperature=-0.1)),
    ("sampling.temperature", "at most 5.0", sampling(temperature=5.1)),
    ("sampling.temperature", "nan", sampling(temperature=math.nan)),
    ("sampling.top_p", "more than 0.0", sampling(top_p=0)),
    ("sampling.top_p", "at most 1.0", sampling(top_p=1.01)),
    ("sampling.top_k", "0", sampling(top_k=0)),
    ("sampling.min_p", "-1", sampling(min_p=-1)),
    ("sampling.repetition_penalty", "at least", sampling(repetition_penalty=0.009)),
    ("sampling.presence_penalty", "inf", sampling(presence_penalty=math.inf)),
    ("sampling.frequency_penalty", "-2.1", sampling(frequency_penalty=-2.1)),
    ("sampling.seed", "-1", sampling(seed=-1)),
    ("sampling.seed", str(2**63), sampling(seed=2**63)),
    ("sampling.logprobs", "expected 0 to 20", sampling(logprobs=21)),
    ("sampling.n", "expected 1 to 16", sampling(n=17)),
    ("sampling.stop", "17 strings; expected at most 16", sampling(stop=["x"] * 17)),
    ("sampling.stop[1]", "0 characters", sampling(stop=["x", ""])),
    ("sampling.stop[0]", "257 characters", sampling(stop=["x" * 257])),
    ("sampling.stop[0]", "surrogate", sampling(stop=["\udfff"])),
    ("sampling.stop_token_ids", "65 ids", sampling(stop_token_ids=[1] * 65)),
    ("sampling.stop_token_ids", "1000", sampling(stop_token_ids=[1000])),
    (
        "sampling.logit_bias",
        "1025 tokens",
        sampling(logit_bias=dict.fromkeys(range(1025), 1)),
    ),
    ("sampling.logit_bias", "-1", sampling(logit_bias={-1: 1})),
    ("sampling.logit_bias", "token 7", sampling(logit_bias={7: 101})),
    ("priority", "101", Prompt("x", priority=101)),
    ("tenant", "'a:b'", Prompt("x", tenant="a:b")),
    ("tenant", "''", Prompt("x", tenant="")),
    ("tenant", "owner of copies", Prompt("x", tenant="tokenmill.shadow")),
    ("tenant", "64 letters", Prompt("x", tenant="t" * 65)),
    ("idempotency_key", "blanks", Prompt("x", idempotency_key="a b")),
    ("idempotency_key", "200", Prompt("x", idempotency_key="k" * 201)),
    ("delay_s", "-1", Prompt("x", delay_s=-1)),
    ("deadline_s", "0", Prompt("x", deadline_s=0)),
    ("deadline_s", "more than the delay", Prompt("x", deadline_s=5, delay_s=5)),
    ("deadline_s", "nan", Prompt("x", deadline_s=math.nan)),
    # Wrong types, which the constructors let through.
    ("text", "got `int`; found 3", Prompt(3)),
    ("text", "got `bytes`", Prompt(b"abc")),
    ("sampling.max_tokens", "found '5'", sampling(max_tokens="5")),
    ("sampling.max_tokens", "found true", sampling(max_tokens=True)),
    ("sampling.max_tokens", "found 5.0", sampling(max_tokens=5.0)),
    ("sampling.temperature", "found None", sampling(temperature=None)),
    ("sampling.stop", "found 'abc'", sampling(stop="abc")),
    ("sampling", "null", Prompt("x", sampling=None)),
    ("job_class", "'soon'", Prompt("x", job_class="soon")),
    ("control_tokens", "'maybe'", Prompt("x", control_tokens="maybe")),
    ("messages[0].role", "'robot'", Prompt(messages=[{"role": "robot"}])),
    (
        "messages[1].content",
        "found 3",
        Prompt(messages=(Message("user", "a"), Message("user", 3))),
    ),
]


@pytest.mark.parametrize("prompt", GOOD)
def test_what_is_within_the_limits_passes(prompt: Prompt) -> None:
    check(prompt)


@pytest.mark.parametrize(("field", "words", "prompt"), BAD)
def test_an_error_names_field_value_and_limit(field, words, prompt) -> None:
    if words == "found None":
        words = "null"
    with pytest.raises(InvalidRequest) as caught:
        check(prompt)
    assert caught.value.field == field
    assert words in str(caught.value)
    assert len(str(caught.value)) < 500


def test_without_a_card_limits_of_the_model_are_left_to_the_scheduler() -> None:
    check(sampling(max_tokens=100_000, stop_token_ids=[40_000]), None)


def test_an_integer_of_any_size_is_an_error_and_no_crash() -> None:
    with pytest.raises(
        InvalidRequest, match=r"sampling\.seed: an integer of thousands"
    ):
        check(sampling(seed=10**6000))


def test_a_text_of_50_mb_is_refused_at_once() -> None:
    prompt = Prompt("x" * 50_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(PayloadTooLarge, match=r"50000000 bytes .* 4194304"):
            validate_prompt(prompt, None, POOL)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000, "it was encoded"
    finally:
        tracemalloc.stop()


def test_the_limit_of_bytes_counts_the_encoded_request() -> None:
    check_payload(b"x" * 10, 10)
    with pytest.raises(PayloadTooLarge, match="11 bytes"):
        check_payload(b"x" * 11, 10)


@pytest.mark.parametrize(
    ("raw", "field", "words"),
    [
        (b"", "request", "is empty"),
        (b" \n", "request", "is empty"),
        (b"{", "request", "not JSON"),
        (b"[1]", "request", "expected `object`"),
        (b'{"text": "\xff"}', "request", "UTF-8"),
        (b'{"text": "\\ud800"}', "request", "half of a character"),
        (b'{"text": "a", "sampling": {"top_q": 1}}', "sampling.top_q", "not a field"),
        (b'{"text": "a", "sampling": {"top_k": 1e999}}', "request", "not JSON"),
        (b'{"text": "a", "sampling": {"n": "1"}}', "sampling.n", "found '1'"),
        (b'{"text": ["a"]}', "text", "got `array`"),
    ],
)
def test_garbage_of_a_foreign_client_becomes_an_error(raw, field, words) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_request(raw)
    assert caught.value.field == field
    assert words in str(caught.value)


def test_a_request_survives_the_wire() -> None:
    request = JobRequest(
        text="a", sampling=Sampling(logit_bias={5: 1.5}, stop=("x",), top_k=3)
    )
    assert decode_request(encode(request)) == request
    validate_request(request, CARD)


def test_a_request_of_a_later_version_is_refused_by_name() -> None:
    following = SCHEMA_VERSION + 1
    # Its other fields are not looked at: their types are those of its version.
    with pytest.raises(NewerSchema, match=f"version {following}.*upgrade"):
        decode_request(b'{"v": %d, "text": {"new": "type"}}' % following)


@pytest.mark.parametrize("version", [0, -1, SCHEMA_VERSION + 2, 10**30])
def test_a_version_that_no_neighbour_can_have_is_no_record(version) -> None:
    with pytest.raises(ProtocolError, match=r"one version apart") as caught:
        decode_request(b'{"v": %d, "text": "a"}' % version)
    assert not isinstance(caught.value, NewerSchema)


def test_a_reference_must_be_stamped_with_its_version() -> None:
    ref = InputRef(name="t/x", size=1, sha256="x")
    assert decode_request(encode(JobRequest(v=2, text_ref=ref))).text_ref == ref
    with pytest.raises(InvalidRequest, match="has version 2, found 1"):
        decode_request(encode(JobRequest(text_ref=ref)))


def test_records_are_stamped_with_the_lowest_version_that_reads_them() -> None:
    assert JobRequest(text="a").v == 1
    result = JobResult(id="i", state="succeeded", model="m")
    assert (result.v, PoolCard().v, CARD.v) == (1, 1, 1)
    # A record without `v` is of the first version, whatever is the newest here.
    assert msgspec.json.decode(b'{"text":"a"}', type=JobRequest).v == 1


@pytest.mark.parametrize(
    "record",
    [
        JobRequest(text="a"),
        Delta(offset=3, token_ids=(1,), text="x"),
        JobResult(id="i", state="succeeded", model="m"),
        PoolCard(),
    ],
)
def test_records_of_a_newer_writer_are_read_without_its_new_fields(record) -> None:
    plain = msgspec.json.decode(encode(record))
    more = msgspec.json.encode({**plain, "since_three": {"deep": [1]}})
    assert msgspec.json.decode(more, type=type(record)) == record


def test_a_request_may_have_fields_of_a_later_version() -> None:
    assert decode_request(b'{"text": "a", "later": 1}').text == "a"


def test_scheduler_and_client_agree_on_the_limits() -> None:
    with pytest.raises(InvalidRequest, match=r"sampling\.temperature: 9\.0"):
        validate_request(JobRequest(text="a", sampling=Sampling(temperature=9.0)), CARD)


def test_a_prompt_may_come_as_json_or_as_a_mapping() -> None:
    expected = Prompt("a", sampling=Sampling(max_tokens=3, logit_bias={5: 1.0}))
    plain = {"text": "a", "sampling": {"max_tokens": 3, "logit_bias": {"5": 1}}}
    assert decode_prompt(plain) == expected
    assert decode_prompt(msgspec.json.encode(plain)) == expected


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (rb'{"text": "a\ud800b"}', "\\ud800 at byte 11, which is half of a character"),
        (rb'{"text": "\\\ud83d"}', "\\ud83d at byte 12"),
        (b'{"text": "a', "Input data was truncated"),
        (rb'{"text": "\\ud800', "Input data was truncated"),
        (b'{"text": "a", "control_tokens": "b"}', "not one of allow, as_text, refuse"),
        (b"[null]", "expected `object`, got `array`"),
    ],
)
def test_what_the_decoder_says_badly_is_said_well(source: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_prompt(source)
    assert words in str(caught.value)


def test_values_are_shown_as_json_has_them() -> None:
    assert [shown(value) for value in (None, True, "a", 1)] == [
        "null",
        "true",
        "'a'",
        "1",
    ]
