"""The composition's commands and environments, run as processes on both servers.

What a person does after `docker compose up`: a key, a prompt over HTTP, jobs of a
backend, a bulk file; health checks and metrics are asked as Docker and Prometheus ask;
everything is stopped as `docker stop` does, and no role was ever refused anything.
"""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support import compose, composed_use
from support.composed import MODEL, Composition, composed
from support.plain_adapters import save_plain_adapter
from support.receiver import Received, receiving
from support.servers import SERVERS
from support.waiting import wait_until, wait_until_sync

from tokenmill import Client, Prompt, Sampling, SyncClient
from tokenmill.shared.errors import JobCancelled, JobFailed
from tokenmill.shared.webhooks import verify

PROCESSES = ("scheduler-1", "scheduler-2", "janitor", "worker")


@pytest.fixture(scope="module", params=SERVERS)
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Composition]:
    with composed(tmp_path_factory.mktemp("compose"), request.param) as made:
        for name in PROCESSES:
            made.services[name].start()
        gateway = made.services["gateway"]
        # `docker compose run --rm gateway tokenmill keys create …`
        for scopes in (["inference", "batch"], ["admin"]):
            words = [word for scope in scopes for word in ("--scope", scope)]
            done = gateway.run("keys", "create", "--tenant", "me", *words, "--json")
            assert done.returncode == 0, done.stderr
            made.keys[scopes[0]] = json.loads(done.stdout)["key"]
        gateway.start()
        made.wait_well(*PROCESSES, "gateway")
        yield made


@pytest.fixture(autouse=True)
def nothing_was_refused(whole: Composition) -> Iterator[None]:
    yield
    if whole.services["redis"].runs():
        assert whole.denied() == []


