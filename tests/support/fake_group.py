"""A scheduler and a worker group in one, without an engine: echoes words as tokens.

For tests of everything that talks to a pool. It uses the real scripts, so what a
client sees is what a real worker would have written.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import msgspec
import redis.asyncio

from tokenmill.shared.errors import InvalidRequest
from tokenmill.shared.keys import MODELS, POOL, SHARDS, Keys
from tokenmill.shared.messages import (
    CANCELLED,
    DEFAULT_MODEL,
    SCHEMA_VERSION,
    Choice,
    Delta,
    End,
    FinishReason,
    JobError,
    JobRequest,
    JobResult,
    ModelCard,
    PoolCard,
    Timings,
    Usage,
    encode,
)
from tokenmill.shared.script_types import (
    DispatchItem,
    EmitItem,
    FinishItem,
    GroupInfo,
    Started,
    StartItem,
)
from tokenmill.shared.scripts import Scripts

from .waiting import nap

LEASE_MS = 5000
BATCH = 200


def card(model: str = DEFAULT_MODEL, **changes: object) -> ModelCard:
    """A model card with a chat template and a small context."""
    values: dict[str, object] = {
        "model": model,
        "max_context": 8192,
        "vocab_size": 50_000,
        "tokenizer": "bytes",
        "has_chat_template": True,
        "weights_version": "fake-1",
        **changes,
    }
    return msgspec.convert(values, ModelCard)


def echo(request: JobRequest) -> list[str]:
    """Token texts: the prompt's words, at most `max_tokens` of them."""
    text = request.text or " ".join(m.content for m in request.messages or ())
    words = text.split(" ")
    pieces = [w if i == 0 else f" {w}" for i, w in enumerate(words)]
    return pieces[: request.sampling.max_tokens]


@dataclass
class _Run:
    """One job in progress."""

    job: Started
    request: JobRequest
    pieces: list[str]
    done: list[int]
    """Tokens published, by choice."""
    seq: int = 0
    cancelled: bool = False


