"""The KV block pool: a free list and reference counts. Ids only, no tensors."""

from collections import Counter
from collections.abc import Iterable, Sequence

from ....shared.errors import EngineError, KVPoolExhausted


class BlockPool:
    """Hands out block ids, each to one owner or to several that share it.

    Args:
        num_blocks: Blocks in the pool, ids 0 to num_blocks - 1.
    """

    __slots__ = ("_free", "_references", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # A stack: the block freed last is taken first, while its memory is warm.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        """Takes free blocks, each with one reference.

        Args:
            count: How many.

        Returns:
            Their ids.

        Raises:
            KVPoolExhausted: Fewer are free; nothing was taken.
        """
        if count > len(self._free):
            raise KVPoolExhausted(
                f"{count} KV blocks are needed and {len(self._free)} of "
                f"{self.num_blocks} are free; wait until running requests end"
            )
        taken = tuple(self._free.pop() for _ in range(count))
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Adds one reference to blocks that somebody already holds.

        Raises:
            EngineError: A block is free, so its content belongs to nobody.
        """
        shared = tuple(blocks)
        for block in shared:
            if self._references[block] == 0:
                raise EngineError(f"KV block {block} is free and cannot be shared")
        for block in shared:
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drops one reference per block; a block without any is free again.

        Raises:
            EngineError: A block is already free.
        """
        # Backwards, so that the next owner gets them in rising order again.
        for block in reversed(tuple(blocks)):
            if self._references[block] == 0:
                raise EngineError(f"KV block {block} was released twice")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)

    def check_integrity(self, holdings: Iterable[Sequence[int]]) -> None:
        """Holds the pool's books against what its owners say they hold.

        Args:
            holdings: Block ids per owner; an owner names a block once.

        Raises:
            EngineError: The books differ; the message says where.
        """
        held: Counter[int] = Counter()
        for blocks in holdings:
            if len(set(blocks)) != len(blocks):
                raise EngineError(f"one owner holds a KV block twice: {blocks}")
            held.update(blocks)
        free = set(self._free)
        if len(free) != len(self._free):
            raise EngineError("a KV block stands twice in the free list")
        if both := free & held.keys():
            raise EngineError(f"KV blocks are free and held at once: {sorted(both)}")
        if len(free) + len(held) != self.num_blocks:
            raise EngineError(
                f"{len(free)} free + {len(held)} held KV blocks are not "
                f"{self.num_blocks} in all"
            )
        for block, references in enumerate(self._references):
            if references != held.get(block, 0):
                raise EngineError(
                    f"KV block {block} counts {references} references "
                    f"but has {held.get(block, 0)} owners"
                )
