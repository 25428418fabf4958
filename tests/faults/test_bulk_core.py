"""A bulk run whose parts are all killed in its midst: each item settles once."""

import contextlib
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from support.pools import clean_environment
from support.servers import RedisServer
from support.waiting import wait_until, wait_until_sync

from tokenmill import Client
from tokenmill.shared.bulk.keys import new_run_id
from tokenmill.shared.bulk.messages import Document, Item, Outcome, RunSpec
from tokenmill.shared.bulk.store import RunStore
from tokenmill.shared.errors import RedisUnavailable
from tokenmill.shared.messages import Prompt, Sampling
from tokenmill.shared.redis import connect

MODEL = "echo"
ITEMS = 400
DOCUMENTS = 6
QUICK = {
    "TOKENMILL_SCHEDULER_LEADER_LEASE_MS": "1000",
    "TOKENMILL_WORKER_LEASE_MS": "1500",
    "TOKENMILL_BULK_MAX_OPEN_JOBS": "60",
}
TEXT = " ".join(f"Sentence number {number} of a document." for number in range(60))


class Process:
    """One command of the pool, which may be killed and started again."""

    def __init__(self, directory: Path, url: str, *words: str) -> None:
        self.words = words
        self.output = directory / f"{words[0]}.out"
        self._env = {**clean_environment(), **QUICK, "TOKENMILL_URL": url}
        self._directory = directory
        self.start()

    def start(self) -> None:
        with self.output.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tokenmill", *self.words],
                env=self._env,
                cwd=self._directory,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    always = ("--appendonly", "yes", "--appendfsync", "always")
    made = RedisServer("8.2", always)
    made.start()
    yield made
    made.remove()


@pytest.fixture
def parts(server: RedisServer, tmp_path: Path) -> Iterator[dict[str, Process]]:
    made = {
        "janitor": Process(tmp_path, server.url, "janitor"),
        "scheduler": Process(tmp_path, server.url, "schedule"),
        "worker": Process(
            tmp_path, server.url, "work", "--name", MODEL, "--engine", "echo:2"
        ),
    }
    worker = made["worker"].output
    try:
        wait_until_sync(lambda: "ready: " in worker.read_text())
        yield made
    except BaseException:
        for part in made.values():
            sys.stdout.write(f"--- {part.words[0]}\n{part.output.read_text()}\n")
        raise
    finally:
        for part in made.values():
            part.kill()


async def patiently(call: Callable[[], Awaitable[object]]) -> object:
    """As a driver does: a Redis that is away is waited for."""

    async def tried() -> object:
        with contextlib.suppress(RedisUnavailable):
            return (await call(),)
        return None

    (result,) = await wait_until(tried, every_s=0.1)  # type: ignore[misc]
    return result


async def test_every_part_is_killed_and_every_item_settles_once(
    server: RedisServer, parts: dict[str, Process]
):
    client = connect(server.url)
    requests = RunStore(client, new_run_id())
    documents = RunStore(client, new_run_id())
    await requests.create(RunSpec(kind="run"))
    spec = RunSpec(kind="summarize", model=MODEL, max_words=30, window_tokens=600)
    await documents.create(spec)
    await requests.feed([_item(seq) for seq in range(ITEMS)])
    await documents.feed(
        [Item(seq=seq, document=Document(TEXT)) for seq in range(DOCUMENTS)]
    )

    async def settled() -> int:
        view = await patiently(requests.view)
        return view.settled  # type: ignore[attr-defined, no-any-return]

    for share, name in enumerate(("janitor", "scheduler", "worker", "redis"), start=1):
        goal = ITEMS * share // 6

        async def reached(goal: int = goal) -> bool:
            return await settled() >= goal

        await wait_until(reached, every_s=0.05, what=f"{goal} outcomes")
        if name == "redis":
            server.kill()
            server.start()
            continue
        parts[name].kill()
        if name == "janitor":
            await _inference_goes_on(server.url)
        parts[name].start()

    async def done() -> bool:
        rest = await patiently(documents.view)
        return await settled() == ITEMS and rest.settled == DOCUMENTS  # type: ignore[attr-defined]

    await wait_until(done, every_s=0.1, what="every outcome")
    for store, number in ((requests, ITEMS), (documents, DOCUMENTS)):
        outcomes = await _outcomes(store)
        assert Counter(one.seq for one in outcomes) == Counter(range(number))
        assert {one.state for one in outcomes} == {"succeeded"}
    for one in await _outcomes(requests):
        assert one.result is not None
        assert one.result.text == f"prompt {one.seq}"
    await client.aclose()


async def _inference_goes_on(url: str) -> None:
    """A job that belongs to no run ends as ever."""
    async with Client(url) as mill:
        job = await mill.submit(Prompt("hello", model=MODEL))
        assert (await job.result(timeout=60)).text == "hello"


def _item(seq: int) -> Item:
    sampling = Sampling(max_tokens=32)
    return Item(seq=seq, prompt=Prompt(f"prompt {seq}", model=MODEL, sampling=sampling))


async def _outcomes(store: RunStore) -> list[Outcome]:
    return [one for _, one in await store.outcomes(count=10_000)]
