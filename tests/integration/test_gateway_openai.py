"""The official `openai` client, unmodified, against `tokenmill up --gateway`."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import redis.asyncio
from support.fake_group import card
from support.openai_clients import async_client, sync_client
from support.pools import MODEL, UpProcess, up
from support.served import gateway_config, served
from support.servers import RedisServer
from support.waiting import wait_until_sync
from tokenizers import Tokenizer, decoders, models

from tokenmill import Client
from tokenmill.producer.openai_form import job_id_of
from tokenmill.shared.errors import InvalidRequest, JobCancelled
from tokenmill.shared.keys import tokenizer_key
from tokenmill.shared.tokens import pack_tokenizer

WORDS = "the quick brown fox"
CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": WORDS}]
ECHOED = f"system: s\nuser: {WORDS}\nassistant: "
"""What the echo engine's chat template makes of it."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    directory = tmp_path_factory.mktemp("pool")
    with up(directory, "--gateway-port", "0", engine="echo:2") as running:
        yield running


@pytest.fixture(scope="module")
def base(pool: UpProcess) -> str:
    return pool.gateway


@pytest.fixture(scope="module")
def client(base: str) -> Iterator[openai.OpenAI]:
    with sync_client(base) as made:
        yield made


def test_up_prints_where_the_dashboard_is(pool: UpProcess, base: str) -> None:
    line = f"dashboard {base}/\n"
    assert wait_until_sync(lambda: line in pool.text, what="its address")


def test_a_killed_gateway_on_a_free_port_is_back_at_its_address(
    pool: UpProcess, base: str
) -> None:
    health = [sys.executable, "-m", "tokenmill", "health", "gateway"]
    asked = {"env": pool.env, "cwd": pool.directory, "capture_output": True}
    done = subprocess.run(health, **asked, text=True)
    assert done.returncode == 0, done.stderr  # it is not at the port of the settings
    (first,) = pool.pids("gateway")[-1:]
    psutil.Process(first).kill()

    def answers() -> bool:
        try:
            found = httpx.get(f"{base}/healthz", trust_env=False)
        except httpx.TransportError:
            return False
        return found.status_code == 200

    wait_until_sync(lambda: pool.pids("gateway")[-1] != first)
    wait_until_sync(answers, what="the gateway at its old address")
    assert subprocess.run(health, **asked).returncode == 0


