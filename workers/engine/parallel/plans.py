"""A step's batch as bytes, for followers: fixed fields and arrays, never pickles."""

from __future__ import annotations

import msgspec
import numpy as np

from ..batch import SequenceSlice, StepBatch


class _Slice(msgspec.Struct, array_like=True):
    query_start: int
    query_length: int
    context_length: int
    prompt_length: int
    block_table: bytes
    """int32."""


class _Plan(msgspec.Struct, array_like=True):
    token_ids: bytes
    """int32."""
    positions: bytes
    """int32."""
    logit_rows: bytes
    """int32."""
    slices: list[_Slice]
    adapters: tuple[str | None, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Plan)


def encode(batch: StepBatch) -> bytes:
    """Returns a batch as bytes.

    Args:
        batch: Token ids, positions and blocks below 2^31; adapters by their tickets.
    """
    return _encoder.encode(
        _Plan(
            _packed(batch.token_ids),
            _packed(batch.positions),
            _packed(batch.logit_rows),
            [
                _Slice(
                    piece.query_start,
                    piece.query_length,
                    piece.context_length,
                    piece.prompt_length,
                    _packed(np.array(piece.block_table)),
                )
                for piece in batch.slices
            ],
            batch.adapters,
        )
    )


def decode(data: bytes) -> StepBatch:
    """Returns the batch that `encode` made into bytes.

    Args:
        data: From the leader, of the same version.
    """
    plan = _decoder.decode(data)
    return StepBatch(
        token_ids=_unpacked(plan.token_ids).astype(np.int64),
        positions=_unpacked(plan.positions).astype(np.int64),
        slices=tuple(
            SequenceSlice(
                query_start=piece.query_start,
                query_length=piece.query_length,
                context_length=piece.context_length,
                block_table=tuple(_unpacked(piece.block_table).tolist()),
                prompt_length=piece.prompt_length,
            )
            for piece in plan.slices
        ),
        logit_rows=_unpacked(plan.logit_rows).astype(np.int64),
        adapters=plan.adapters,
    )


def _packed(values: np.ndarray) -> bytes:
    return values.astype(np.int32).tobytes()


def _unpacked(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=np.int32)
