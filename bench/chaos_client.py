"""The client processes of bench/chaos.py, each with a journal in the run's directory.

    chaos_client.py produce WHICH DIRECTORY    submits every second job of the run
    chaos_client.py follow WHICH DIRECTORY     streams its share of the jobs
    chaos_client.py cancel 0 DIRECTORY         cancels those that are to be cancelled

A killed client is started again and goes on from its journal. `run.json` in the
directory has the seed, the number of jobs, their rate and the URL of each process.
"""

import asyncio
import json
import sys
import time
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from chaos_journal import Journal, Tail, lines
from chaos_model import MODEL
from chaos_plan import make_job, make_request

from tokenmill import Client, Delta, Prompt, Sampling
from tokenmill.shared.errors import JobFailed, RedisUnavailable
from tokenmill.shared.messages import JobClass

POLL_S = 0.05
WAVE = 50
"""Jobs come in waves, so that workers are full when they are hit."""
PRODUCERS = 2
"""The second one gives idempotency keys, and so may be killed at any moment."""


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Client]:
    """A client; a process that starts while Redis is away waits for it."""
    while True:
        mill = Client(url)
        try:
            await mill.open()
            break
        except RedisUnavailable:
            await asyncio.sleep(0.5)
    try:
        yield mill
    finally:
        await mill.close()


def make_prompt(seed: int, number: int, key: str | None) -> Prompt:
    """Job `number` as a prompt."""
    job = make_job(seed, number)
    text, options = make_request(job.variant)
    return Prompt(
        text,
        model=MODEL,
        sampling=Sampling(**options),
        job_class=JobClass.BULK if job.bulk else JobClass.INTERACTIVE,
        tenant=job.tenant,
        deadline_s=job.deadline_s,
        delay_s=job.delay_s,
        idempotency_key=key,
    )


async def produce(which: int, directory: Path, run: dict[str, Any]) -> None:
    """Submits jobs at an even rate; some with a key twice."""
    path = directory / f"producer-{which}.jsonl"
    done = {line["n"] for line in lines(path)}
    journal = Journal(path)
    async with connected(run["urls"][f"producer-{which}"]) as mill:
        for number in range(which, run["jobs"], PRODUCERS):
            if number in done:
                continue
            wave = number - number % WAVE
            due = run["began"] + wave / run["per_second"]
            await asyncio.sleep(max(due - time.time(), 0))
            key = f"job-{number}" if which else None
            prompt = make_prompt(run["seed"], number, key)
            at = time.time()
            job = await mill.submit(prompt, when_unserved="wait", when_full="wait")
            if key and number % 7 == 0:
                again = await mill.submit(prompt, when_unserved="wait")
                if again.id != job.id:
                    journal.write(n=number, error=f"a second job {again.id}")
            journal.write(n=number, id=job.id, at=at)


class Stream:
    """How far earlier incarnations of this subscriber came with one job.

    Only the journal of the past changes it: what this incarnation is given is written
    down as it comes, and judged afterwards.
    """

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self.over = False

    def restore(self, line: dict[str, Any]) -> None:
        """Takes a line of an earlier incarnation's journal."""
        if "end" in line:
            self.over = True
        elif "o" in line:
            self._seen[line["c"]] = line["o"] + len(line["i"])

    def first(self, width: int) -> int:
        """The first offset that some of so many choices lacks."""
        return min(self._seen.get(choice, 0) for choice in range(width))


def line_of(delta: Delta) -> dict[str, object]:
    """A delta as the journal has it."""
    return {
        "t": time.time(),
        "c": delta.choice,
        "o": delta.offset,
        "i": list(delta.token_ids),
        "x": delta.text,
        "f": None if delta.finish_reason is None else str(delta.finish_reason),
    }


