"""The KV manager and its block pool under any order of calls."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
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
    """Sequences of few tokens, so that many begin alike; a poor hash, so that unlike
    blocks often have one name.

    What stands in a block is tracked beside the manager. Whatever is served must hold
    exactly the tokens asked for, written under the same namespace.
    """

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.kv = None
        self.sequences = {}
        self.content: dict[int, list[tuple[object, tuple[int, ...]]]] = {}

    @initialize(keep_idle=st.booleans(), names=st.sampled_from([1, 3, 2**30]))
    def make(self, keep_idle, names):
        self.keep_idle = keep_idle
        self.kv = KVManager(
            NUM_BLOCKS,
            4,
            keep_idle=keep_idle,
            block_hash=lambda p, t: hash((p, t)) % names,
        )

    @rule(
        target=live,
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=40),
        namespace=st.sampled_from(["a", "b", None]),
    )
    def start(self, tokens, namespace):
        allocation = self.kv.open(namespace)
        free, cost = self.kv.free_blocks, self.kv.cost(namespace, tokens)
        computed = self.kv.reuse(allocation, tokens, 0)
        assert computed < len(tokens), "the last token must be computed"
        assert computed % 4 == 0
        self._check_served(allocation, tokens, computed)
        missing = self.kv.missing(allocation, len(tokens))
        assert free - self.kv.free_blocks + missing == cost
        if missing > self.kv.free_blocks:
            with pytest.raises(KVPoolExhausted):
                self.kv.grow(allocation, len(tokens))
            self.kv.release(allocation)
            return multiple()
        key = id(allocation)
        self.sequences[key] = [allocation, list(tokens), computed]
        return key

    def _check_served(self, allocation, tokens, computed):
        for index, block in enumerate(allocation.blocks[: computed // 4]):
            seen = (allocation.namespace, tuple(tokens[: 4 * index + 4]))
            assert self.content[block] == seen, "served a block of another content"

    @rule(key=live, count=st.integers(1, 12))
    def run(self, key, count):
        if key not in self.sequences:
            return
        allocation, tokens, computed = self.sequences[key]
        computed = self.kv.reuse(allocation, tokens, computed)
        end = min(len(tokens), computed + count)
        if self.kv.missing(allocation, end) <= self.kv.free_blocks:
            self.kv.grow(allocation, end)
            for position in range(computed, end):
                block = allocation.blocks[position // 4]
                shared = [
                    one
                    for one, _, _ in self.sequences.values()
                    if one is not allocation and block in one.blocks
                ]
                assert not shared, "wrote a block that others read"
                if position % 4 == 3:
                    seen = (allocation.namespace, tuple(tokens[: position + 1]))
                    self.content[block] = seen
                else:
                    self.content[block] = ("partial",)
            computed = end
            self.kv.commit(allocation, tokens, computed)
            self._check_served(allocation, tokens, computed)
        self.sequences[key][2] = computed
        if computed == len(tokens):
            tokens.append(len(tokens) % 2)

    @rule(key=consumes(live), keep=st.booleans())
    def end(self, key, keep):
        if key in self.sequences:
            allocation, _, _ = self.sequences.pop(key)
            self.kv.release(allocation, keep=keep)

    @invariant()
    def books_agree(self):
        if self.kv is None:
            return
        live = [allocation for allocation, _, _ in self.sequences.values()]
        self.kv.check_integrity(live)
        held = {block for allocation in live for block in allocation.blocks}
        assert self.kv.free_blocks == NUM_BLOCKS - len(held)
        assert self.keep_idle or self.kv.cached_blocks == 0


TestPool = PoolMachine.TestCase
TestManager = ManagerMachine.TestCase
TestPool.settings = TestManager.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