@dataclass
class FakeGroup:
    """Serves one shard until the `async with` block is left.

    Args:
        redis: Replies as bytes.
        keys: The shard.
        delay_s: Time between two tokens of a job; 0 answers whole batches at once.
        answer: Request -> token texts, the same for every choice. A ValueError
            fails the job with its text as message, an InvalidRequest as it is.
        pool: Published as the pool's card.
    """

    redis: "redis.asyncio.Redis"
    keys: Keys = field(default_factory=lambda: Keys(DEFAULT_MODEL, 0))
    delay_s: float = 0.0
    answer: Callable[[JobRequest], list[str]] = echo
    pool: PoolCard = field(default_factory=lambda: PoolCard(models=(DEFAULT_MODEL,)))

    def __post_init__(self) -> None:
        self.name = f"w-{secrets.token_hex(6)}"
        self.scripts = Scripts(self.redis, self.keys)
        self.serving = asyncio.Event()
        self.serving.set()
        """Cleared by `pause`; set it to serve again."""
        self._turn = asyncio.Lock()
        self._beating = asyncio.Lock()
        self.emitting = asyncio.Event()
        self.emitting.set()
        """Clear it to hold running jobs between two tokens."""
        self.num_started = 0
        self.num_finished = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.publish()
        self._start(self._serve())
        self._start(self._beat())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.leave()
        await self.scripts.release_scheduler(self.name)

    async def publish(self) -> None:
        """Publishes what producers look for, and registers the group."""
        await self.redis.set(POOL, encode(self.pool))
        model = self.keys.model
        if not await self.redis.hexists(MODELS, model):
            await self.redis.hset(MODELS, model, encode(card(model)))
        await self.redis.sadd(SHARDS, self.keys.shard)
        await self.scripts.publish_sources()
        await self.scripts.register_group(self.name, self._info(), ttl_ms=60_000)

    async def pause(self) -> None:
        """From here on jobs stay in the queue, until `serving` is set."""
        self.serving.clear()
        async with self._turn:
            pass

    async def die(self) -> None:
        """Stops at once, as a killed process would: leases and credit stay."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def leave(self) -> None:
        """Stops and is taken off the list, on which its heartbeat would put it."""
        async with self._beating:  # one on its way may arrive after the farewell
            await self.die()
        await self.scripts.leave(self.name)

    def _info(self) -> GroupInfo:
        return GroupInfo(
            group=self.name,
            total_blocks=10_000_000,
            max_running=1_000_000,
            batch_tokens=1_000_000_000,
            block_size=8,
            max_context=8192,
            weights_version="fake-1",
            schema=SCHEMA_VERSION,
        )

    def _start(self, work) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        if self.delay_s:
            task.add_done_callback(self._tasks.discard)

    async def _beat(self) -> None:
        while True:
            async with self._beating:
                await self.scripts.heartbeat(self.name, self._info(), ttl_ms=60_000)
            await nap(2)

    async def _serve(self) -> None:
        while True:
            await self.serving.wait()
            async with self._turn:
                moved = await self._serve_once() if self.serving.is_set() else 0
            if not moved:
                await nap(0.002)

    async def _serve_once(self) -> int:
        fence = await self.scripts.acquire_scheduler(self.name, 60_000)
        moved = await self._dispatch(fence) if fence is not None else 0
        return moved + await self._take()

    async def _dispatch(self, fence: int) -> int:
        """Promises everything that waits to this group."""
        streams = [self.keys.resume]
        for member in await self.redis.zrange(self.keys.lanes, 0, -1):
            job_class, bucket, lane = member.decode().rsplit(":", 2)
            streams.append(self.keys.queue(job_class, bucket, int(lane)))
        count = 0
        for stream in streams:
            entries = await self.redis.xrange(stream, count=BATCH)
            items = [
                DispatchItem(
                    job_id=fields[b"id"].decode(),
                    tokens=int(fields[b"tokens"]),
                    token_ids=b"\x01\x00\x00\x00",
                    cost_blocks=1,
                    bucket="128",
                    entry_key=stream,
                    entry_id=entry_id.decode(),
                )
                for entry_id, fields in entries
            ]
            if items:
                await self.scripts.dispatch(
                    fence=fence,
                    group=self.name,
                    batch="b",
                    lease_ms=LEASE_MS,
                    items=items,
                )
            count += len(items)
        return count

    async def _take(self) -> int:
        entries = await self.redis.xrange(self.keys.work(self.name), count=BATCH)
        items = [
            StartItem(fields[b"id"].decode(), int(fields[b"epoch"]), entry_id.decode())
            for entry_id, fields in entries
        ]
        if not items:
            return 0
        started = await self.scripts.start(
            group=self.name, lease_ms=LEASE_MS, items=items
        )
        runs = []
        for job in started:
            if job.status != "started":
                continue
            self.num_started += 1
            try:
                runs.append(_run(job, self.answer))
            except ValueError as error:
                await self._fail(job, JobError("engine_error", str(error)))
            except InvalidRequest as error:
                recorded = JobError(error.code, str(error), error.field)
                await self._fail(job, recorded)
        if self.delay_s or not self.emitting.is_set():
            for run in runs:
                self._start(self._run_slowly(run))
        elif runs:
            await self._run_at_once(runs)
        return len(items)

    async def _run_at_once(self, runs: list[_Run]) -> None:
        items = []
        for run in runs:
            items += [
                _emit_item(run, _delta(run, choice, len(run.pieces)))
                for choice in range(len(run.done))
            ]
        await self.scripts.emit(group=self.name, items=items)
        await self.scripts.finish(
            group=self.name, items=[_finish_item(self.keys, run) for run in runs]
        )
        self.num_finished += len(runs)

    async def _run_slowly(self, run: _Run) -> None:
        while min(run.done) < len(run.pieces) and not run.cancelled:
            await self.emitting.wait()
            items = [
                _emit_item(run, _delta(run, choice, run.done[choice] + 1))
                for choice in range(len(run.done))
                if run.done[choice] < len(run.pieces)
            ]
            statuses = await self.scripts.emit(group=self.name, items=items)
            if "lost" in statuses:
                return
            run.cancelled = "cancelled" in statuses
            await nap(self.delay_s)
        await self.scripts.finish(group=self.name, items=[_finish_item(self.keys, run)])
        self.num_finished += 1

    async def _fail(self, job: Started, error: JobError) -> None:
        result = JobResult(
            id=job.job_id, state="failed", model=self.keys.model, error=error
        )
        await self.scripts.finish(
            group=self.name,
            items=[
                FinishItem(
                    job_id=job.job_id,
                    epoch=job.epoch,
                    seq=1,
                    state="failed",
                    result=encode(result),
                    end=encode(Delta(end=End(state="failed", error=error))),
                    error=error.message,
                )
            ],
        )


def _run(job: Started, answer: Callable[[JobRequest], list[str]]) -> _Run:
    """Continues after what an earlier epoch had published."""
    request = msgspec.json.decode(job.payload, type=JobRequest)
    done = [0] * request.sampling.n
    for raw in job.log:
        delta = msgspec.json.decode(raw, type=Delta)
        done[delta.choice] = delta.offset + len(delta.token_ids)
    return _Run(job, request, answer(request), done)


def _delta(run: _Run, choice: int, stop: int) -> Delta:
    start, run.done[choice] = run.done[choice], stop
    last = stop == len(run.pieces)
    return Delta(
        choice=choice,
        offset=start,
        token_ids=tuple(range(1000 + start, 1000 + stop)),
        text="".join(run.pieces[start:stop]),
        finish_reason=FinishReason.STOP if last else None,
    )


def _emit_item(run: _Run, delta: Delta) -> EmitItem:
    run.seq += 1
    return EmitItem(run.job.job_id, run.job.epoch, run.seq, encode(delta))


def _finish_item(keys: Keys, run: _Run) -> FinishItem:
    reason = FinishReason.CANCELLED if run.cancelled else FinishReason.STOP
    state = "cancelled" if run.cancelled else "succeeded"
    error = CANCELLED if run.cancelled else None
    choices = tuple(
        Choice(
            index=index,
            text="".join(run.pieces[:done]),
            token_ids=tuple(range(1000, 1000 + done)),
            finish_reason=reason,
        )
        for index, done in enumerate(run.done)
    )
    usage = Usage(prompt_tokens=1, completion_tokens=sum(run.done))
    result = JobResult(
        id=run.job.job_id,
        state=state,
        model=keys.model,
        choices=choices,
        usage=usage,
        timings=Timings(),
        error=error,
        weights_version="fake-1",
    )
    reasons = tuple(c.finish_reason for c in choices)
    end = Delta(end=End(state=state, finish_reasons=reasons, usage=usage, error=error))
    return FinishItem(
        job_id=run.job.job_id,
        epoch=run.job.epoch,
        seq=run.seq + 1,
        state=state,
        result=encode(result),
        end=encode(end),
        error=error.message if error else "",
    )
