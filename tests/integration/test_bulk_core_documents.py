"""Runs of documents: windows, a summary of each, and summaries of summaries."""

import threading
from typing import Any

import pytest
import redis.asyncio
from support.bulk_jobs import MODEL, Jobs, place, settled
from support.waiting import wait_until

from tokenmill.scheduler.bulk import documents, plans
from tokenmill.scheduler.bulk.advance import advance
from tokenmill.scheduler.bulk.documents import Documents
from tokenmill.scheduler.bulk.pool import BulkPool
from tokenmill.scheduler.bulk.sentences import sentences
from tokenmill.scheduler.bulk.sweeping import sweep
from tokenmill.shared.bulk.keys import new_run_id
from tokenmill.shared.bulk.messages import Document, Item, Outcome, RunSpec, Span
from tokenmill.shared.bulk.store import RunStore
from tokenmill.shared.config import BulkConfig, Config
from tokenmill.shared.keys import MODELS
from tokenmill.shared.messages import FinishReason, JobError, JobRequest

pytest_plugins = "support.bulk_core_fixtures"

CONFIG = Config(bulk=BulkConfig(max_open_jobs=8, keep_s=60))
TEXT = "\n\n".join(
    " ".join(f"Sentence {i}.{j} says what number {i * 10 + j} is." for j in range(6))
    for i in range(24)
)
SPEC = RunSpec(
    kind="summarize",
    model=MODEL,
    max_words=8,
    window_tokens=512,
    overlap_tokens=64,
    style="Be brief.",
    keep_tree=True,
)


class Run:
    """One run, moved on by hand."""

    def __init__(self, client: "redis.asyncio.Redis", jobs: Jobs) -> None:
        self.store = RunStore(client, new_run_id(), keep_ms=60_000)
        self.pool = BulkPool(client, CONFIG)
        self.jobs = jobs

    async def begin(self, spec: RunSpec, *texts: str, title: str = "A title") -> None:
        await self.feed(spec, *texts, title=title)
        await self.advance()

    async def feed(self, spec: RunSpec, *texts: str, title: str = "A title") -> None:
        await self.store.create(spec)
        items = [
            Item(seq=seq, custom_id=f"d{seq}", document=Document(text, title))
            for seq, text in enumerate(texts)
        ]
        await self.store.feed(items)

    async def advance(self) -> float | None:
        """A pass, and others while documents are divided."""
        again_s: float | None = documents.BUSY_S
        while again_s in (0.0, documents.BUSY_S):
            again_s = await self.once()
        return again_s

    async def once(self) -> float | None:
        return await advance(self.pool, self.store.run_id)

    async def end_all(self, **options: object) -> int:
        """Ends every waiting job as its number."""
        ids = await self.jobs.waiting()
        for job_id in ids:
            text = options.get("text", f"Part {place(job_id).node} ends.")
            rest = {k: v for k, v in options.items() if k != "text"}
            await self.jobs.end(job_id, text, **rest)  # type: ignore[arg-type]
        await self.pool.writes(self.store.run_id).mark_ended(ids)
        await self.advance()
        return len(ids)

    async def finish(self, **options: object) -> Outcome:
        while await self.end_all(**options):
            pass
        [outcome] = await settled(self.store, 1)
        return outcome


@pytest.fixture
def run(client: "redis.asyncio.Redis", jobs: Jobs) -> Run:
    return Run(client, jobs)


async def test_a_long_document_becomes_one_summary_over_levels(run: Run, jobs: Jobs):
    await run.begin(SPEC, TEXT)
    first = [await jobs.request(job_id) for job_id in await jobs.wait_for(8)]
    outcome = await run.finish()
    summary = outcome.summary
    assert (outcome.state, outcome.custom_id) == ("succeeded", "d0")
    assert summary is not None
    assert summary.text.startswith("Part ")
    assert summary.words <= 8
    assert summary.windows > 8, "more than may be open at once"
    assert summary.levels > 1
    assert summary.tree is not None
    levels = [node.level for node in summary.tree]
    assert levels == sorted(levels)
    assert levels.count(levels[-1]) == 1
    leaves = [node for node in summary.tree if node.level == 0]
    assert all(node.tokens <= 512 for node in summary.tree)
    for one in sentences(TEXT):
        holds = [
            n
            for n in leaves
            if n.spans[0].start <= one.start <= one.end <= n.spans[0].end
        ]
        assert holds, TEXT[one.start : one.end]
    assert summary.tree[-1].spans == (Span(0, len(TEXT)),)
    assert outcome.usage.prompt_tokens == 10 * len(summary.tree)
    assert len(outcome.job_ids) == len(summary.tree)
    view = await run.store.view()
    assert view.windows == view.jobs == len(summary.tree)
    assert view.completion_tokens == 4 * len(summary.tree)
    await _check_prompts(first, summary.windows)


