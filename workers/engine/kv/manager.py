"""KV memory as the planner sees it: room in tokens, and an opaque allocation."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from ....shared.errors import EngineError
from .blocks import BlockPool
from .prefix_cache import (
    BlockHash,
    CachedBlock,
    Namespace,
    PrefixCache,
    PromptChain,
    chained_hash,
)

_NOBODY: Final[Mapping[int, int]] = MappingProxyType({})


class Allocation:
    """The blocks of one sequence; outside this module only `table` is looked at.

    Args:
        block_size: Tokens per block.
        namespace: Whom it may share blocks with; None shares nothing.
    """

    __slots__ = ("_block_size", "blocks", "known", "namespace")

    def __init__(self, block_size: int, namespace: Namespace | None = None) -> None:
        self._block_size = block_size
        self.namespace = namespace
        self.blocks: list[int] = []
        """In the order of the tokens they hold."""
        self.known: list[CachedBlock] = []
        """What the cache knows of the first of them."""

    def table(self, num_tokens: int) -> tuple[int, ...]:
        """Returns the block table for the first `num_tokens` tokens."""
        return tuple(self.blocks[: -(-num_tokens // self._block_size)])


class KVManager:
    """Hands out KV memory as sequences grow, and shares what begins alike.

    Args:
        num_blocks: Blocks in the pool.
        block_size: Tokens per block.
        keep_idle: Whether the content of given back blocks is kept for later; else
            only sequences that run at the same time share.
        block_hash: Names blocks by content.
    """

    __slots__ = ("_cache", "_keep_idle", "_pool", "block_size")

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        keep_idle: bool = True,
        block_hash: BlockHash = chained_hash,
    ) -> None:
        self._cache = PrefixCache(block_size, block_hash)
        self._pool = BlockPool(num_blocks, on_evict=self._cache.forget)
        self._keep_idle = keep_idle
        self.block_size = block_size

    # --- room ------------------------------------------------------------------
    @property
    def total_blocks(self) -> int:
        """Blocks in the pool."""
        return self._pool.num_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds, those with cached content included."""
        return self._pool.num_free

    @property
    def cached_blocks(self) -> int:
        """Blocks that nobody holds and whose content is kept."""
        return self._pool.num_idle

    @property
    def held_tokens(self) -> int:
        """Token slots of all blocks that somebody holds."""
        return (self.total_blocks - self.free_blocks) * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Returns how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def missing(self, allocation: Allocation, num_tokens: int) -> int:
        """Returns how many blocks an allocation lacks for `num_tokens` tokens."""
        return max(0, self.blocks_for(num_tokens) - len(allocation.blocks))

    def cost(
        self,
        namespace: Namespace | None,
        token_ids: Sequence[int],
        leaving: Mapping[int, int] = _NOBODY,
    ) -> int:
        """Returns how many of `free_blocks` a new sequence would take.

        Args:
            namespace: Whom it may share blocks with.
            token_ids: All its tokens; blocks that others hold cost nothing.
            leaving: How many will have given a block back by then, by block.
        """
        shared, parent = 0, None
        for index in range(self._shareable(namespace, token_ids)):
            parent = self._cache.find(namespace, parent, self._ids(token_ids, index))
            if parent is None:
                break
            held = self._pool.references(parent.block) - leaving.get(parent.block, 0)
            shared += held > 0
        return self.blocks_for(len(token_ids)) - shared

    def freed_by(self, leaving: Mapping[int, int]) -> int:
        """Returns how many blocks nobody holds once that many have given them back."""
        return sum(
            self._pool.references(block) == count for block, count in leaving.items()
        )

    # --- one sequence's blocks ----------------------------------------------------
    def open(self, namespace: Namespace | None = None) -> Allocation:
        """Returns an allocation without blocks.

        Args:
            namespace: Whom it may share blocks with; None shares nothing.
        """
        return Allocation(self.block_size, namespace)

    def chain(self, namespace: Namespace, token_ids: Sequence[int]) -> PromptChain:
        """Returns the names of a prompt's full blocks."""
        return self._cache.chain(namespace, token_ids)

    def reuse(
        self, allocation: Allocation, token_ids: Sequence[int], num_computed: int
    ) -> int:
        """Takes cached blocks for what would otherwise be computed next.

        The last token is left out: its logits are wanted.

        Args:
            allocation: The sequence's.
            token_ids: All its tokens.
            num_computed: How many of them stand in its blocks.

        Returns:
            How many stand there now.
        """
        if num_computed != len(allocation.known) * self.block_size:
            return num_computed  # in the midst of a block
        for index in range(
            len(allocation.known), self._shareable(allocation.namespace, token_ids)
        ):
            known = self._next_known(allocation, self._ids(token_ids, index))
            if known is None:
                break
            if surplus := allocation.blocks[index:]:  # of a step that failed
                self._pool.release(surplus)
                del allocation.blocks[index:]
            self._pool.share((known.block,))
            allocation.blocks.append(known.block)
            allocation.known.append(known)
        return len(allocation.known) * self.block_size

    def grow(self, allocation: Allocation, num_tokens: int) -> None:
        """Takes what an allocation lacks for `num_tokens` tokens.

        Raises:
            KVPoolExhausted: It does not fit now; nothing was taken.
        """
        count = self.missing(allocation, num_tokens)
        if count:
            allocation.blocks += self._pool.take(count)

    def commit(
        self, allocation: Allocation, token_ids: Sequence[int], num_computed: int
    ) -> None:
        """Makes blocks known that have become full.

        Where somebody else's block holds the same, that one is used from now on.

        Args:
            allocation: The sequence's.
            token_ids: All its tokens.
            num_computed: How many of them stand in its blocks.
        """
        if allocation.namespace is None:
            return
        for index in range(len(allocation.known), num_computed // self.block_size):
            ids = self._ids(token_ids, index)
            known = self._next_known(allocation, ids)
            block = allocation.blocks[index]
            if known is None:
                known = self._cache.register(
                    allocation.namespace, _last(allocation), ids, block
                )
            elif known.block != block:
                self._pool.share((known.block,))
                self._pool.release((block,))
                allocation.blocks[index] = known.block
            allocation.known.append(known)

    def release(self, allocation: Allocation, *, keep: bool = True) -> None:
        """Gives all blocks back; the allocation is empty afterwards.

        Args:
            allocation: The sequence's.
            keep: False where the content is not to be trusted: what nobody else holds
                is forgotten.

        Raises:
            EngineError: A block was given back before.
        """
        if not (keep and self._keep_idle):
            for known in allocation.known:
                if self._pool.references(known.block) == 1:
                    self._cache.forget(known.block)
        self._pool.release(allocation.blocks, keep=self._cache)
        allocation.blocks, allocation.known = [], []

    def _shareable(self, namespace: Namespace | None, token_ids: Sequence[int]) -> int:
        """Full blocks of a sequence without its last token."""
        return 0 if namespace is None else (len(token_ids) - 1) // self.block_size

    def _ids(self, token_ids: Sequence[int], index: int) -> tuple[int, ...]:
        start = index * self.block_size
        return tuple(token_ids[start : start + self.block_size])

    def _next_known(
        self, allocation: Allocation, token_ids: tuple[int, ...]
    ) -> CachedBlock | None:
        return self._cache.find(allocation.namespace, _last(allocation), token_ids)

    # --- books -----------------------------------------------------------------
    def check_integrity(self, live: Iterable[Allocation]) -> None:
        """Checks free + cached + used = total and that references are right.

        Args:
            live: Every allocation that is in use.

        Raises:
            EngineError: The books differ.
        """
        allocations = tuple(live)
        self._pool.check_integrity(allocation.blocks for allocation in allocations)
        self._cache.check_integrity(self._pool.idle_blocks)
        for allocation in allocations:
            for block, known in zip(allocation.blocks, allocation.known, strict=False):
                if block != known.block or block not in self._cache:
                    raise EngineError(f"KV block {block} is not what the cache knows")


def _last(allocation: Allocation) -> CachedBlock | None:
    return allocation.known[-1] if allocation.known else None
