"""Who is in the engine: requests, their sequences, and the KV memory they hold."""

import bisect

from ...shared.errors import InvalidRequest
from .kv.manager import KVManager
from .planner import Plan, PlannedSlice
from .request import EngineRequest
from .room import Room
from .sequence import Sequence, is_same_class


def _urgency(sequence: Sequence) -> tuple[bool, bool, int, int, int]:
    return sequence.urgency


class Roster:
    """Requests that are here; their sequences run, wait for room, or have ended.

    Args:
        kv: KV memory, taken as sequences grow.
        max_running: Sequences that may run at once.
        overcommit: Times the pool that sequences' whole lives may sum up to.
    """

    def __init__(
        self, kv: KVManager, max_running: int, *, overcommit: float = 1.0
    ) -> None:
        self._kv = kv
        self._room = Room(kv, max_running, overcommit)
        self._requests: dict[str, tuple[Sequence, ...]] = {}
        self.running: list[Sequence] = []
        """May hold blocks; most urgent first."""
        self.waiting: list[Sequence] = []
        """Hold nothing; most urgent first."""
        self.overruns = 0
        """Requests that came without room."""
        self.preemptions = 0
        """Times a sequence had to yield its blocks."""
        self.tokens_asked = 0
        """Tokens of sequences when they began to run, again after a preemption too."""
        self.tokens_hit = 0
        """Of these, tokens whose K and V were found in the prefix cache."""

    # --- requests ----------------------------------------------------------------
    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of all requests, in the order of arrival."""
        return tuple(self._requests)

    def sequences(self, request_id: str) -> tuple[Sequence, ...]:
        """A request's sequences by choice; none for an unknown id."""
        return self._requests.get(request_id, ())

    def has_ended(self, request_id: str) -> bool:
        """Whether all choices of a request have ended."""
        return all(sequence.finish_reason for sequence in self._requests[request_id])

    def refuse_duplicate(self, request: EngineRequest) -> None:
        """Checks that the id is new.

        Raises:
            InvalidRequest: A request of this id is here.
        """
        if request.id in self._requests:
            raise InvalidRequest("id", f"request {request.id} is already running here")

    def enter(self, request_id: str, sequences: tuple[Sequence, ...]) -> None:
        """Takes a request in; one beyond what was promised counts as an overrun."""
        coming = [sequence for sequence in sequences if sequence.finish_reason is None]
        self.overruns += self._room.is_overrun(coming, (*self.running, *self.waiting))
        self._requests[request_id] = sequences
        for sequence in coming:
            if sequence.namespace is not None:
                prompt = sequence.token_ids[: sequence.num_prompt]
                sequence.prompt_chain = self._kv.chain(sequence.namespace, prompt)
            bisect.insort(self.waiting, sequence, key=_urgency)
        self.admit()

    def leave(self, request_id: str, *, keep: bool = True) -> bool:
        """Lets a request go, with all it holds.

        Args:
            request_id: Which one.
            keep: Whether what it computed may serve others later.

        Returns:
            False when it is not here.
        """
        sequences = self._requests.pop(request_id, None)
        if sequences is None:
            return False
        for sequence in sequences:
            self.retire(sequence, keep=keep)
        return True

    def retire(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Stops one sequence and gives its blocks back."""
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)
        if sequence.allocation is not None:
            self._kv.release(sequence.allocation, keep=keep)
            sequence.allocation = None

    # --- who runs ------------------------------------------------------------------
    def admit(self) -> None:
        """Lets waiting sequences run, in order. The first sets the pace, so that a
        large one is not overtaken for ever. An interactive one waits for no bulk: it
        stands before all of it, and as much of it as is in the way yields.
        """
        while self.waiting:
            yielding = self._room.made_by(self.waiting[0], self.running)
            if yielding is None:
                return
            first = self.waiting.pop(0)
            for sequence in yielding:
                self.preempt(sequence, first)
            self._start(first)
            self._note_overtaking(first, yielding)

    def _start(self, sequence: Sequence) -> None:
        sequence.allocation = self._kv.open(sequence.namespace)
        self.tokens_asked += sequence.num_tokens
        self._reuse(sequence)
        bisect.insort(self.running, sequence, key=_urgency)

    def _note_overtaking(
        self, newcomer: Sequence, yielded: tuple[Sequence, ...]
    ) -> None:
        """Sets back the oldest that waits of the newcomer's class, if it came before
        `newcomer` and has not just `yielded` to it.

        Only the oldest: else all that wait would become most urgent at once. It starts
        after at most PATIENCE later requests, and then the next is the oldest.
        """
        oldest = min(
            (one for one in self.waiting if is_same_class(one, newcomer)),
            key=lambda one: (one.arrival, one.choice),
            default=newcomer,
        )
        if oldest.arrival < newcomer.arrival and oldest not in yielded:
            oldest.note_overtaking(newcomer.arrival)
            self.waiting.sort(key=_urgency)

    def preempt(self, sequence: Sequence, asking: Sequence) -> None:
        """Takes a running sequence's blocks; it will be computed again.

        Its tokens, and what its sampler and detokenizer know, stay. It keeps its place
        by arrival, so nobody of its class who came later goes before it. For bulk it is
        no setback to yield to interactive ones: it is there to fill their gaps.

        Args:
            sequence: Who yields.
            asking: To whom.
        """
        self.running.remove(sequence)
        assert sequence.allocation is not None
        self._kv.release(sequence.allocation)
        sequence.allocation = None
        sequence.num_computed = 0
        if is_same_class(sequence, asking):
            sequence.note_yield()
        bisect.insort(self.waiting, sequence, key=_urgency)
        self.preemptions += 1

    # --- blocks ----------------------------------------------------------------------
    def reuse(self) -> None:
        """Gives running prompts the blocks that others have computed meanwhile."""
        for sequence in self.running:
            if sequence.num_uncomputed > 1:
                self._reuse(sequence)

    def _reuse(self, sequence: Sequence) -> None:
        assert sequence.allocation is not None
        computed = self._kv.reuse(
            sequence.allocation, sequence.token_ids, sequence.num_computed
        )
        self.tokens_hit += computed - sequence.num_computed
        sequence.num_computed = computed

    def provide_all(self, plan: Plan) -> bool:
        """Gives all slices the blocks they need, or none when not all can have them."""
        lacking: list[PlannedSlice] = []
        count = 0
        for part in plan:
            assert part.sequence.allocation is not None
            missing = self._kv.missing(part.sequence.allocation, part.end)
            if missing:
                lacking.append(part)
                count += missing
        if count > self._kv.free_blocks:
            return False
        for part in lacking:
            assert part.sequence.allocation is not None
            self._kv.grow(part.sequence.allocation, part.end)
        return True

    def provide(self, part: PlannedSlice) -> PlannedSlice | None:
        """Gives a slice the blocks it needs.

        Args:
            part: Of a running sequence.

        Returns:
            The slice, or as much of it as fits; None when not even one token does.
        """
        allocation = part.sequence.allocation
        assert allocation is not None
        lacking = self._kv.missing(allocation, part.end) - self._kv.free_blocks
        if lacking > 0:
            fitting = self._kv.blocks_for(part.end) - lacking
            length = fitting * self._kv.block_size - part.start
            if length <= 0:
                return None
            part = PlannedSlice(part.sequence, part.start, length)
        self._kv.grow(allocation, part.end)
        return part

    def fits(self, part: PlannedSlice) -> bool:
        """Whether a slice's blocks are there or free."""
        assert part.sequence.allocation is not None
        missing = self._kv.missing(part.sequence.allocation, part.end)
        return missing <= self._kv.free_blocks

    def settle(self, ran: Plan) -> None:
        """Notes what has been computed; blocks that are full can serve others."""
        for part in ran:
            sequence = part.sequence
            sequence.num_computed = part.end
            assert sequence.allocation is not None
            self._kv.commit(sequence.allocation, sequence.token_ids, part.end)

    # --- books -----------------------------------------------------------------------
    @property
    def prefill_backlog(self) -> int:
        """Tokens of running and waiting sequences still to be prefilled."""
        return sum(
            sequence.num_uncomputed
            for sequence in (*self.running, *self.waiting)
            if sequence.num_uncomputed > 1 or sequence.num_computed == 0
        )

    @property
    def empty_slots(self) -> int:
        """Token slots of held blocks in which no token stands."""
        return sum(
            len(sequence.allocation.blocks) * self._kv.block_size
            - sequence.num_computed
            for sequence in self.running
            if sequence.allocation is not None
        )

    def check_integrity(self) -> None:
        """Checks the KV books against what the sequences hold.

        Raises:
            EngineError: free + cached + used is not the total, or a block's owners
                are not those counted.
        """
        self._kv.check_integrity(
            sequence.allocation
            for sequences in self._requests.values()
            for sequence in sequences
            if sequence.allocation is not None
        )
