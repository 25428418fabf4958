"""Who is in the engine: requests, their sequences, and the KV memory they hold."""

import bisect

from ...shared.errors import InvalidRequest
from .kv.manager import KVManager
from .request import EngineRequest
from .sequence import Sequence


def _urgency(sequence: Sequence) -> tuple[bool, int, int, int]:
    return sequence.urgency


class Roster:
    """Requests that are here; their sequences run, wait for room, or have ended.

    Args:
        kv: KV memory, reserved for a sequence's whole life when it starts to run.
        max_running: Sequences that may run at once.
    """

    def __init__(self, kv: KVManager, max_running: int) -> None:
        self._kv = kv
        self._max_running = max_running
        self._requests: dict[str, tuple[Sequence, ...]] = {}
        self.running: list[Sequence] = []
        """Hold blocks; most urgent first."""
        self.waiting: list[Sequence] = []
        """Hold nothing yet; most urgent first."""
        self.overruns = 0
        """Requests that had to wait for room."""

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
        """Takes a request in; what does not fit yet waits and counts as an overrun."""
        coming = [sequence for sequence in sequences if sequence.finish_reason is None]
        needed = sum(map(self._blocks, coming))
        promised = sum(map(self._blocks, self.waiting))
        present = len(self.running) + len(self.waiting)
        if (
            # One request of more choices than may run takes turns with itself.
            (present > 0 and present + len(coming) > self._max_running)
            or needed > self._kv.free_blocks - promised
        ):
            self.overruns += 1
        self._requests[request_id] = sequences
        for sequence in coming:
            bisect.insort(self.waiting, sequence, key=_urgency)
        self.admit()

    def _blocks(self, sequence: Sequence) -> int:
        return self._kv.blocks_for(sequence.max_tokens_held)

    def admit(self) -> None:
        """Reserves memory for waiting sequences, in order. The first sets the pace, so
        that a large one is not overtaken for ever.
        """
        while self.waiting and len(self.running) < self._max_running:
            first = self.waiting[0]
            if not self._kv.fits(first.max_tokens_held):
                return
            first.allocation = self._kv.reserve(first.max_tokens_held)
            bisect.insort(self.running, self.waiting.pop(0), key=_urgency)

    def leave(self, request_id: str) -> bool:
        """Lets a request go, with all it holds; False when it is not here."""
        sequences = self._requests.pop(request_id, None)
        if sequences is None:
            return False
        for sequence in sequences:
            self.retire(sequence)
        return True

    def retire(self, sequence: Sequence) -> None:
        """Stops one sequence and gives its blocks back."""
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)
        if sequence.allocation is not None:
            self._kv.release(sequence.allocation)
            sequence.allocation = None

    @property
    def prefill_backlog(self) -> int:
        """Tokens of running and waiting sequences still to be prefilled."""
        return sum(
            sequence.num_uncomputed
            for sequence in (*self.running, *self.waiting)
            if sequence.num_uncomputed > 1 or sequence.num_computed == 0
        )

    def check_integrity(self) -> None:
        """Checks the KV books against what the sequences hold.

        Raises:
            EngineError: free + used is not the total, or a block is held twice.
        """
        self._kv.check_integrity(
            sequence.allocation
            for sequences in self._requests.values()
            for sequence in sequences
            if sequence.allocation is not None
        )
