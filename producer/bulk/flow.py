"""What flows through a bulk driver: entries in, settled lines out, progress beside."""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, Literal, Protocol

import msgspec

from ...shared.bulk.messages import Item, Outcome, RunView
from ...shared.messages import JobError

State = Literal["succeeded", "failed", "cancelled", "refused", "unfit"]
"""Of a written line. refused: the input line itself was wrong, and was never fed.
unfit: the pool found so once it was fed, as of a prompt with too many tokens."""
WRONG: Final = ("refused", "unfit")
"""States of lines that would end the same way whenever they are tried."""


class Fed(msgspec.Struct, frozen=True, kw_only=True):
    """An item that is to run."""

    item: Item
    label: str = ""
    """Whatever the sink needs to know to write its line; it never leaves us."""
    line: int | None = None
    """Where in the input it stands, from 1."""
    size: int = 0
    """Bytes, roughly, that it takes in Redis."""

    @property
    def seq(self) -> int:
        """The item's number."""
        return self.item.seq


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """A line that cannot be an item: it gets an error line, and the file goes on."""

    seq: int
    error: JobError
    custom_id: str | None = None
    label: str = ""
    line: int | None = None


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """An item and how it settled."""

    fed: Fed
    outcome: Outcome

    @property
    def seq(self) -> int:
        """The item's number."""
        return self.fed.seq


Entry = Fed | Refused
Settled = Done | Refused


class Source(Protocol):
    """Where items come from. Its methods run on one thread, beside the sink's."""

    @property
    def total(self) -> int | None:
        """Entries in all, where that is known before the end."""

    def entries(self) -> Iterator[Entry]:
        """Yields what the sink has not written yet, in input order.

        Raises:
            TokenmillError: The input ends or breaks in mid-stream. What was yielded
                before is worked off first.
        """


class Sink(Protocol):
    """Where lines go. Its methods run on one thread, beside the source's."""

    def written(self, seqs: Sequence[int]) -> AbstractSet[int]:
        """Returns those of some items, given in rising order, that have their line."""

    def write(self, settled: Sequence[Settled]) -> None:
        """Writes the lines of items that have none yet, and leaves out the others.

        On return they outlive a crash of this machine: only then are outcomes taken
        out of Redis.

        Raises:
            BulkOutputFailed: They cannot be written.
        """

    def drop(self, outcomes: Sequence[Outcome]) -> None:
        """Notes items that were cancelled with their run: they get no line now.

        A sink whose run may go on later remembers to try them as the next generation.
        """

    def counts(self) -> Mapping[str, int]:
        """Returns the number of lines by `State`, those of earlier runs included."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment, for display."""

    run: str
    elapsed_s: float
    """Of this process, not of earlier ones."""
    total: int | None
    succeeded: int
    failed: int
    """Refused lines included."""
    in_flight: int
    """Items that are in the pool."""
    eta_s: float | None
    """At the rate of this process so far; None while that says nothing."""
    tokens_per_s: float
    """Prompt and output tokens of jobs that ended, over the last half minute."""
    view: RunView | None = None
    """What Redis says of the run."""
    note: str | None = None
    """What it waits for, where something is missing."""

    @property
    def settled(self) -> int:
        """Lines that are written."""
        return self.succeeded + self.failed


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """How a driver came to its end."""

    run: str
    state: Literal["complete", "cancelled"]
    """cancelled: someone cancelled the run; what had not run has no line."""
    total: int | None
    """Items and refused lines of the input; None: it was not read to its end."""
    succeeded: int
    failed: int
    """Items that ran and failed."""
    refused: int
    """Lines that are wrong themselves."""
    seconds: float
    """Of this process."""
    windows: int = 0
    jobs: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    fell_back: int = 0
    """Parts of documents summarized by key sentences instead of the model."""
    forgotten: int = 0
    """Items that Redis had lost and was given again."""
