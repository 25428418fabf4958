"""What a follower tells its leader: lines of JSON on a pipe of their own."""

import contextlib
import os
import threading
import time
from enum import IntEnum
from typing import Final

import msgspec

from ..shared.errors import ProtocolError
from .engine.parallel.adapter_orders import LoadAnswer

LONGEST: Final = 65_536
"""Bytes of a report; more without an end is none."""
_MESSAGE: Final = 2000
"""Characters of a failure that are told."""
_STDOUT: Final = 1
_STDERR: Final = 2


class Stage(IntEnum):
    """How far a follower has come."""

    STARTED = 0
    ARRIVED = 1
    """Its modules are loaded: it is about to look for the other ranks."""
    READY = 2
    """Its shard is loaded: it follows plans."""


class Reached(msgspec.Struct, frozen=True, tag="reached"):
    """It has come to a stage."""

    stage: Stage


class Progressed(msgspec.Struct, frozen=True, tag="progress"):
    """It is loading."""

    stage: str
    """As loading names it, for example "weights"."""
    fraction: float


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """It is there, whatever it does."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """It cannot go on, and ends after this."""

    code: str
    message: str


Report = Reached | Progressed | Alive | Failed | LoadAnswer
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Report)


class ReportReader:
    """Makes reports of a pipe's bytes, wherever these are cut."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Report]:
        """Returns the reports that are complete with these bytes.

        Args:
            data: What was read; an unfinished line is kept.

        Raises:
            ProtocolError: A line is no report.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST:
            raise ProtocolError(f"a report of a rank has more than {LONGEST} bytes")
        try:
            return [_decoder.decode(line) for line in lines]
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"a rank sent what is no report: {error}") from error


class Reports:
    """Sends reports, from any thread, on a pipe that nothing else writes to.

    Args:
        descriptor: Of the pipe.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    @classmethod
    def in_place_of_stdout(cls) -> "Reports":
        """Takes standard output; what libraries print from now on goes to the log."""
        descriptor = os.dup(_STDOUT)
        os.dup2(_STDERR, _STDOUT)
        return cls(descriptor)

    def send(self, report: Report) -> None:
        """Sends one; a leader that is gone does not read it."""
        if isinstance(report, Failed):
            report = Failed(report.code, report.message[:_MESSAGE])
        elif isinstance(report, LoadAnswer) and report.problem is not None:
            problem = report.problem[:_MESSAGE]
            report = msgspec.structs.replace(report, problem=problem)
        with self._lock, contextlib.suppress(BrokenPipeError):
            os.write(self._descriptor, _encoder.encode(report) + b"\n")

    def keep_alive(self, every_s: float) -> None:
        """Gives signs of life for as long as this process runs."""
        while True:
            self.send(Alive())
            time.sleep(every_s)
