"""Whether a sequence can start now, and which bulk yields its place for it. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from .kv.manager import KVManager
from .sequence import Sequence as RunningSequence

GROWTH_BLOCKS: Final = 2
"""Blocks left free for each running sequence when another is let in: without them the
newcomer's blocks would be wanted back within a few steps."""


class Room:
    """Slots and KV blocks, as those see them who want to start.

    Args:
        kv: The KV pool's books.
        max_running: Sequences that may run at once.
        overcommit: Times the pool that sequences' whole lives may sum up to.
    """

    def __init__(self, kv: KVManager, max_running: int, overcommit: float) -> None:
        self._kv = kv
        self._max_running = max_running
        self._overcommit = overcommit

    def is_overrun(
        self, coming: Sequence[RunningSequence], here: Iterable[RunningSequence]
    ) -> bool:
        """Whether a request came beyond what was promised.

        An interactive one is promised what bulk holds too.

        Args:
            coming: The sequences of the request.
            here: All others, those that wait included.
        """
        if not coming:
            return False
        only_interactive = coming[0].is_interactive
        held = [one for one in here if one.is_interactive or not only_interactive]
        # One request of more choices than may run takes turns with itself.
        if held and len(held) + len(coming) > self._max_running:
            return True
        blocks = sum(map(self._whole_life, (*held, *coming)))
        return blocks > self._kv.total_blocks * self._overcommit

    def _whole_life(self, sequence: RunningSequence) -> int:
        """Returns how many blocks a sequence needs in the end."""
        return self._kv.blocks_for(sequence.max_tokens_held)

    def made_by(
        self, newcomer: RunningSequence, running: Sequence[RunningSequence]
    ) -> tuple[RunningSequence, ...] | None:
        """Returns who has to yield so that a sequence can start: mostly nobody.

        Only bulk yields, the least urgent first and no more of it than necessary, and
        only to interactive sequences or to bulk that has waited too long.

        Args:
            newcomer: The most urgent of those that wait.
            running: Who runs, most urgent first.

        Returns:
            Nobody where there is room as it is; None where there is none even if all
            yield that would have to.
        """
        if self._fits(newcomer, running, ()):
            return ()
        below = [one for one in reversed(running) if _gives_way(one, newcomer)]
        if not below or not self._fits(newcomer, running, below):
            return None
        chosen: list[RunningSequence] = []
        while not self._fits(newcomer, running, chosen):
            chosen.append(below[len(chosen)])
        for one in chosen[:-1]:  # the last one's blocks may be enough by themselves
            others = [other for other in chosen if other is not one]
            if self._fits(newcomer, running, others):
                chosen = others
        return tuple(chosen)

    def _fits(
        self,
        newcomer: RunningSequence,
        running: Iterable[RunningSequence],
        leaving: Sequence[RunningSequence],
    ) -> bool:
        """Whether a sequence can run up to its next token and leave room to grow.

        What would yield to it anyway has no claim to room for its own growth.
        """
        gone = {id(one) for one in leaving}
        staying = [one for one in running if id(one) not in gone]
        if len(staying) >= self._max_running:
            return False
        if not staying:
            return True  # alone it was checked against the pool when it came
        blocks = Counter(block for one in leaving for block in _blocks(one))
        needed = self._kv.cost(newcomer.namespace, newcomer.token_ids, blocks)
        needed += self._growth(newcomer)
        for one in staying:
            if not _gives_way(one, newcomer):
                assert one.allocation is not None
                needed += self._kv.missing(one.allocation, one.num_tokens)
                needed += self._claim(one, newcomer)
        return needed <= self._kv.free_blocks + self._kv.freed_by(blocks)

    def _claim(self, sequence: RunningSequence, newcomer: RunningSequence) -> int:
        """Returns the blocks that are left free for a running sequence's growth.

        Where whole lives fit, bulk leaves an interactive one its whole life, and so
        never yields to the same one twice.
        """
        is_filling_gap = sequence.is_interactive and not newcomer.is_interactive
        if is_filling_gap and self._overcommit <= 1.0:
            return self._to_come(sequence)
        return self._growth(sequence)

    def _growth(self, sequence: RunningSequence) -> int:
        return min(GROWTH_BLOCKS, self._to_come(sequence))

    def _to_come(self, sequence: RunningSequence) -> int:
        held = self._kv.blocks_for(sequence.num_tokens)
        return self._whole_life(sequence) - held


def _gives_way(sequence: RunningSequence, newcomer: RunningSequence) -> bool:
    if sequence.is_interactive or sequence.urgency < newcomer.urgency:
        return False
    return newcomer.is_interactive or newcomer.is_patient


def _blocks(sequence: RunningSequence) -> Iterable[int]:
    return () if sequence.allocation is None else sequence.allocation.blocks
