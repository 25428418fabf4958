"""The followers of a tensor-parallel group: started, watched and ended together.

One thread does it all and lives as long as they do: on Linux a child that asked to end
with its parent ends with the *thread* that started it.
"""

import contextvars
import os
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import structlog

from ..shared.errors import ModelLoadError, ProtocolError
from .engine.parallel.adapter_orders import AdapterOrder, LoadAnswer
from .rank_blame import BLAME_S, Blame
from .rank_follower import COMMAND, Follower
from .rank_order import RankOrder
from .rank_reports import Alive, Failed, Progressed, Reached, Report, Stage

T = TypeVar("T")
LOADING_SILENCE_S: Final = 60.0
"""While it loads, native code may keep a follower from any sign of life."""
_TICK_S: Final = 0.1
_END_S: Final = 2.0

OnProgress = Callable[[int, str, float], None]
"""Called, from the watching thread, with a rank, a stage and its fraction done."""


class Ranks:
    """Ranks 1 and up of one group. The first that is lost takes all along.

    Args:
        orders: One for each follower.
        silence_s: How long a loaded follower may give no sign of life.
        inherited: Descriptors that followers are to have.
        on_progress: Told how far each follower's load is.
        command: The program of a follower.
    """

    def __init__(
        self,
        orders: Sequence[RankOrder],
        *,
        silence_s: float,
        inherited: Sequence[int] = (),
        on_progress: OnProgress | None = None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._followers = [Follower(order) for order in orders]
        self._silence_s = silence_s
        self._inherited = tuple(inherited)
        self._on_progress = on_progress
        self._command = tuple(command)
        self._log = structlog.get_logger()
        self._changed = threading.Condition()
        self._telling = threading.Lock()
        self._lost: str | None = None
        self._blame = Blame(self._followers)
        self._on_lost: list[Callable[[str], None]] = []
        self._on_answer: Callable[[int, LoadAnswer], None] | None = None
        self._ending = False
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(self._run,),
            name="ranks",
            daemon=True,
        )

    @property
    def lost(self) -> str | None:
        """Which rank was lost, and how; None while all are there."""
        return self._lost

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the followers that were started."""
        return tuple(one.pid for one in self._followers if one.pid is not None)

    @property
    def size(self) -> int:
        """How many followers there are."""
        return len(self._followers)

    def start(self) -> None:
        """Starts the followers, and the thread that watches them."""
        self._thread.start()

    def wait(self, stage: Stage) -> None:
        """Waits until every follower has come to a stage.

        Raises:
            ModelLoadError: One is lost.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._lost or self._all_at(stage))
        self._raise_if_lost()

    def run(self, work: Callable[[], T]) -> T:
        """Returns what `work` returns, or raises as soon as a rank is lost.

        What waits for a lost rank may wait for long, on a GPU for ever: it is left
        behind in a thread of its own.

        Raises:
            ModelLoadError: A rank is lost, which goes before what `work` raises.
        """
        ended: list[tuple[T | None, BaseException | None]] = []

        def call() -> None:
            try:
                outcome: tuple[T | None, BaseException | None] = (work(), None)
            except BaseException as error:  # noqa: BLE001 - raised again by the caller
                outcome = (None, error)
            with self._changed:
                ended.append(outcome)
                self._changed.notify_all()

        # Log lines of the thread carry the same names as ours.
        run = contextvars.copy_context().run
        threading.Thread(target=run, args=(call,), name="shard", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self._lost or ended)
        result, error = ended[0] if ended else (None, None)
        if error is not None:
            self._wait_for_cause()
        self._raise_if_lost()
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # a T where there is no error

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Calls back, from another thread, once a rank is lost; at once if one was."""
        with self._changed:
            if self._lost is None:
                self._on_lost.append(callback)
                return
        callback(self._lost)

    def tell(self, order: AdapterOrder) -> None:
        """Sends an order to every follower; those that are lost do not hear it."""
        with self._telling:
            for follower in self._followers:
                follower.tell(order)

    def on_answer(self, callback: Callable[[int, LoadAnswer], None]) -> None:
        """Has each answer to an order handed on, from the watching thread."""
        self._on_answer = callback

    def fail(self, reason: str, *, misses_another: bool = False) -> None:
        """Says that the leader's own part has failed; ends all.

        Args:
            reason: What is taken for the cause if no follower turns out to be lost.
            misses_another: It waited in vain for another rank.
        """
        self._wait_for_cause()
        self._lose(self._blame.naming_the_silent(reason) if misses_another else reason)

    def close(self) -> None:
        """Lets the followers end, and makes those that do not."""
        self._ending = True
        for follower in self._followers:
            follower.let_go()
        self._thread.join(_END_S)
        if self._thread.is_alive():
            self._log.warning("ranks_killed", pids=self.pids)
            self._kill()
            self._thread.join(_END_S)

    # --- the watching thread ---------------------------------------------------------
    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                for follower in self._followers:
                    if self._ending:
                        break
                    pipe = follower.start(self._command, self._inherited)
                    selector.register(pipe, selectors.EVENT_READ, follower)
                while selector.get_map():
                    self._turn(selector)
            self._believe(self._blame.verdict())
        except OSError as error:
            self._lose(f"a rank could not be started: {error}")
        except BaseException as error:  # noqa: BLE001 - nobody else would notice
            self._lose(f"the watch over the ranks failed: {error!r}")
        finally:
            for follower in self._followers:
                follower.reap()

    def _turn(self, selector: selectors.BaseSelector) -> None:
        self._hear(selector, _TICK_S)
        # Whoever was alive until now has said so by now, even if this very process was
        # stopped for longer than they may be silent.
        now = time.monotonic()
        self._hear(selector, 0.0)
        self._judge(now)

    def _hear(self, selector: selectors.BaseSelector, within_s: float) -> None:
        for key, _ in selector.select(within_s):
            follower: Follower = key.data
            data = os.read(key.fd, 65_536)
            if data:
                self._read(follower, data)
            else:
                selector.unregister(key.fd)
                self._ended(follower)

    def _read(self, follower: Follower, data: bytes) -> None:
        try:
            for report in follower.read(data):
                self._take(follower, report)
        except ProtocolError as error:
            self._lose(f"{follower.name}: {error}")

    def _take(self, follower: Follower, report: Report) -> None:
        if isinstance(report, Reached):
            with self._changed:
                follower.stage = report.stage
                self._changed.notify_all()
        elif isinstance(report, Progressed):
            if self._on_progress is not None:
                rank = follower.order.rank
                self._on_progress(rank, report.stage, report.fraction)
        elif isinstance(report, Failed):
            follower.has_failed = True
            self._blame.hear(follower, report, time.monotonic())
        elif isinstance(report, LoadAnswer):
            if self._on_answer is not None:
                self._on_answer(follower.order.rank, report)
        else:
            assert isinstance(report, Alive)

    def _ended(self, follower: Follower) -> None:
        how = follower.reap()
        if not follower.has_failed and not self._ending:
            self._lose(f"{follower.name} {how}")

    def _judge(self, now: float) -> None:
        if self._ending or self._lost is not None:
            return
        for follower in self._followers:
            is_loaded = follower.stage is Stage.READY
            limit_s = self._silence_s if is_loaded else LOADING_SILENCE_S
            if follower.is_running and now - follower.heard_at > limit_s:
                self._lose(
                    f"{follower.name} gave no sign of life for {limit_s:g} s, as when "
                    "it is stopped or its host is overloaded"
                )
                return
        self._believe(self._blame.verdict(now))

    def _believe(self, account: str | None) -> None:
        if account is not None:
            self._lose(account)

    # --- any thread ------------------------------------------------------------------
    def _all_at(self, stage: Stage) -> bool:
        return all(follower.stage >= stage for follower in self._followers)

    def _wait_for_cause(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._lost, timeout=2 * BLAME_S)

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise ModelLoadError(self._lost)

    def _lose(self, reason: str) -> None:
        with self._changed:
            if self._lost is not None or self._ending:
                return
            self._lost = reason
            callbacks, self._on_lost = self._on_lost, []
            self._changed.notify_all()
        self._log.error("rank_lost", reason=reason)
        # Whatever waits for one of them, here or in another rank, now fails at once.
        self._kill()
        for callback in callbacks:
            callback(reason)

    def _kill(self) -> None:
        for follower in self._followers:
            follower.kill()
