"""The producer's commands as a user runs them: output and exit codes."""

import json
import os
import shlex
import signal

import pytest
from support.commands import CommandPool
from support.fake_group import FakeGroup, card

from tokenmill import __version__
from tokenmill.producer.pool_view import default_of
from tokenmill.shared.errors import PromptTooLong
from tokenmill.shared.keys import MODELS, Keys
from tokenmill.shared.messages import DEFAULT_MODEL, PoolCard, encode
from tokenmill.shared.redis import connect
from tokenmill.shared.scripts import Limits


@pytest.fixture
async def pool(newest_redis):
    connection = connect(newest_redis.url)
    await connection.flushall()
    async with FakeGroup(connection, delay_s=0.002) as group:
        yield CommandPool(newest_redis.url, group)
    await connection.aclose()


async def test_submit_prints_the_text(pool, tmp_path) -> None:
    assert await pool.run("submit", "hello world") == (0, "hello world\n", "")
    streamed = await pool.run("submit", "--stream", "hello world")
    assert streamed == (0, "hello world\n", "")
    piped = await pool.run("submit", given="grüße\n".encode())
    assert piped == (0, "grüße\n", "")
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"from a file\n")
    assert (await pool.run("submit", "--file", str(file)))[1] == "from a file\n"


async def test_the_only_model_of_a_pool_is_meant_where_none_is_named(
    newest_redis,
) -> None:
    connection = connect(newest_redis.url)
    await connection.flushall()
    # One that was served beside the only one of the settings changes nothing.
    await connection.hset(MODELS, "third", encode(card("third")))
    settings = PoolCard(models=("other",))
    async with FakeGroup(connection, Keys("other", 0), pool=settings) as group:
        pool = CommandPool(newest_redis.url, group)
        assert await pool.run("submit", "hello") == (0, "hello\n", "")
        code, _, err = await pool.run("submit", "hello", "--model", DEFAULT_MODEL)
        assert (code, "served now: other" in err) == (7, True)
    await connection.aclose()


@pytest.mark.parametrize(
    ("configured", "known", "meant"),
    [
        (("a",), ("a", "b"), "a"),
        ((), ("b",), "b"),
        ((), (), DEFAULT_MODEL),
        (("a", "b"), ("a",), DEFAULT_MODEL),
        ((), ("a", "b"), DEFAULT_MODEL),
    ],
)
def test_of_several_models_none_is_meant(configured, known, meant) -> None:
    assert default_of(PoolCard(models=configured), known) == meant


async def test_submit_as_json_is_one_object_a_line(pool) -> None:
    code, out, _ = await pool.run("submit", "a b c", "--stream", "--json", "--n", "2")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert set(lines[0]) == {"id", "duplicate"}
    assert len(lines) == 1 + 6 + 1
    assert lines[-1]["state"] == "succeeded"
    assert [c["text"] for c in lines[-1]["choices"]] == ["a b c"] * 2


async def test_every_option_reaches_the_worker(pool) -> None:
    seen = []
    pool.group.answer = lambda request: seen.append(request) or ["ok"]
    words = shlex.split(
        "--max-tokens 9 --min-tokens 1 --temperature 0.5 --top-p 0.9 --top-k 3 "
        "--min-p 0.1 --seed 7 --stop x --stop y --stop-id 5 --logprobs 2 --ignore-eos "
        "--repetition-penalty 1.5 --presence-penalty 0.1 --frequency-penalty 0.2 "
        "--logit-bias 3=-1.5 --class bulk --tenant t --priority -3 --deadline 60 "
        "--idempotency-key k --control-tokens allow --system brief"
    )
    code, _, err = await pool.run("submit", *words, "--", "-hello")
    assert (code, err) == (0, "")
    (request,) = seen
    assert [m.content for m in request.messages] == ["brief", "-hello"]
    assert request.control_tokens == "allow"
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.seed, sampling.logprobs) == (9, 7, 2)
    assert (sampling.stop, sampling.stop_token_ids) == (("x", "y"), (5,))
    assert sampling.logit_bias == {3: -1.5}
    assert sampling.ignore_eos


async def test_a_full_queue_and_a_late_job_have_codes_of_their_own(pool) -> None:
    group = pool.group
    await group.pause()
    await group.scripts.write_limits(Limits(max_waiting_jobs=1))
    time = ("--not-before", "2000-01-01T08:00:00Z")
    assert (await pool.run("submit", "first", "--no-wait", *time))[0] == 0
    for option in ((), ("--wait-for-room", "0.1")):
        code, _, err = await pool.run("submit", "x", "--no-wait", *option)
        assert (code, "max_waiting_jobs: 1 jobs wait" in err) == (6, True)
    await group.scripts.write_limits(Limits(service_ms=5000))
    late = ("--deadline", "2", "--refuse-late", "--no-wait")
    code, _, err = await pool.run("submit", "x", *late)
    assert (code, "done in about 5.0 s" in err, "in 2.0 s" in err) == (17, True, True)


async def test_jobs_show_tail_cancel_and_models(pool) -> None:
    code, out, _ = await pool.run("submit", "a b c", "--no-wait")
    job = out.strip()
    assert code == 0
    assert await pool.run("tail", job) == (0, "a b c\n", "")
    assert (await pool.run("tail", job, "--from", "1"))[1] == " b c\n"
    code, out, _ = await pool.run("show", job)
    assert code == 0
    assert "succeeded" in out
    assert "a b c" in out
    shown = json.loads((await pool.run("show", job, "--json"))[1])
    assert shown["job"]["id"] == shown["result"]["id"] == job
    assert job in (await pool.run("jobs"))[1]
    assert (await pool.run("jobs", "--state", "queued", "--json"))[1] == ""
    assert (await pool.run("cancel", job)) == (0, "succeeded\n", "")
    assert "smollm2-135m" in (await pool.run("models"))[1]


