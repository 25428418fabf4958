"""KV memory as the planner sees it: room in tokens, and an opaque allocation."""

from collections.abc import Iterable

from .blocks import BlockPool


class Allocation:
    """The blocks of one sequence; outside this module only `table` is looked at.

    Args:
        blocks: Block ids in the order of the tokens they hold.
        block_size: Tokens per block.
    """

    __slots__ = ("_block_size", "blocks")

    def __init__(self, blocks: tuple[int, ...], block_size: int) -> None:
        self.blocks = blocks
        self._block_size = block_size

    def table(self, num_tokens: int) -> tuple[int, ...]:
        """Returns the block table for the first `num_tokens` tokens."""
        return self.blocks[: -(-num_tokens // self._block_size)]


class KVManager:
    """Reserves and returns KV memory.

    Args:
        num_blocks: Blocks in the pool.
        block_size: Tokens per block.
    """

    __slots__ = ("_pool", "block_size")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._pool = BlockPool(num_blocks)
        self.block_size = block_size

    @property
    def total_blocks(self) -> int:
        """Blocks in the pool."""
        return self._pool.num_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self._pool.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Returns how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def fits(self, num_tokens: int) -> bool:
        """Says whether `num_tokens` tokens can be reserved now."""
        return self.blocks_for(num_tokens) <= self.free_blocks

    def reserve(self, num_tokens: int) -> Allocation:
        """Reserves room for a sequence's whole life.

        Args:
            num_tokens: Prompt and output tokens at most.

        Raises:
            KVPoolExhausted: It does not fit now; nothing was reserved.
        """
        return Allocation(self._pool.take(self.blocks_for(num_tokens)), self.block_size)

    def release(self, allocation: Allocation) -> None:
        """Gives a reservation back; the allocation is not to be used again.

        Raises:
            EngineError: It was given back before.
        """
        self._pool.release(allocation.blocks)

    def check_integrity(self, live: Iterable[Allocation]) -> None:
        """Checks free + used = total and that no block is held twice.

        Args:
            live: Every allocation not yet given back.

        Raises:
            EngineError: The books differ.
        """
        self._pool.check_integrity(allocation.blocks for allocation in live)
