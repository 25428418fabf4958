"""One follower, as its leader sees it: a process, its orders and its reports."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final

from ..shared.losses import how_it_ended
from ..shared.messages import encode
from .engine.parallel.adapter_orders import AdapterOrder
from .rank_order import RankOrder, follower_environment
from .rank_reports import Report, ReportReader, Stage

COMMAND: Final = (sys.executable, "-m", "tokenmill.workers.rank_process")
_REAP_S: Final = 2.0
"""A process whose pipe is closed has this long to be gone."""


class Follower:
    """A follower's process.

    Args:
        order: What it is to do.
    """

    def __init__(self, order: RankOrder) -> None:
        self.order = order
        self.stage = Stage.STARTED
        self.heard_at = time.monotonic()
        self.has_failed = False
        """It has told how it failed."""
        self._process: subprocess.Popen[bytes] | None = None
        self._reader = ReportReader()

    @property
    def pid(self) -> int | None:
        """Process id, once it was started."""
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it was started and not yet found ended."""
        return self._process is not None and self._process.returncode is None

    @property
    def is_silent(self) -> bool:
        """Whether it runs and has told of no failure."""
        return self.is_running and not self.has_failed

    @property
    def name(self) -> str:
        """The rank in words, with its process id."""
        return f"{self.order.name} (pid {self.pid})"

    def start(self, command: Sequence[str], inherited: Sequence[int]) -> int:
        """Starts it and gives it its order.

        Args:
            command: Its program.
            inherited: Descriptors that it is to have.

        Returns:
            The pipe on which it reports.
        """
        self._process = subprocess.Popen(
            [*command, self.order.group, self.order.name],  # the words are for `ps`
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=follower_environment(os.environ),
            pass_fds=inherited,
            # Ctrl-C on a terminal must reach the leader alone, which then drains.
            start_new_session=True,
        )
        self.heard_at = time.monotonic()
        assert self._process.stdout is not None
        self.tell(self.order)
        return self._process.stdout.fileno()

    def tell(self, order: RankOrder | AdapterOrder) -> None:
        """Sends a line to its standard input, from any thread.

        Args:
            order: What it is to do. One that is gone does not hear it.
        """
        if self._process is None or self._process.stdin is None:
            return
        # The end of a process is noticed by its reports', and a closed pipe is ours.
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(encode(order) + b"\n")
            self._process.stdin.flush()

    def read(self, data: bytes) -> list[Report]:
        """Returns the reports in what it sent.

        Raises:
            ProtocolError: It sent something else.
        """
        self.heard_at = time.monotonic()
        return self._reader.feed(data)

    def let_go(self) -> None:
        """Closes its standard input, on which it ends by itself."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def kill(self) -> None:
        """Ends it, stopped or not."""
        if self._process is not None:
            self._process.kill()

    def reap(self) -> str:
        """Waits for the end of a process that has closed its reports; says how."""
        if self._process is None:
            return "was not started"
        try:
            code = self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return how_it_ended(code)
