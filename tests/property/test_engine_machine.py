"""The engine short of memory: preemption, forks, cached prefixes and cancels, in any
order. The fake model's tokens depend on all that it reads through the block tables.
"""

import itertools
from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.engine_driver import Stream, drain, request
from support.fake_runner import FakeRunner

from tokenmill.shared.messages import JobClass
from tokenmill.workers.engine.detokenizer import TokenTable
from tokenmill.workers.engine.engine import Engine
from tokenmill.workers.engine.request import EngineRequest

TABLE = TokenTable.for_bytes()
PROMPTS = st.one_of(
    # Prompts that begin alike, and some that end within what they share.
    st.builds(
        lambda shared, own: list(range(20))[:shared] + own,
        st.integers(1, 20),
        st.lists(st.integers(0, 3), max_size=8),
    ),
    st.lists(st.integers(0, 95), min_size=1, max_size=12),
)


def alone(wanted: EngineRequest):
    """What a request gives in an engine with room for all, without sharing."""
    runner = FakeRunner(num_blocks=400, block_size=8, max_context=36)
    engine = Engine(runner, TABLE, prefix_cache=False)
    engine.add(wanted)
    return drain(engine).finished[wanted.id].choices


class EngineMachine(RuleBasedStateMachine):
    """Adds, steps and cancels; the books are checked after every step."""

    @initialize(
        blocks=st.sampled_from([9, 12, 20, 60]),
        chunk=st.sampled_from([1, 5, 64]),
        running=st.sampled_from([2, 4, 16]),
        prefix_cache=st.booleans(),
        memory=st.sampled_from([None, None, 3, 9]),
    )
    def make(self, blocks, chunk, running, prefix_cache, memory):
        self.runner = FakeRunner(num_blocks=blocks, block_size=4, max_context=36)
        self.runner.max_rows = memory
        self.engine = Engine(
            self.runner,
            TABLE,
            prefill_chunk=chunk,
            max_running=running,
            prefix_cache=prefix_cache,
            kv_overcommit=16.0,
            step_target_ms=0.0,
        )
        self.running = running
        self.engine._roster.preempt = self._checked(self.engine._roster.preempt)
        self.stream = Stream()
        self.sent: dict[str, EngineRequest] = {}
        self.dropped: set[str] = set()
        self.finished_after = defaultdict(int)

    @staticmethod
    def _checked(preempt):
        def checked(sequence, asking):
            assert asking.is_interactive or not sequence.is_interactive
            preempt(sequence, asking)

        return checked

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 14),
        n=st.sampled_from([1, 1, 2, 3]),
        temperature=st.sampled_from([0.0, 1.0]),
        logprobs=st.sampled_from([None, 1]),
        job_class=st.sampled_from(JobClass),
        salt=st.sampled_from(["", "other"]),
    )
    def add(self, prompt, max_tokens, n, temperature, logprobs, job_class, salt):
        base = request(
            str(len(self.sent)),
            prompt,
            max_tokens=max_tokens,
            n=n,
            temperature=temperature,
            logprobs=logprobs,
            ignore_eos=True,
        )
        wanted = EngineRequest(
            id=base.id,
            token_ids=base.token_ids,
            sampling=base.sampling,
            seed=base.seed,
            job_class=job_class,
            cache_salt=salt,
        )
        self.sent[wanted.id] = wanted
        self.engine.add(wanted)

    @rule(count=st.integers(1, 12))
    def step(self, count):
        for _ in range(count):
            before = self.engine.capacity().scheduled_tokens
            busy = self.engine.has_work
            self.stream.take(self.engine.step())
            self.engine.check_integrity()
            moved = self.engine.capacity().scheduled_tokens > before
            assert moved or not busy, "a step without progress"

    @rule(index=st.integers(0, 9))
    def cancel(self, index):
        gone = self.dropped | set(self.stream.finished)
        live = [name for name in self.sent if name not in gone]
        if live:
            name = live[index % len(live)]
            assert self.engine.cancel(name)
            self.dropped.add(name)
            self.engine.check_integrity()

    @invariant()
    def nobody_waits_behind_bulk(self):
        """Bulk runs beside a waiting interactive sequence only where, without all of
        it, there would be no room either.
        """
        if not hasattr(self, "engine"):
            return
        roster, kv = self.engine._roster, self.engine._kv
        roster.admit()
        first = next((one for one in roster.waiting if one.is_interactive), None)
        if first is None:
            return
        assert first is roster.waiting[0], "bulk stands before it"
        others = [one for one in roster.running if one.is_interactive]
        assert others, "an engine without interactive ones has room for the first"
        if len(others) == self.running:
            return
        held = {block for one in others for block in one.allocation.blocks}
        wanted = len(held) + kv.blocks_for(first.num_tokens)
        for one in (*others, first):
            ends_at = min(one.num_tokens + 2 * 4, one.max_tokens_held)
            wanted += kv.blocks_for(ends_at) - kv.blocks_for(one.num_tokens)
            if one is not first:
                wanted += kv.missing(one.allocation, one.num_tokens)
        assert wanted > kv.total_blocks

    @invariant()
    def numbers_agree(self):
        if not hasattr(self, "engine"):
            return
        room = self.engine.capacity()
        assert 0 <= room.used_tokens <= room.allocated_tokens
        assert room.cached_blocks <= room.free_blocks <= room.total_blocks
        assert room.prefix_tokens_hit <= room.prefix_tokens_asked

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        drain(self.engine, self.stream)
        finished = self.stream.finished
        assert finished.keys() == self.sent.keys() - self.dropped
        for name, one in finished.items():
            assert one.error is None
            assert one.choices == alone(self.sent[name])


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize("blocks", [9, 14, 30])
def test_bulk_goes_on_whenever_interactive_load_pauses(blocks):
    """Eight interactive requests are always here, more than there is room for; now and
    then none comes for some steps, as in a turn that the scheduler gives to bulk.
    """
    runner = FakeRunner(num_blocks=blocks, block_size=4, max_context=36)
    ticks = itertools.count()  # every step takes as long, on any machine
    engine = Engine(
        runner,
        TABLE,
        max_running=4,
        kv_overcommit=16.0,
        clock=lambda: next(ticks) / 1000,
    )
    bulk = {}
    for index in range(3):
        base = request(f"bulk{index}", range(index, 12), max_tokens=20, ignore_eos=True)
        bulk[base.id] = EngineRequest(
            id=base.id,
            token_ids=base.token_ids,
            sampling=base.sampling,
            seed=base.seed,
            job_class=JobClass.BULK,
        )
        engine.add(bulk[base.id])
    stream, came = Stream(), 0
    for step in range(1500):
        pauses = step % 100 >= 30
        while not pauses and engine.capacity().num_running < 11:
            prompt = [came % 90, 1, 2, 3, 4]
            engine.add(request(f"i{came}", prompt, max_tokens=9, ignore_eos=True))
            came += 1
        stream.take(engine.step())
        engine.check_integrity()
        if not bulk.keys() - stream.finished.keys():
            break
    assert bulk.keys() <= stream.finished.keys(), "bulk starves"
    for name, wanted in bulk.items():
        assert stream.finished[name].choices == alone(wanted)
