"""Decode steps as CUDA graphs: one for each bucket of rows and of context.

A graph replays the same launches on the same memory, so a decode step is padded to the
next bucket and its inputs are copied into tensors that never move. A padding row stands
for no sequence: it writes its key and value into a scratch block that the block manager
does not know, attends over that one token, and its logits are dropped. No other row
reads the scratch block, and every operation works row by row, so the real rows' numbers
are those of the unpadded step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import torch

from ...kernels.layout import StepLayout

if TYPE_CHECKING:
    from ...batch import StepBatch

Forward = Callable[[torch.Tensor, StepLayout], torch.Tensor]
"""(token ids int64 [rows], layout on the device) -> logits float32 [rows, vocab]."""
PlaceLayout = Callable[[StepLayout, int], StepLayout]
"""(layout on the device, longest context) -> the layout as the kernels want it."""
FIRST_CONTEXT: Final = 4096
"""Longest context of the smallest graphs: a launch has a program per split of it."""
CONTEXT_FACTOR: Final = 4


class Replay(Protocol):
    """A recorded step; calling it runs the step on what the inputs hold now."""

    def __call__(self) -> torch.Tensor:
        """Returns logits [rows, vocab]; the next call may overwrite them."""
        ...


class Recorder(Protocol):
    """Records steps, or stands in for that."""

    def record(self, step: Callable[[], torch.Tensor]) -> Replay:
        """Runs a step as often as it takes and returns how to repeat it."""
        ...


def row_buckets(max_running: int) -> tuple[int, ...]:
    """Returns 1, 2, 4, 8 and so on up to the most rows of a decode step, included."""
    powers = [1 << exponent for exponent in range(max_running.bit_length())]
    return tuple(sorted({min(power, max_running) for power in [*powers, max_running]}))


def context_buckets(max_context: int) -> tuple[int, ...]:
    """Returns the longest contexts that graphs are made for, rising."""
    buckets = [min(FIRST_CONTEXT, max_context)]
    while buckets[-1] < max_context:
        buckets.append(min(buckets[-1] * CONTEXT_FACTOR, max_context))
    return tuple(buckets)


class Bucket(msgspec.Struct, frozen=True, order=True):
    """The sizes of one graph."""

    rows: int
    context: int


class Buckets:
    """Chooses a graph for a step.

    Args:
        max_running: Most sequences of a step.
        max_context: Most tokens of a sequence.
    """

    def __init__(self, max_running: int, max_context: int) -> None:
        self.rows = row_buckets(max_running)
        self.contexts = context_buckets(max_context)

    def choose(self, batch: StepBatch) -> Bucket | None:
        """Returns the smallest bucket that holds a step, or None.

        A step that computes a prompt, or leaves a row's logits out, has none.
        """
        rows = len(batch.slices)
        if not rows == len(batch.token_ids) == len(batch.logit_rows):
            return None
        longest = max(piece.context_length for piece in batch.slices)
        if rows > self.rows[-1] or longest > self.contexts[-1]:
            return None
        return Bucket(
            self.rows[bisect_left(self.rows, rows)],
            self.contexts[bisect_left(self.contexts, longest)],
        )

    def all(self) -> tuple[Bucket, ...]:
        """Returns every bucket, the largest first: the others fit into its memory."""
        return tuple(
            Bucket(rows, context)
            for context in reversed(self.contexts)
            for rows in reversed(self.rows)
        )


class _Rows(msgspec.Struct, frozen=True):
    """What a padded decode step reads, a row a sequence."""

    token_ids: torch.Tensor
    """int64 [rows]."""
    positions: torch.Tensor
    """int64 [rows]."""
    slots: torch.Tensor
    """int64 [rows]."""
    contexts: torch.Tensor
    """int32 [rows]."""
    tables: torch.Tensor
    """int32 [rows, blocks]."""

    @classmethod
    def empty(cls, rows: int, blocks: int, *, pinned: bool) -> _Rows:
        """Returns rows of zeros on the host."""

        def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=pinned)

        long, integer = torch.int64, torch.int32
        return cls(
            zeros(long, rows),
            zeros(long, rows),
            zeros(long, rows),
            zeros(integer, rows),
            zeros(integer, rows, blocks),
        )

    def copied_to(self, device: torch.device) -> _Rows:
        """Returns a copy on a device."""
        return _Rows(
            *(
                getattr(self, name).to(device, copy=True)
                for name in self.__struct_fields__
            )
        )


class DecodeInputs:
    """The inputs of padded decode steps: one set of tensors for all buckets.

    Args:
        buckets: The largest sizes.
        block_size: Tokens per KV block.
        scratch_block: Id of the block that padding rows write to.
        device: Where the kernels run.
        place_layout: Adds what the device's kernels want to know.
    """

    def __init__(
        self,
        buckets: Buckets,
        block_size: int,
        scratch_block: int,
        device: torch.device,
        place_layout: PlaceLayout,
    ) -> None:
        rows = buckets.rows[-1]
        self._block_size = block_size
        self._scratch = scratch_block
        self._place_layout = place_layout
        self._host = _Rows.empty(
            rows, -(-buckets.contexts[-1] // block_size), pinned=device.type == "cuda"
        )
        self._rows = self._host.copied_to(device)
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=device)

    def view(self, bucket: Bucket) -> tuple[torch.Tensor, StepLayout]:
        """Returns the token ids and the layout of a bucket; they never move."""
        rows = bucket.rows
        layout = StepLayout(
            slot_mapping=self._rows.slots[:rows],
            query_start=self._starts[: rows + 1],
            context_length=self._rows.contexts[:rows],
            block_table=self._rows.tables[:rows],
            positions=self._rows.positions[:rows],
        )
        return self._rows.token_ids[:rows], self._place_layout(layout, bucket.context)

    def fill(
        self, batch: StepBatch | None, bucket: Bucket, *, padding_context: int = 1
    ) -> None:
        """Puts a decode step into the tensors; rows beyond it become padding.

        The step before it must have ended: its logits were awaited.

        Args:
            batch: One token a sequence, in a bucket that holds it; None is padding
                alone.
            bucket: Only its rows are written.
            padding_context: Tokens that a padding row attends over, all scratch.
        """
        slices = () if batch is None else batch.slices
        rows, real = bucket.rows, len(slices)
        host = self._host
        host.token_ids[real:rows] = 0
        host.positions[real:rows] = padding_context - 1
        host.slots[real:rows] = self._scratch * self._block_size
        host.contexts[real:rows] = padding_context
        blocks = -(-padding_context // self._block_size)
        host.tables[real:rows, :blocks] = self._scratch
        if batch is not None:
            layout = StepLayout.from_batch(batch, self._block_size)
            host.token_ids[:real] = torch.from_numpy(batch.token_ids)
            host.positions[:real] = layout.positions
            host.slots[:real] = layout.slot_mapping
            host.contexts[:real] = layout.context_length
            # Entries beyond it are left over from other steps and never read.
            table = layout.block_table[:, : host.tables.shape[1]]
            host.tables[:real, : table.shape[1]] = table
        for name in _Rows.__struct_fields__:
            source: torch.Tensor = getattr(host, name)
            target: torch.Tensor = getattr(self._rows, name)
            target[:rows].copy_(source[:rows], non_blocking=True)


class DecodeGraphs:
    """Runs decode steps that fit a bucket by replaying what was recorded.

    Args:
        buckets: What is recorded.
        inputs: The tensors that recorded steps read.
        forward: The model.
        recorder: Makes the graphs.
    """

    def __init__(
        self,
        buckets: Buckets,
        inputs: DecodeInputs,
        forward: Forward,
        recorder: Recorder,
    ) -> None:
        self._buckets = buckets
        self._inputs = inputs
        self._forward = forward
        self._recorder = recorder
        self._replays: dict[Bucket, Replay] = {}
        self.padded_rows = 0
        """Rows that were computed for no sequence, since the start."""

    def capture(self, buckets: Sequence[Bucket] | None = None) -> None:
        """Records steps, on padding alone.

        Args:
            buckets: Which, the largest first; None is all.
        """
        for bucket in buckets or self._buckets.all():
            self._inputs.fill(None, bucket)
            self._replays[bucket] = self._recorder.record(self.step(bucket))

    def step(self, bucket: Bucket) -> Callable[[], torch.Tensor]:
        """Returns a bucket's step as it is recorded, for comparing with its replay."""
        token_ids, layout = self._inputs.view(bucket)
        return lambda: self._forward(token_ids, layout)

    def fill_half(self, bucket: Bucket) -> int:
        """Fills a bucket with padding at half its context, which is returned."""
        context = max(1, bucket.context // 2)
        self._inputs.fill(None, bucket, padding_context=context)
        return context

    def replay(self, bucket: Bucket) -> Replay:
        """Returns a recorded step.

        Raises:
            KeyError: It was not recorded.
        """
        return self._replays[bucket]

    def run(self, batch: StepBatch) -> torch.Tensor | None:
        """Returns a decode step's logits, or None where no graph holds it.

        Args:
            batch: Any step.

        Returns:
            float32 [num_rows, vocab_size], the caller's own.
        """
        bucket = self._buckets.choose(batch)
        replay = None if bucket is None else self._replays.get(bucket)
        if bucket is None or replay is None:
            return None
        self._inputs.fill(batch, bucket)
        rows = len(batch.slices)
        logits = replay()[:rows].clone()
        self.padded_rows += bucket.rows - rows
        return logits