# --- chat -----------------------------------------------------------------------------
def test_a_chat_is_answered(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(model=MODEL, messages=CHAT)
    assert found.choices[0].message.content == ECHOED
    assert found.choices[0].message.role == "assistant"
    assert found.choices[0].finish_reason == "stop"
    assert found.model == MODEL
    assert found.object == "chat.completion"
    size = len(ECHOED)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (size, size)
    assert found.usage.total_tokens == 2 * size
    assert found.system_fingerprint == "echo"


def test_a_chat_streams_with_its_usage_at_the_end(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=CHAT, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == ECHOED
    assert len(chunks) > 5
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(ECHOED)
    assert len({chunk.id for chunk in chunks}) == 1


def test_several_choices_of_a_stream_are_told_apart(client: openai.OpenAI) -> None:
    texts = {0: "", 1: "", 2: ""}
    ends = set()
    stream = client.chat.completions.create(
        model=MODEL, messages=CHAT, n=3, stream=True, max_tokens=9
    )
    for chunk in stream:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            ends.add((choice.index, choice.finish_reason))
    assert set(texts.values()) == {ECHOED[:9]}
    assert ends == {(0, "length"), (1, "length"), (2, "length")}


def test_the_clients_stream_helper_works(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=CHAT) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in events
    assert final.choices[0].message.content == ECHOED


# --- completions ----------------------------------------------------------------------
def test_a_completion_is_limited_as_openai_limits_it(client: openai.OpenAI) -> None:
    found = client.completions.create(model=MODEL, prompt="x" * 40)
    assert found.choices[0].text == "x" * 16
    assert found.choices[0].finish_reason == "length"
    assert found.object == "text_completion"


def test_prompts_times_choices_are_numbered_in_order(client: openai.OpenAI) -> None:
    found = client.completions.create(model=MODEL, prompt=["one", "two"], n=2)
    assert [(c.index, c.text) for c in found.choices] == [
        *enumerate(["one", "one", "two", "two"])
    ]
    assert found.usage.prompt_tokens == 6
    assert found.usage.completion_tokens == 12


def test_several_prompts_stream_together(client: openai.OpenAI) -> None:
    prompts = ["first prompt", "second", "third one"]
    texts = dict.fromkeys(range(3), "")
    usage = None
    for chunk in client.completions.create(
        model=MODEL,
        prompt=prompts,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == prompts
    assert usage.prompt_tokens == sum(map(len, prompts))


def test_ids_lead_to_the_jobs(client: openai.OpenAI, base: str) -> None:
    raw = client.completions.with_raw_response.create(model=MODEL, prompt="hi")
    found = raw.parse()
    job_id = job_id_of(found.id)
    assert raw.headers["x-tokenmill-job"] == job_id
    assert found._request_id == raw.headers["x-request-id"]
    job = client.get(f"/jobs/{found.id}", cast_to=object)
    assert job["id"] == job_id
    assert job["output"]["text"] == "hi"


# --- models ---------------------------------------------------------------------------
def test_models_are_listed_and_shown(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "tokenmill"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/none")


# --- how it is queued -----------------------------------------------------------------
def test_fields_and_headers_say_how_to_queue(client: openai.OpenAI) -> None:
    def job_of(**options: object) -> dict[str, object]:
        found = client.completions.create(model=MODEL, prompt="hi", **options)
        return client.get(f"/jobs/{found.id}", cast_to=object)

    by_field = job_of(extra_body={"priority": -7, "job_class": "bulk"})
    assert (by_field["priority"], by_field["job_class"]) == (-7, "bulk")
    headers = {
        "X-Tokenmill-Priority": "4",
        "X-Tokenmill-Class": "bulk",
        "X-Tokenmill-Deadline": "60",
        "X-Tokenmill-Tenant": "acme",
        "Idempotency-Key": "once",
    }
    first = job_of(extra_headers=headers, extra_body={"priority": 1})
    assert (first["priority"], first["job_class"]) == (4, "bulk")
    assert (first["tenant"], first["idempotency_key"]) == ("acme", "once")
    assert first["deadline_ms"] - first["enqueued_ms"] == 60_000
    assert job_of(extra_headers=headers)["id"] == first["id"]


# --- errors ---------------------------------------------------------------------------
def test_errors_are_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="none", messages=CHAT)
    assert missing.value.code == "model_not_found"
    assert missing.value.param == "model"

    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=CHAT, temperature=7)
    assert wrong.value.param == "temperature"
    assert wrong.value.type == "invalid_request_error"
    assert wrong.value.request_id.startswith("req-")

    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(model=MODEL, messages=CHAT, tools=tools)


def test_what_the_scheduler_finds_is_an_error_before_the_stream(
    client: openai.OpenAI,
) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        list(client.completions.create(model=MODEL, prompt="a<eos>", stream=True))
    assert wrong.value.param == "prompt"
    assert wrong.value.code == "control_tokens_in_text"
    # It speaks of the caller's field, and of no job.
    assert wrong.value.body["message"].startswith("prompt: ")
    assert "control_tokens_in_text" not in wrong.value.body["message"]
    assert "text:" not in wrong.value.body["message"]


def test_tokens_of_the_echo_engine_are_certain(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL, messages=CHAT, logprobs=True, top_logprobs=1, max_tokens=3
    )
    assert chat.choices[0].logprobs is not None
    told = chat.choices[0].logprobs.content
    assert [one.token for one in told] == list(ECHOED[:3])
    assert [(one.logprob, one.top_logprobs[0].token) for one in told] == [
        (0.0, token) for token in ECHOED[:3]
    ]
    streamed = client.completions.create(
        model=MODEL, prompt="abcd", logprobs=0, stream=True
    )
    tokens = [t for c in streamed for t in c.choices[0].logprobs.tokens]
    assert tokens == list("abcd")


def test_a_key_used_for_another_request_conflicts(client: openai.OpenAI) -> None:
    headers = {"Idempotency-Key": "conflict"}
    client.completions.create(model=MODEL, prompt="a", extra_headers=headers)
    with pytest.raises(openai.ConflictError):
        client.completions.create(model=MODEL, prompt="b", extra_headers=headers)


@pytest.mark.parametrize(
    ("first", "other"),
    [(["a", "b"], ["a"]), (["a"], ["a", "b"]), (["a", "b"], ["a", "c"])],
)
def test_a_key_holds_for_all_prompts_of_a_request(
    client: openai.OpenAI, first: list[str], other: list[str]
) -> None:
    headers = {"Idempotency-Key": f"{len(first)}-then-{'-'.join(other)}"}

    def asked(prompts: list[str]) -> str:
        return client.completions.create(
            model=MODEL, prompt=prompts, extra_headers=headers
        ).id

    made = asked(first)
    with pytest.raises(openai.ConflictError):
        asked(other)
    assert asked(first) == made


# --- asyncio --------------------------------------------------------------------------
async def test_the_asynchronous_client_does_all_of_it_at_once(base: str) -> None:
    async with async_client(base) as client:

        async def whole(index: int) -> str:
            found = await client.completions.create(
                model=MODEL, prompt=f"prompt {index}"
            )
            return found.choices[0].text

        async def streamed(index: int) -> str:
            stream = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": str(index)}],
                stream=True,
            )
            return "".join(
                [chunk.choices[0].delta.content or "" async for chunk in stream]
            )

        texts = await asyncio.gather(*map(whole, range(16)), *map(streamed, range(16)))
    assert texts[:16] == [f"prompt {index}" for index in range(16)]
    assert texts[16:] == [f"user: {index}\nassistant: " for index in range(16)]


async def test_leaving_a_stream_cancels_the_job_in_the_engine(
    base: str, pool: UpProcess
) -> None:
    async with async_client(base) as client:
        stream = await client.completions.create(
            model=MODEL,
            prompt="word " * 200,
            max_tokens=100_000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        first = await anext(stream)
        await stream.close()
    async with Client(pool.url) as mill:
        job = mill.job(job_id_of(first.id))
        with pytest.raises(JobCancelled):
            await job.result(60)
        # The engine has let go of it: a worker records what it had produced.
        assert 0 < job.outcome.usage.completion_tokens < 100_000


# --- text of tokens -------------------------------------------------------------------
async def test_tokens_are_spelled_by_what_workers_left_in_the_pool(
    newest_redis: RedisServer, tmp_path: Path
) -> None:
    vocabulary = {"Ġhi": 0, "âĤ": 1, "<|end|>": 2}
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<|end|>"])
    fingerprint, bundle = pack_tokenizer({"tokenizer.json": bpe.to_str().encode()})
    known, unknown, broken = (
        card(tokenizer=name) for name in (fingerprint, "f" * 32, "e" * 32)
    )
    async with redis.asyncio.Redis.from_url(newest_redis.url) as client:
        await client.set(tokenizer_key(fingerprint), bundle)
        await client.set(tokenizer_key("e" * 32), b"no bundle")
        async with served(gateway_config(tmp_path), newest_redis.url) as gateway:
            spell = await gateway.owner.token_texts.spell(known)
            assert [spell(i) for i in range(4)] == [
                b" hi",
                b"\xe2\x82",
                b"<|end|>",
                b"",
            ]
            spell = await gateway.owner.token_texts.spell(card())
            assert (spell(65), spell(256)) == (b"A", b"<eos>")
            for one in (unknown, broken):
                with pytest.raises(InvalidRequest, match="logprobs"):
                    await gateway.owner.token_texts.spell(one)