async def _check_prompts(requests: list[JobRequest], _windows: int) -> None:
    heads = {request.messages[0] for request in requests if request.messages}
    assert len(heads) == 1, "the instruction has the same bytes for every window"
    [head] = heads
    assert head.role == "system"
    assert "Be brief." in head.content
    assert "A title" not in head.content
    for request in requests:
        assert request.messages is not None
        assert request.messages[1].content.startswith(
            'Title: A title\n\n"""\nSentence '
        )
        assert request.control_tokens == "as_text"


async def test_a_document_of_one_window_takes_one_job(run: Run, jobs: Jobs):
    await run.begin(SPEC, "Short text. It has two sentences.")
    [job_id] = await jobs.wait_for(1)
    request = await jobs.request(job_id)
    assert request.messages is not None
    assert "at most 8 words" in request.messages[0].content
    outcome = await run.finish(
        text="One two three. Four five six. Seven eight nine ten."
    )
    assert outcome.summary is not None
    assert outcome.summary.text == "One two three. Four five six."
    assert (outcome.summary.words, outcome.summary.levels) == (6, 1)


async def test_an_empty_summary_falls_back_to_key_sentences(run: Run):
    await run.begin(SPEC, TEXT)
    outcome = await run.finish(text=" \n ")
    assert outcome.summary is not None
    assert outcome.summary.text.strip()
    assert outcome.summary.words <= 8
    assert outcome.summary.fell_back[0] == "0:0: the model's summary was empty"
    view = await run.store.view()
    assert view.fell_back == len(outcome.summary.fell_back) == view.jobs


async def test_a_summary_that_was_cut_off_ends_with_a_sentence(run: Run):
    await run.begin(SPEC, "Short text. It has two sentences.")
    text = "Three words here. And an unfini"
    outcome = await run.finish(text=text, reason=FinishReason.LENGTH)
    assert outcome.summary is not None
    assert outcome.summary.text == "Three words here."


async def test_a_window_that_fails_fails_its_document_alone(run: Run, jobs: Jobs):
    await run.begin(SPEC, TEXT, "Another document.")
    ids = await jobs.wait_for(8)
    broken = ids[3]
    await jobs.end(broken, error=JobError("engine_error", "it broke"))
    await run.pool.writes(run.store.run_id).mark_ended([broken])
    await run.advance()
    [outcome] = await settled(run.store, 1)
    assert (outcome.seq, outcome.state) == (0, "failed")
    assert outcome.error is not None
    assert outcome.error.code == "engine_error"
    assert outcome.error.message.startswith("window 4 of ")
    assert "it broke" in outcome.error.message
    [other] = await jobs.wait_for(1)
    assert place(other).seq == 1, "the windows of the failed one are cancelled"


async def test_extractive_needs_no_model_and_no_job(
    run: Run, jobs: Jobs, client: "redis.asyncio.Redis"
):
    await client.delete(MODELS)
    spec = RunSpec(kind="summarize", model=MODEL, mode="extractive", max_words=30)
    await run.begin(spec, TEXT)
    [outcome] = await settled(run.store, 1)
    assert outcome.summary is not None
    assert outcome.summary.mode == "extractive"
    assert 0 < outcome.summary.words <= 30
    assert await jobs.waiting() == []


async def test_a_document_without_text_fails_by_itself(run: Run):
    await run.begin(SPEC, " \n\t ")
    [outcome] = await settled(run.store, 1)
    assert outcome.state == "failed"
    assert outcome.error is not None
    assert outcome.error.field == "text"


async def test_windows_shrink_to_the_models_context(
    client: "redis.asyncio.Redis",
):
    small = Jobs(client, context=600)
    await small.publish()
    run = Run(client, small)
    await run.begin(SPEC, TEXT)
    for job_id in await small.waiting():
        request = await small.request(job_id)
        assert request.messages is not None
        text = "".join(f"{m.role}: {m.content}\n" for m in request.messages)
        assert len(text) + len("assistant: ") + request.sampling.max_tokens <= 600


async def test_a_context_that_holds_no_window_is_said(client: "redis.asyncio.Redis"):
    tiny = Jobs(client, context=200)
    await tiny.publish()
    run = Run(client, tiny)
    await run.begin(SPEC, TEXT)
    [outcome] = await settled(run.store, 1)
    assert outcome.error is not None
    assert outcome.error.code == "prompt_too_long"


async def test_a_run_waits_for_its_model(
    run: Run, jobs: Jobs, client: "redis.asyncio.Redis"
):
    await client.delete(MODELS)
    await run.begin(SPEC, "Short text.")
    assert await run.advance() == 2.0
    await jobs.publish()
    await _refresh(run.pool)
    await run.advance()
    assert len(await jobs.waiting()) == 1


async def _refresh(pool: BulkPool) -> None:
    pool._cards.clear()


