"""Cached prefixes: found by hash, served by content alone."""

import pytest

from tokenmill.workers.engine.kv.manager import KVManager
from tokenmill.workers.engine.kv.prefix_cache import PrefixCache


def filled(kv: KVManager, tokens, namespace="n"):
    """An allocation in which all of `tokens` have been computed."""
    allocation = kv.open(namespace)
    computed = kv.reuse(allocation, tokens, 0)
    kv.grow(allocation, len(tokens))
    kv.commit(allocation, tokens, len(tokens))
    return allocation, computed


def test_what_was_computed_is_found_again_save_the_last_token():
    kv = KVManager(10, 4)
    first, computed = filled(kv, range(12))
    assert computed == 0
    blocks = list(first.blocks)
    kv.release(first)
    assert (kv.free_blocks, kv.cached_blocks) == (10, 3)
    again, computed = filled(kv, range(12))
    # The third block is full too, and recomputed: logits of its last token are wanted.
    assert computed == 8
    # What was recomputed is equal, so the older block is used and the newer free.
    assert again.blocks == blocks
    assert (kv.free_blocks, kv.cached_blocks) == (7, 0)
    kv.check_integrity([again])


def test_a_longer_prompt_shares_the_blocks_of_one_that_runs():
    kv = KVManager(10, 4)
    first, _ = filled(kv, range(10))
    assert kv.cost("n", range(14)) == 4 - 2
    second, computed = filled(kv, range(14))
    assert computed == 8
    assert second.blocks[:2] == first.blocks[:2]
    assert set(second.blocks[2:]).isdisjoint(first.blocks)
    kv.check_integrity([first, second])
    kv.release(first)
    kv.check_integrity([second])


@pytest.mark.parametrize("other", ["m", None])
def test_another_namespace_shares_nothing(other):
    kv = KVManager(10, 4)
    filled(kv, range(12))
    assert kv.cost(other, range(12)) == 3
    assert filled(kv, range(12), other)[1] == 0


def test_colliding_hashes_serve_nothing_wrong():
    """All blocks have one name; tokens, parents and namespaces tell them apart."""
    kv = KVManager(40, 2, block_hash=lambda *_: 7)
    live = [
        filled(kv, [1, 2, 3, 4, 5], "a")[0],
        filled(kv, [3, 4, 1, 2, 5], "a")[0],  # the same blocks in another order
        filled(kv, [1, 2, 9, 9, 5], "a")[0],
        filled(kv, [1, 2, 3, 4, 5], "b")[0],
    ]
    kv.check_integrity(live)
    assert live[2].blocks[0] == live[0].blocks[0]
    for tokens, namespace, hit in [
        ([1, 2, 3, 4, 0], "a", 4),
        ([3, 4, 3, 4, 0], "a", 2),
        ([9, 9, 3, 4, 0], "a", 0),
        ([1, 2, 9, 9, 0], "b", 2),
        ([3, 4, 1, 2, 0], "b", 0),
    ]:
        allocation = kv.open(namespace)
        assert kv.reuse(allocation, tokens, 0) == hit
        kv.release(allocation)
    assert kv.reuse(kv.open("c"), [1, 2, 3], 0) == 0


def test_the_least_recently_used_prefix_goes_first_from_its_end():
    kv = KVManager(6, 2)
    for tokens in ([1] * 5, [2] * 5):
        kv.release(filled(kv, tokens)[0])
    kv.release(filled(kv, [1] * 5)[0])  # used again: now the younger one
    other, _ = filled(kv, [3] * 6, None)
    # Two blocks were free; the third came from the end of the older prefix.
    assert kv.cached_blocks == 3
    assert kv.reuse(kv.open("n"), [2] * 5, 0) == 2
    assert kv.reuse(kv.open("n"), [1] * 5, 0) == 4
    assert kv.free_blocks == 0
    assert len(other.blocks) == 3


def test_blocks_whose_content_is_not_trusted_are_forgotten():
    kv = KVManager(10, 4)
    first, _ = filled(kv, range(9))
    second, _ = filled(kv, range(5))
    kv.release(first, keep=False)
    # The block that another still reads stays known.
    assert kv.cached_blocks == 0
    assert kv.reuse(kv.open("n"), range(9), 0) == 4
    kv.release(second, keep=False)


def test_without_idle_blocks_only_those_who_run_together_share():
    kv = KVManager(10, 4, keep_idle=False)
    first, _ = filled(kv, range(9))
    second, computed = filled(kv, range(9))
    assert computed == 8
    kv.release(first)
    kv.release(second)
    assert kv.cached_blocks == 0
    assert filled(kv, range(9))[1] == 0


def test_a_prompt_is_compared_with_what_is_still_to_come():
    chain = PrefixCache(4).chain("n", range(12))
    assert len(chain.names) == 3
    assert chain.next_name(0, 12) == chain.names[0]
    assert chain.next_name(4, 12) == chain.names[1]
    assert chain.next_name(5, 12) is None, "it has begun that block itself"
    assert chain.next_name(8, 12) is None, "the last token is never taken"
    assert chain.next_name(8, 13) == chain.names[2], "output follows the prompt"
    assert chain.pending_names(5) == chain.names[1:]
    assert PrefixCache(4).chain("m", range(12)).names != chain.names
