"""The producer's commands as a user runs them: output, exit codes, interrupts."""

import asyncio
import json
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
from support.fake_group import FakeGroup
from support.waiting import wait_until

from tokenmill.shared.redis import connect

SOURCE = Path(__file__).parents[2] / "src"
COMMAND = (
    "import typer; from tokenmill.producer.cli import register; "
    "app = typer.Typer(pretty_exceptions_enable=False); register(app); app()"
)


class Pool:
    """A served pool, and a way to run commands against it."""

    def __init__(self, url: str, group: FakeGroup) -> None:
        self.url = url
        self.group = group

    async def start(self, *args: str) -> asyncio.subprocess.Process:
        environ = {**os.environ, "PYTHONPATH": str(SOURCE), "TOKENMILL_URL": self.url}
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", COMMAND, *args),
            env=environ,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
        )

    async def run(self, *args: str, given: bytes = b"") -> tuple[int, str, str]:
        process = await self.start(*args)
        out, err = await process.communicate(given)
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()


@pytest.fixture
async def pool(newest_redis):
    connection = connect(newest_redis.url)
    await connection.flushall()
    async with FakeGroup(connection, delay_s=0.002) as group:
        yield Pool(newest_redis.url, group)
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
        (["submit", ""], b"", 4, "text: is empty"),
        (["submit", "-"], b"ab\xffc", 4, "byte 2 of standard input is 0xff"),
        (["submit", "x", "--temperature", "-1"], b"", 4, "temperature: -1.0"),
        (["submit", "x", "--logit-bias", "a"], b"", 4, "logit_bias: 'a'"),
        (["submit", "x", "--file", "y"], b"", 4, "expected one of them"),
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
    assert json.loads(err)["error"]["field"] == "top_p"


async def test_ends_other_than_success_have_codes(pool) -> None:
    def answer(request):
        raise ValueError("no luck")

    pool.group.answer = answer
    code, _, err = await pool.run("submit", "x")
    assert code == 9
    assert "no luck" in err
    await pool.group.pause()
    code, _, err = await pool.run("submit", "x", "--timeout", "0.2")
    assert code == 12
    assert "goes on" in err


@pytest.mark.parametrize("keep", [False, True])
async def test_ctrl_c_cancels_unless_told_to_keep(pool, keep) -> None:
    pool.group.delay_s = 0.02
    options = ["--keep"] if keep else []
    process = await pool.start("submit", "--stream", *options, "a " * 200)
    assert process.stdout is not None
    await process.stdout.readexactly(6)  # tokens are flushed one by one
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert process.returncode == 130
    scripts = pool.group.scripts
    members = await pool.group.redis.zrange(pool.group.keys.recent, 0, -1)
    job = members[0].decode()
    assert job in err.decode()

    async def ended():
        record = await scripts.job(job)
        return record["state"] == "cancelled"

    if keep:
        assert not await ended()
        assert "goes on" in err.decode()
    else:
        await wait_until(ended, what="the cancellation")