async def test_lost_jobs_of_every_level_are_sent_again_as_they_were(
    run: Run, jobs: Jobs
):
    await run.begin(SPEC, TEXT)
    requests: dict[str, JobRequest] = {}
    seen_levels: set[int] = set()
    for _ in range(200):
        ids = await jobs.waiting()
        if not ids:
            break
        for job_id in ids:
            asked = await jobs.request(job_id)
            assert requests.setdefault(job_id, asked) == asked
        level = place(ids[0]).level
        if level not in seen_levels:
            seen_levels.add(level)
            await jobs.lose(ids[0])
            await sweep(run.pool)
            await run.advance()
            assert await jobs.waiting() == ids
            assert await jobs.request(ids[0]) == requests[ids[0]]
        await run.end_all()
    [outcome] = await settled(run.store, 1)
    assert outcome.state == "succeeded"
    assert len(seen_levels) > 1


async def test_a_document_that_another_janitor_has_opened_goes_on(run: Run, jobs: Jobs):
    """This one had read that it is ready before."""
    await run.begin(SPEC, "Short text.", "Another one.")
    ids = await jobs.wait_for(2)
    late = Documents(run.pool, run.pool.writes(run.store.run_id), SPEC)
    assert (await late.start([0, 1], 8)).moved == 0
    assert await run.store.outcomes() == []
    assert await jobs.waiting() == ids


async def test_a_document_that_cannot_be_sent_again_fails_alone(
    run: Run, jobs: Jobs, client: "redis.asyncio.Redis"
):
    await run.begin(SPEC, "Short text.", "Another one.")
    ids = await jobs.wait_for(2)
    await client.hset(run.store.keys.item(0), "plan:0", "no level")
    for job_id in ids:
        await jobs.lose(job_id)
    await sweep(run.pool)
    await run.advance()
    [outcome] = await settled(run.store, 1)
    assert (outcome.seq, outcome.state) == (0, "failed")
    assert outcome.error is not None
    assert outcome.error.code == "protocol_error"
    assert await jobs.wait_for(1) == [ids[1]]


async def test_a_fault_at_one_document_does_not_stop_the_others(
    run: Run, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
):
    def divided(spec: RunSpec, title: str, text: str, *rest: Any) -> plans.Level:
        if "Bad" in text:
            raise ValueError("a fault of ours")
        return plans.first_level(spec, title, text, *rest)

    monkeypatch.setattr(documents, "first_level", divided)
    await run.begin(SPEC, "Bad text.", "Short text.")
    [outcome] = await settled(run.store, 1)
    assert outcome.seq == 0
    assert outcome.error is not None
    assert outcome.error.code == "internal_error"
    assert "ValueError" in outcome.error.message
    assert len(await jobs.wait_for(1)) == 1


async def test_a_long_division_goes_on_while_its_run_does(
    run: Run, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
):
    """Nobody waits it out, and it is done once."""
    let_go, done = threading.Event(), []

    def divided(spec: RunSpec, title: str, text: str, *rest: Any) -> plans.Level:
        if "Long" in text:
            assert let_go.wait(60)
            done.append(text)
        return plans.first_level(spec, title, text, *rest)

    monkeypatch.setattr(documents, "first_level", divided)
    monkeypatch.setattr(documents, "WORK_S", 0.02)
    await run.feed(SPEC, "Short text.", "Long text.")

    async def short() -> list[str]:
        assert await run.once() == documents.BUSY_S
        return await jobs.waiting()

    ids = await wait_until(short)
    await jobs.end(ids[0])
    await run.pool.writes(run.store.run_id).mark_ended(ids)
    await run.once()
    assert (await run.store.view()).jobs == 1, "what has ended is recorded meanwhile"
    let_go.set()

    async def opened() -> bool:
        await run.once()
        return any(place(job_id).seq == 1 for job_id in await jobs.waiting())

    await wait_until(opened)
    assert len(done) == 1


async def test_cancelling_settles_documents_in_all_stages(run: Run, jobs: Jobs):
    await run.begin(SPEC, TEXT, "Short text.", "Another one.")
    await jobs.wait_for(8)
    await run.store.cancel()
    while (await run.store.view()).state != "cancelled":
        await run.advance()
    outcomes = await settled(run.store, 3)
    assert {one.state for one in outcomes} == {"cancelled"}
    assert await jobs.waiting() == []


async def test_an_item_that_is_damaged_in_redis_fails_alone(
    run: Run, jobs: Jobs, client: "redis.asyncio.Redis"
):
    await run.store.create(SPEC)
    items = [Item(seq=seq, document=Document("Short text.")) for seq in range(3)]
    await run.store.feed(items)
    await client.hset(run.store.keys.item(0), "item", b"\xff{")
    await run.advance()
    second, third = await jobs.wait_for(2)
    await client.hset(run.store.keys.item(1), "plan:0", "no level")
    for job_id in (second, third):
        await jobs.end(job_id, "A summary.")
    await run.pool.writes(run.store.run_id).mark_ended([second, third])
    await run.advance()
    outcomes = await settled(run.store, 3)
    assert [one.state for one in outcomes] == ["failed", "failed", "succeeded"]
    assert outcomes[1].error is not None
    assert outcomes[1].error.code == "protocol_error"
