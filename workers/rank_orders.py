"""What the leader says on a follower's standard input: lines, until it is gone."""

import os
from typing import TYPE_CHECKING, Final

import msgspec

from ..shared.errors import ProtocolError
from .engine.parallel.adapter_orders import AdapterOrder

if TYPE_CHECKING:
    from .engine.parallel.adapters import FollowerAdapters

LONGEST: Final = 1024 * 1024
"""Bytes of a line; more without an end is none."""
_STDIN: Final = 0
_decoder = msgspec.json.Decoder(AdapterOrder)


class LeaderLines:
    """Lines from a pipe, wherever its bytes are cut.

    Args:
        descriptor: Of the pipe.
    """

    def __init__(self, descriptor: int = _STDIN) -> None:
        self._descriptor = descriptor
        self._rest = b""

    def next(self) -> bytes | None:
        """Waits for a line and returns it; None at the end of the pipe.

        Raises:
            ProtocolError: It has no end.
        """
        while b"\n" not in self._rest:
            if len(self._rest) > LONGEST:
                raise ProtocolError(f"a line of rank 0 has more than {LONGEST} bytes")
            part = os.read(self._descriptor, 65_536)
            if not part:
                return None
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line


class Orders:
    """Hands on to a follower's adapters what its leader orders."""

    def __init__(self) -> None:
        self.adapters: FollowerAdapters | None = None
        """Set before the leader is told that the shard is loaded; it orders after."""

    def obey(self, lines: LeaderLines) -> None:
        """Does what the lines say; returns at their end.

        Raises:
            ProtocolError: A line is no order, or one for adapters where none are
                served.
        """
        while (line := lines.next()) is not None:
            try:
                order = _decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise ProtocolError(f"rank 0 sent what is no order: {error}") from error
            if self.adapters is None:
                raise ProtocolError("rank 0 sent an order before there are adapters")
            self.adapters.hear(order)
