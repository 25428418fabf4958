"""Which full KV blocks are known by their content, so that prompts can share them.

A block is named by a chained hash: that of the block before it, then its own token
ids; the first block's parent is the namespace. Hashes only find candidates. What is
served is compared: the token ids, the parent (by identity, so by induction the whole
prefix) and the namespace. Chaining of block hashes as in vLLM's automatic prefix
caching; the comparison is what a colliding hash cannot get past.

Only full blocks are known here, and a full block is never written again: no copy is
needed before a write, since what a sequence writes lies beyond all it shares.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence

import msgspec

from ....shared.errors import EngineError

Namespace = Hashable
"""Equal for sequences that may share: weights, adapter, tenant's salt."""
BlockHash = Callable[[int, tuple[int, ...]], int]
"""(hash of what precedes, token ids of the block) -> hash of all."""


def chained_hash(parent: int, token_ids: tuple[int, ...]) -> int:
    """Returns the name of a block after what precedes it."""
    return hash((parent, token_ids))


class CachedBlock:
    """A full block whose content is known.

    Args:
        block: Its id in the pool.
        name: Chained hash.
        namespace: Who may share it.
        parent: The block before it; None for a prompt's first.
        token_ids: What it holds K and V of.
    """

    __slots__ = ("block", "name", "namespace", "parent", "token_ids")

    def __init__(
        self,
        block: int,
        name: int,
        namespace: Namespace,
        parent: "CachedBlock | None",
        token_ids: tuple[int, ...],
    ) -> None:
        self.block = block
        self.name = name
        self.namespace = namespace
        self.parent = parent
        self.token_ids = token_ids


class PromptChain(msgspec.Struct, frozen=True):
    """Hashes of a prompt's full blocks: tells prompts apart that begin alike."""

    names: tuple[int, ...]
    block_size: int

    def next_name(self, num_computed: int, num_tokens: int) -> int | None:
        """Returns the name of the next block, if another's could be taken for it.

        Args:
            num_computed: Tokens computed so far.
            num_tokens: Tokens in all; the last one is always computed.
        """
        index, begun = divmod(num_computed, self.block_size)
        shareable = min(len(self.names), (num_tokens - 1) // self.block_size)
        return None if begun or index >= shareable else self.names[index]

    def pending_names(self, num_computed: int) -> tuple[int, ...]:
        """Returns the names of the prompt's blocks that are not full yet."""
        return self.names[num_computed // self.block_size :]


class PrefixCache:
    """Full blocks by content.

    Args:
        block_size: Tokens per block.
        block_hash: Names blocks; tests hand in a poor one.
    """

    __slots__ = ("_block_hash", "_by_block", "_by_name", "block_size")

    def __init__(self, block_size: int, block_hash: BlockHash = chained_hash) -> None:
        self.block_size = block_size
        self._block_hash = block_hash
        self._by_name: dict[int, list[CachedBlock]] = {}
        self._by_block: dict[int, CachedBlock] = {}

    def __contains__(self, block: object) -> bool:
        return block in self._by_block

    def _name(
        self,
        namespace: Namespace,
        parent: CachedBlock | None,
        token_ids: tuple[int, ...],
    ) -> int:
        before = hash(namespace) if parent is None else parent.name
        return self._block_hash(before, token_ids)

    def chain(self, namespace: Namespace, token_ids: Sequence[int]) -> PromptChain:
        """Returns the names of a prompt's full blocks."""
        names: list[int] = []
        name, size = hash(namespace), self.block_size
        for end in range(size, len(token_ids) + 1, size):
            name = self._block_hash(name, tuple(token_ids[end - size : end]))
            names.append(name)
        return PromptChain(tuple(names), size)

    def find(
        self,
        namespace: Namespace,
        parent: CachedBlock | None,
        token_ids: tuple[int, ...],
    ) -> CachedBlock | None:
        """Returns the block that holds `token_ids` after `parent`, if one does."""
        candidates = self._by_name.get(self._name(namespace, parent, token_ids), ())
        for known in candidates:
            if (
                known.parent is parent
                and known.token_ids == token_ids
                and known.namespace == namespace
            ):
                return known
        return None

    def register(
        self,
        namespace: Namespace,
        parent: CachedBlock | None,
        token_ids: tuple[int, ...],
        block: int,
    ) -> CachedBlock:
        """Makes a full block known; its content must not change from now on."""
        name = self._name(namespace, parent, token_ids)
        known = CachedBlock(block, name, namespace, parent, token_ids)
        self._by_name.setdefault(name, []).append(known)
        self._by_block[block] = known
        return known

    def forget(self, block: int) -> None:
        """Makes a block unknown. What followed it can no longer be reached."""
        known = self._by_block.pop(block)
        same = self._by_name[known.name]
        same.remove(known)
        if not same:
            del self._by_name[known.name]

    def check_integrity(self, idle: Iterable[int]) -> None:
        """Checks that both indexes agree and that idle blocks are known.

        Raises:
            EngineError: They do not.
        """
        named = {known.block for same in self._by_name.values() for known in same}
        if named != self._by_block.keys():
            raise EngineError("the prefix cache's indexes differ")
        if unknown := set(idle) - named:
            raise EngineError(f"idle KV blocks of unknown content: {sorted(unknown)}")