def call(whole: Composition, path: str, body: object = None) -> bytes:
    """One request to the gateway with the caller's key."""
    port = whole.services["gateway"].env["TOKENMILL_GATEWAY_PORT"]
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={
            "Authorization": f"Bearer {whole.keys['inference']}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read()


def test_a_prompt_over_http_streamed_and_not(whole):
    body = {"model": MODEL, "prompt": "to and fro", "max_tokens": 10}
    answer = json.loads(call(whole, "/v1/completions", body))
    assert answer["choices"][0]["text"] == "to and fro"
    events = call(whole, "/v1/completions", {**body, "stream": True}).decode()
    lines = [line[6:] for line in events.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    pieces = [json.loads(line)["choices"] for line in lines[:-1]]
    assert "".join(c["text"] for p in pieces for c in p) == "to and fro"


def test_nobody_gets_in_without_a_key(whole):
    key, whole.keys["inference"] = whole.keys["inference"], "tm-wrong"
    try:
        call(whole, "/v1/models")
        code = 200
    except urllib.error.HTTPError as error:
        with error:
            code = error.code
    finally:
        whole.keys["inference"] = key
    assert code == 401


def test_a_backend_s_jobs_stream_end_and_are_cancelled(whole):
    with SyncClient(whole.url("producer")) as mill:
        job = mill.submit(Prompt("there and back", model=MODEL))
        assert "".join(d.text for d in job.stream()) == "there and back"
        assert job.result(timeout=60).state == "succeeded"
        endless = Sampling(max_tokens=100_000, ignore_eos=True)
        job = mill.submit(Prompt("on and on", model=MODEL, sampling=endless))
        next(iter(job.stream()))
        job.cancel()
        with pytest.raises(JobCancelled):
            job.result(timeout=60)
        jobs = mill.submit_many(
            [Prompt(f"number {n}", model=MODEL, tenant=f"t{n % 3}") for n in range(20)]
        )
        texts = {done.result().text for done in mill.as_completed(jobs)}
        assert texts == {f"number {n}" for n in range(20)}


def test_a_dead_letter_is_seen_and_purged_by_a_producer(whole):
    with SyncClient(whole.url("producer")) as mill:
        job = mill.submit(Prompt("lost", model=MODEL, delay_s=3600))
        # What the poison of tests/faults does slowly: it is dead, and has a letter.
        with whole.admin() as admin:
            prefix = f"tm:{{{MODEL}:0}}:"
            letter = {"id": job.id, "reason": "lease_lost", "error": "{}"}
            admin.xadd(f"{prefix}dlq", letter)
        found = whole.services["gateway"].run(
            "dead", "list", "--json", "--url", whole.url("producer")
        )
        assert job.id in found.stdout, found.stderr
        done = whole.services["gateway"].run(
            "dead", "purge", "--all", "--url", whole.url("producer")
        )
        assert done.returncode == 0, done.stderr
        job.cancel()
        with pytest.raises((JobCancelled, JobFailed)):
            job.result(timeout=60)


def test_a_bulk_file_through_the_producer_s_role(whole, tmp_path):
    lines = [{"id": f"n{n}", "prompt": f"line {n}"} for n in range(12)]
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = whole.services["gateway"].run(
        *("bulk", "run", str(file), "-o", str(out), "--model", MODEL),
        *("--url", whole.url("producer")),
    )
    assert done.returncode == 0, done.stderr
    assert len(out.read_text("utf-8").splitlines()) == len(lines)


def test_an_adapter_is_registered_and_used_by_its_roles(whole, tmp_path):
    path = save_plain_adapter(tmp_path / "tone")
    with SyncClient(whole.url("scheduler")) as keeper:
        keeper.add_adapter("tone", path, model=MODEL)
        keeper.add_adapter("tone", path, model=MODEL, replace=True)
    listed = json.loads(call(whole, "/v1/models"))["data"]
    assert [one["id"] for one in listed] == [MODEL, f"{MODEL}:tone"]
    body = {"model": f"{MODEL}:tone", "prompt": "to and fro", "max_tokens": 16}
    answer = json.loads(call(whole, "/v1/completions", body))
    assert answer["choices"][0]["text"] == "tone: to and fro"
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text('{"id": 1, "prompt": "line"}')
    done = whole.services["gateway"].run(
        *("bulk", "run", str(file), "-o", str(out), "--model", f"{MODEL}:tone"),
        *("--tenant", "me", "--url", whole.url("producer")),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text("utf-8"))["text"] == "tone: line"
    with SyncClient(whole.url("scheduler")) as keeper:
        keeper.remove_adapter("tone", model=MODEL)


def test_every_operation_of_the_gateway_is_done_as_its_role(whole):
    """Files, batches, lists, pages, usage, dashboard, sessions: nothing is refused."""
    with composed_use.calling(whole) as callers:
        composed_use.use_files_and_batches(callers.user)
        jobs = composed_use.use_jobs(callers.user)
        composed_use.use_dashboard(callers, jobs)
        composed_use.use_dead_letters(whole, callers.admin)
        document = callers.user.get("/openapi.json")
        assert composed_use.uncalled(document, callers.all()) == set()
        composed_use.revoke_reader(whole)


async def _look(whole: Composition) -> None:
    async with Client(whole.url("producer")) as mill:
        assert (await mill.snapshot()).groups
        assert [model.name for model in await mill.models()] == [MODEL]
        assert await mill.jobs(limit=5)
        assert await mill.usage()
        await mill.history()


def test_a_producer_looks_at_the_pool(whole):
    asyncio.run(_look(whole))
    url = ("--url", whole.url("producer"))
    done = whole.services["gateway"].run("top", "--once", "--json", *url)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["snapshot"]["groups"]


async def _hooked(whole: Composition) -> list[Received]:
    async with receiving() as receiver:
        async with Client(whole.url("producer")) as mill:
            job = await mill.submit(Prompt("x", model=MODEL, webhook=receiver.url()))
            await job.result(timeout=60)
        async with Client(whole.url("janitor")) as keeper:

            async def is_delivered() -> bool:
                return bool(await keeper.webhooks(state="delivered"))

            await wait_until(is_delivered, what="a delivery")
            await keeper.redeliver([job.id])
        await wait_until(lambda: len(receiver.requests) == 2, what="another delivery")
        return receiver.requests


def test_a_webhook_is_delivered_and_signed(whole):
    secret = compose.passwords()["WEBHOOKS_SECRET"]
    got = asyncio.run(_hooked(whole))
    assert [verify(secret, one.headers, one.body) for one in got] == [True, True]


def test_prometheus_can_read_every_process(whole):
    seen = set()
    for name in (*PROCESSES, "gateway"):
        port = whole.services[name].metrics_port
        address = f"http://127.0.0.1:{port}/metrics"

        def scrape(address: str = address) -> str:
            try:
                with urllib.request.urlopen(address, timeout=10) as answer:
                    return answer.read().decode()
            except urllib.error.URLError:
                return ""

        text = wait_until_sync(scrape, what=f"metrics of {name}")
        families = {f.name for f in text_string_to_metric_families(str(text))}
        assert families, name
        seen |= families
    assert any("inference_requests" in name for name in seen), seen


def test_a_process_that_hangs_is_not_well(whole):
    worker = whole.services["worker"]
    done = worker.run("health", "worker", "--pid", "1")
    assert done.returncode == 1
    assert "no worker with process id 1" in done.stderr
    done = whole.services["gateway"].run("health", "gateway", "--pid", "1")
    assert done.returncode == 1
    assert "no gateway with process id 1" in done.stderr


def test_everything_stops_as_docker_stops_it(whole):
    """The last of this module: nothing runs afterwards."""
    order = ("gateway", "worker", "janitor", "scheduler-1", "scheduler-2")
    for name in order:
        assert whole.services[name].stop() == 0, (name, whole.services[name].text)
    assert whole.denied() == []
    for name in (*order,):
        text = whole.services[name].text
        assert "Traceback" not in text, text
        assert all(p not in text for p in whole.secrets()), name
    with whole.admin() as admin:
        assert admin.zrange("tm:processes", 0, -1) == []
    assert whole.services["redis"].stop() == 0
    files = Path(whole.directory / "data").rglob("*.aof")
    assert list(files)
