"""The KV manager and its block pool under any order of calls."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from tokenmill.shared.errors import EngineError, KVPoolExhausted
from tokenmill.workers.engine.kv.blocks import BlockPool
from tokenmill.workers.engine.kv.manager import KVManager

NUM_BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    """A model of the pool: a list of what each owner holds."""

    owners = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: list[tuple[int, ...]] = []

    @rule(target=owners, count=st.integers(0, NUM_BLOCKS + 2))
    def take(self, count):
        free = NUM_BLOCKS - len(set().union(*self.held))
        if count > free:
            with pytest.raises(KVPoolExhausted):
                self.pool.take(count)
            return multiple()
        blocks = self.pool.take(count)
        assert not set(blocks) & set().union(*self.held), "a block of somebody else"
        self.held.append(blocks)
        return blocks

    @rule(target=owners, blocks=owners)
    def share(self, blocks):
        self.pool.share(blocks)
        self.held.append(blocks)
        return blocks

    @rule(blocks=consumes(owners))
    def release(self, blocks):
        self.pool.release(blocks)
        self.held.remove(blocks)

    @rule()
    def free_blocks_cannot_be_released(self):
        free = set(range(NUM_BLOCKS)) - set().union(*self.held)
        for block in free:
            with pytest.raises(EngineError):
                self.pool.release((block,))

    @invariant()
    def books_agree(self):
        self.pool.check_integrity(self.held)
        assert self.pool.num_free == NUM_BLOCKS - len(set().union(*self.held))


class ManagerMachine(RuleBasedStateMachine):
    """Reservations in tokens: never more than there is, never a block twice."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVManager(NUM_BLOCKS, 4)
        self.allocations = {}

    @rule(target=live, tokens=st.integers(1, 60))
    def reserve(self, tokens):
        if not self.kv.fits(tokens):
            before = self.kv.free_blocks
            with pytest.raises(KVPoolExhausted):
                self.kv.reserve(tokens)
            assert self.kv.free_blocks == before
            return multiple()
        allocation = self.kv.reserve(tokens)
        self.allocations[id(allocation)] = (allocation, tokens)
        return allocation

    @rule(allocation=consumes(live))
    def release(self, allocation):
        self.kv.release(allocation)
        del self.allocations[id(allocation)]

    @invariant()
    def tables_cover_their_tokens_and_never_overlap(self):
        seen: set[int] = set()
        for allocation, tokens in self.allocations.values():
            table = allocation.table(tokens)
            assert len(table) == self.kv.blocks_for(tokens)
            assert not seen & set(table)
            seen |= set(table)
        assert self.kv.free_blocks == NUM_BLOCKS - len(seen)
        self.kv.check_integrity(a for a, _ in self.allocations.values())


TestPool = PoolMachine.TestCase
TestManager = ManagerMachine.TestCase
TestPool.settings = TestManager.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
