"""The KV block pool and the manager over it."""

import pytest

from tokenmill.shared.errors import EngineError, KVPoolExhausted
from tokenmill.workers.engine.kv.blocks import BlockPool
from tokenmill.workers.engine.kv.manager import KVManager


def test_blocks_are_handed_out_once_and_come_back():
    pool = BlockPool(4)
    first, second = pool.take(1), pool.take(3)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert pool.num_free == 0
    pool.check_integrity([first, second])
    pool.release(second)
    assert pool.num_free == 3
    assert set(pool.take(3)) == set(second)


def test_taking_too_many_takes_nothing_and_names_both_numbers():
    pool = BlockPool(4)
    pool.take(2)
    with pytest.raises(KVPoolExhausted, match=r"3 KV blocks.* 2 of 4 are free"):
        pool.take(3)
    assert pool.num_free == 2


def test_a_shared_block_is_free_after_its_last_owner():
    pool = BlockPool(2)
    blocks = pool.take(1)
    pool.share(blocks)
    pool.check_integrity([blocks, blocks])
    pool.release(blocks)
    assert pool.num_free == 1
    pool.release(blocks)
    assert pool.num_free == 2


def test_double_release_and_sharing_of_free_blocks_are_refused():
    pool = BlockPool(2)
    blocks = pool.take(2)
    pool.release(blocks)
    with pytest.raises(EngineError, match="released twice"):
        pool.release(blocks)
    with pytest.raises(EngineError, match="cannot be shared"):
        pool.share(blocks)


@pytest.mark.parametrize(
    ("holdings", "message"),
    [
        ([], "0 held"),
        ([(0, 1), (1,)], "counts 1 references but has 2 owners"),
        ([(0, 1, 1)], "holds a KV block twice"),
        ([(0, 1), (2,)], "free and held at once"),
    ],
)
def test_integrity_check_finds_books_that_differ(holdings, message):
    pool = BlockPool(3)
    assert pool.take(2) == (0, 1)
    with pytest.raises(EngineError, match=message):
        pool.check_integrity(holdings)


def test_idle_blocks_are_taken_last_and_the_idlest_first():
    evicted = []
    pool = BlockPool(4, on_evict=evicted.append)
    old, new = pool.take(2), pool.take(1)
    pool.release(old, keep=old)
    pool.release(new, keep=new)
    pool.check_integrity([])
    assert (pool.num_free, pool.num_idle) == (4, 3)
    assert pool.take(1) == (3,)
    assert evicted == []
    # The end of a prefix is useless without its beginning, so it goes first.
    assert pool.take(3) == (old[1], old[0], new[0])
    assert evicted == [old[1], old[0], new[0]]


def test_sharing_an_idle_block_wakes_it():
    pool = BlockPool(2, on_evict=lambda _: pytest.fail("evicted"))
    blocks = pool.take(1)
    pool.release(blocks, keep=blocks)
    pool.share(blocks)
    pool.check_integrity([blocks])
    assert pool.num_free == 1
    with pytest.raises(KVPoolExhausted):
        pool.take(2)


def test_manager_counts_in_tokens_and_takes_blocks_as_they_are_needed():
    kv = KVManager(num_blocks=4, block_size=8)
    assert [kv.blocks_for(n) for n in (0, 1, 8, 9)] == [0, 1, 1, 2]
    allocation = kv.open()
    assert kv.missing(allocation, 17) == 3
    kv.grow(allocation, 9)
    assert (kv.free_blocks, kv.missing(allocation, 17)) == (2, 1)
    kv.grow(allocation, 17)
    assert (kv.free_blocks, kv.held_tokens) == (1, 24)
    assert [len(allocation.table(n)) for n in (1, 8, 9, 17)] == [1, 1, 2, 3]
    with pytest.raises(KVPoolExhausted):
        kv.grow(allocation, 33)
    kv.check_integrity([allocation])
    kv.release(allocation)
    kv.check_integrity([])
    assert kv.free_blocks == 4