@pytest.mark.parametrize(
    ("args", "given", "code", "words"),
    [
        (["submit", ""], b"", 4, "is empty"),
        (["submit", "-"], b"ab\xffc", 4, "byte 2 of standard input is 0xff"),
        (["submit", "x", "--temperature", "-1"], b"", 4, "temperature: -1.0"),
        (["submit", "x", "--logit-bias", "a"], b"", 4, "logit_bias: 'a'"),
        (["submit", "x", "--file", "/dev/null"], b"", 4, "expected one of them"),
        (["submit", "x", "--file", "/no/such"], b"", 4, "/no/such: No such file"),
        (["submit", "x", "--timeout", "-1"], b"", 2, "-1.0 is not a time to wait"),
        (["submit", "x", "--timeout", "nan"], b"", 2, "nan is not a time to wait"),
        (["submit", "x", "--not-before", "noon"], b"", 4, "not_before"),
        (["submit", "x", "--not-before", "2030-01-01T08:00:00"], b"", 4, "time zone"),
        (["submit", "x", "--refuse-late"], b"", 4, "without a deadline"),
        (["submit", "x", "--wait-for-room", "nan"], b"", 2, "not a time to wait"),
        (["submit", "x", "--control-tokens", "bad"], b"", 2, "'as_text', 'allow'"),
        (["submit", "--file", "/no/such"], b"", 4, "No such file"),
        (["submit", "x", "--model", "other"], b"", 7, "not known to this pool"),
        (["show", "nonsense"], b"", 8, "cannot be a job id"),
        (["tail", f"smollm2-135m.0.{'0' * 31}"], b"", 8, "no record"),
        (["jobs", "--url", "redis://127.0.0.1:1/0"], b"", 3, "did not answer"),
        (["jobs", "--limit", "0"], b"", 2, "--limit"),
    ],
)
async def test_mistakes_are_told_with_a_code(pool, args, given, code, words) -> None:
    got, out, err = await pool.run(*args, given=given)
    assert (got, out) == (code, "")
    assert words in err
    assert "Traceback" not in err


async def test_errors_as_json(pool) -> None:
    code, _, err = await pool.run("submit", "x", "--top-p", "2", "--json")
    assert code == 4
    assert json.loads(err)["error"]["field"].endswith("top_p")


@pytest.mark.parametrize(
    ("args", "field", "words"),
    [
        (["jobs", "--json", "--limit", "0"], "--limit", "found '0'"),
        (["jobs", "--json", "--state", "odd"], "--state", "'odd'"),
        (["submit", "x", "--json", "--timeout", "-1"], "--timeout", "-1.0"),
        (["show", "--json"], "job", "JOB"),
        (["jobs", "--json", "--nothing"], "--nothing", "--nothing"),
        (["nothing", "--json"], None, "'nothing'"),
    ],
)
async def test_wrong_usage_is_json_where_json_is_asked_for(
    pool, args, field, words
) -> None:
    code, out, err = await pool.run(*args)
    assert (code, out) == (2, "")
    error = json.loads(err)["error"]
    assert error["code"] == "usage"
    assert error["field"] == field
    assert words in error["message"]


@pytest.mark.parametrize("mode", [[], ["--stream"]])
async def test_the_result_of_a_failed_job_comes_before_its_error(pool, mode) -> None:
    def answer(request):
        raise PromptTooLong("text", "9000 tokens; the context has 8192")

    pool.group.answer = answer
    code, out, err = await pool.run("submit", "x", "--json", *mode)
    result = json.loads(out.splitlines()[-1])
    assert (code, result["state"]) == (4, "failed")
    assert result["error"]["code"] == "prompt_too_long"
    error = json.loads(err)["error"]
    assert (error["code"], error["field"]) == ("prompt_too_long", "text")
    code, out, err = await pool.run("tail", result["id"], "--json")
    assert code == 4
    assert json.loads(out.splitlines()[-1]) == result
    assert json.loads(err)["error"] == error


@pytest.mark.parametrize("args", [["submit", "x"], ["--version"], ["jobs"]])
async def test_output_that_cannot_be_written_is_no_bug(pool, args) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    process = await pool.start(*args, stdout=full)
    os.close(full)
    _, err = await process.communicate()
    assert process.returncode == 74
    assert "standard output cannot be written: No space left" in err.decode()


async def test_the_version_is_told(pool) -> None:
    assert await pool.run("--version") == (0, f"tokenmill {__version__}\n", "")


async def test_help_may_be_cut_short(pool) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        process = await pool.start("-h", stdout=pipe)
        _, err = await process.communicate()
    assert process.returncode in (-signal.SIGPIPE, 0)
    assert err == b""


async def test_ends_other_than_success_have_codes(pool) -> None:
    def answer(request):
        raise ValueError("no luck")

    pool.group.answer = answer
    code, _, err = await pool.run("submit", "x")
    assert code == 15
    assert "no luck" in err
    await pool.group.pause()
    code, _, err = await pool.run("submit", "x", "--timeout", "0.2")
    assert code == 12
    assert "goes on" in err
