"""The KV block pool: free list, reference counts and idle blocks. Ids, no tensors."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence

from ....shared.errors import EngineError, KVPoolExhausted


class BlockPool:
    """Hands out block ids, each to one owner or to several that share it.

    A block is free, held, or idle: nobody holds it, and its content is kept for
    whoever asks for it again, until the block is needed.

    Args:
        num_blocks: Blocks in the pool, ids 0 to num_blocks - 1.
        on_evict: Called with an idle block whose content is about to be lost.
    """

    __slots__ = ("_free", "_idle", "_on_evict", "_references", "num_blocks")

    def __init__(
        self, num_blocks: int, on_evict: Callable[[int], None] | None = None
    ) -> None:
        self.num_blocks = num_blocks
        # A stack: the block freed last is taken first, while its memory is warm.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Least recently used first."""
        self._references = [0] * num_blocks
        self._on_evict = on_evict

    @property
    def num_free(self) -> int:
        """Blocks that can be taken: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Blocks that nobody holds and whose content is kept."""
        return len(self._idle)

    def references(self, block: int) -> int:
        """How many hold a block."""
        return self._references[block]

    def take(self, count: int) -> tuple[int, ...]:
        """Takes blocks, each with one reference: free ones, then the idlest.

        Args:
            count: How many.

        Returns:
            Their ids.

        Raises:
            KVPoolExhausted: Fewer are free or idle; nothing was taken.
        """
        if count > self.num_free:
            raise KVPoolExhausted(
                f"{count} KV blocks are needed and {self.num_free} of "
                f"{self.num_blocks} are free; wait until running requests end"
            )
        taken = tuple(
            self._free.pop() if self._free else self._evict() for _ in range(count)
        )
        for block in taken:
            self._references[block] = 1
        return taken

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        if self._on_evict is not None:
            self._on_evict(block)
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Adds one reference to blocks that somebody holds or that are idle.

        Raises:
            EngineError: A block is free, so its content belongs to nobody.
        """
        shared = tuple(blocks)
        for block in shared:
            if self._references[block] == 0 and block not in self._idle:
                raise EngineError(f"KV block {block} is free and cannot be shared")
        for block in shared:
            self._idle.pop(block, None)
            self._references[block] += 1

    def release(self, blocks: Iterable[int], keep: Container[int] = ()) -> None:
        """Drops one reference per block; a block without any is free or idle again.

        Args:
            blocks: In the order of the tokens they hold.
            keep: Blocks whose content is worth keeping: they become idle.

        Raises:
            EngineError: A block is already free.
        """
        # Backwards: the next owner gets free ones in rising order again, and of idle
        # ones the end of a prefix is lost before its beginning.
        for block in reversed(tuple(blocks)):
            if self._references[block] == 0:
                raise EngineError(f"KV block {block} was released twice")
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in keep:
                self._idle[block] = None
            else:
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
        if both := (free | self._idle.keys()) & held.keys():
            raise EngineError(f"KV blocks are free and held at once: {sorted(both)}")
        if both := free & self._idle.keys():
            raise EngineError(f"KV blocks are free and idle at once: {sorted(both)}")
        if len(free) + len(self._idle) + len(held) != self.num_blocks:
            raise EngineError(
                f"{len(free)} free + {len(self._idle)} cached + {len(held)} held KV "
                f"blocks are not {self.num_blocks} in all"
            )
        for block, references in enumerate(self._references):
            if references != held.get(block, 0):
                raise EngineError(
                    f"KV block {block} counts {references} references "
                    f"but has {held.get(block, 0)} owners"
                )

    @property
    def idle_blocks(self) -> tuple[int, ...]:
        """Idle blocks, the next to be evicted first."""
        return tuple(self._idle)