class Follower:
    """Streams every job of its share, each in a task of its own."""

    def __init__(self, which: int, directory: Path, run: dict[str, Any]) -> None:
        self._run = run
        self._mine = {
            number
            for number in range(run["jobs"])
            if which in make_job(run["seed"], number).streamers
        }
        self._streams = {number: Stream() for number in self._mine}
        path = directory / f"subscriber-{which}.jsonl"
        for line in lines(path):
            if "n" in line:
                self._streams[line["n"]].restore(line)
        self._journal = Journal(path)
        self._journal.write(start=time.time())
        self._tails = [
            Tail(directory / f"producer-{n}.jsonl") for n in range(PRODUCERS)
        ]
        self._url = run["urls"][f"subscriber-{which}"]

    async def run(self) -> None:
        """Returns once every job of the share has ended and was read."""
        tasks: dict[int, asyncio.Task[None]] = {}
        async with connected(self._url) as mill:
            while len(tasks) < len(self._mine) or not all(
                task.done() for task in tasks.values()
            ):
                for line in [line for tail in self._tails for line in tail.new_lines()]:
                    number = line["n"]
                    if number in self._mine and "id" in line and number not in tasks:
                        follow = self._follow(mill, number, line["id"])
                        tasks[number] = asyncio.create_task(follow)
                await asyncio.sleep(POLL_S)

    async def _follow(self, mill: Client, number: int, job_id: str) -> None:
        stream = self._streams[number]
        if stream.over:
            return
        try:
            await self._to_the_end(mill, number, job_id, stream)
        except Exception:  # noqa: BLE001 - any of them is a breach, and is reported
            self._journal.write(n=number, error=traceback.format_exc())

    async def _to_the_end(
        self, mill: Client, number: int, job_id: str, stream: Stream
    ) -> None:
        job = mill.job(job_id)
        width = make_request(make_job(self._run["seed"], number).variant)[1].get("n", 1)
        first = stream.first(width)
        self._journal.write(n=number, resume=first)
        tokens = job.stream(from_offset=first)
        # How it ended stands in `tokens.end`, too, and is compared later.
        with suppress(JobFailed):
            async for delta in tokens:
                self._journal.write(n=number, **line_of(delta))
        assert tokens.end is not None
        try:
            result = await job.result(timeout=60)
            state, texts = result.state, [choice.text for choice in result.choices]
        except JobFailed as error:
            state, texts = error.code.removeprefix("job_"), []
        end = tokens.end.state
        self._journal.write(n=number, t=time.time(), end=end, result=state, texts=texts)


async def cancel(directory: Path, run: dict[str, Any]) -> None:
    """Cancels those jobs that are to be cancelled, each at its time."""
    journal = Journal(directory / "canceller.jsonl")
    tails = [Tail(directory / f"producer-{n}.jsonl") for n in range(PRODUCERS)]
    wanted = {
        number: job.cancel_s
        for number in range(run["jobs"])
        if (job := make_job(run["seed"], number)).cancel_s is not None
    }
    due: dict[int, tuple[float, str]] = {}
    async with connected(run["urls"]["canceller"]) as mill:
        while wanted or due:
            for line in [line for tail in tails for line in tail.new_lines()]:
                after_s = wanted.pop(line["n"], None) if "id" in line else None
                if after_s is not None:
                    due[line["n"]] = (time.time() + after_s, line["id"])
            for number in [n for n, (at, _) in due.items() if at <= time.time()]:
                job_id = due.pop(number)[1]
                answer = await mill.job(job_id).cancel()
                journal.write(n=number, id=job_id, answer=answer)
            await asyncio.sleep(POLL_S)


def main() -> None:
    """Runs the part that the first argument names."""
    kind, which, directory = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    run = json.loads((directory / "run.json").read_text())
    if kind == "produce":
        asyncio.run(produce(which, directory, run))
    elif kind == "follow":
        asyncio.run(Follower(which, directory, run).run())
    else:
        asyncio.run(cancel(directory, run))


if __name__ == "__main__":
    main()
