"""Child processes: started, watched, restarted with back-off, drained in order."""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from .orphans import die_with_parent
from .output import Output, Sink

EXIT_CONFIG: Final = 2
"""A child that ends so was started wrongly: again would be the same."""
EXIT_REDIS: Final = 3
"""Redis was away: no fault of the child."""
EXIT_MODEL: Final = 14
"""The model cannot be loaded: tried again a few times, then given up."""
EXIT_HEALTH: Final = 20
"""A version did not pass its health set: again would be the same."""
EXIT_NOT_STARTED: Final = 71
"""EX_OSERR: the system would not start a process, for lack of memory or of ids."""
_MODEL_TRIES: Final = 3
_FIRST_WAIT_S: Final = 0.5
_LONGEST_WAIT_S: Final = 30.0
_STEADY_S: Final = 30.0
"""A child that has lived this long starts anew with the shortest wait."""
_KILL_WAIT_S: Final = 5.0


class ChildState(StrEnum):
    """Where a child is."""

    STARTING = "starting"
    RUNNING = "running"
    """It was seen to do its work."""
    WAITING = "waiting"
    """It died; a restart is due."""
    FAILED = "failed"
    """It is not started again."""
    STOPPED = "stopped"


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to run."""

    name: str
    command: tuple[str, ...]
    env: Callable[[], Mapping[str, str]]
    """Called at each start, so that each incarnation can have a name of its own."""
    essential: bool = True
    """Whether the pool cannot work without it."""
    grace_s: float = 5.0
    """How long it may take to end when asked."""
    tries: int | None = None
    """Starts that may end before it was ever seen to do its work; None: any number."""


class Child:
    """One supervised process.

    Args:
        spec: What to run.
        output: Where its output goes.
        on_change: Called whenever its state changes.
        on_exit: Awaited with the child and the environment of an incarnation of it
            that has ended.
    """

    def __init__(
        self,
        spec: ChildSpec,
        output: Output,
        on_change: Callable[["Child"], None],
        on_exit: Callable[["Child", Mapping[str, str]], Awaitable[None]] | None = None,
    ) -> None:
        self.spec = spec
        self.state = ChildState.STARTING
        self.env: Mapping[str, str] = {}
        self.exit_code: int | None = None
        self.restarts = 0
        self.retry_in_s = 0.0
        self._output = output
        self._on_change = on_change
        self._on_exit = on_exit
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._ending = False
        self._worked = False
        self._waiting = asyncio.Event()
        self._wait_s = _FIRST_WAIT_S
        self._model_failures = 0
        self._failures = 0
        self._began = 0.0

    def age_s(self) -> float:
        """Seconds since the last start."""
        return time.monotonic() - self._began

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        alive = self._process is not None and self._process.returncode is None
        return self._process.pid if alive and self._process is not None else None

    @property
    def is_stopping(self) -> bool:
        """Whether it was asked to end."""
        return self._stopping

    def confirm(self) -> None:
        """Notes that the child was seen to do its work."""
        if self.state is ChildState.STARTING:
            self._worked = True
            self._change(ChildState.RUNNING)

    def let_end(self) -> None:
        """Does not start it again when it has ended; it is not asked to."""
        self._ending = True
        self._waiting.set()

    def keep(self) -> None:
        """Takes `let_end` back, where it has not ended yet."""
        self._ending = False
        self._waiting.clear()

    async def run(self) -> None:
        """Keeps the process running until it is stopped or fails for good."""
        while True:
            self._began = time.monotonic()
            await self._run_once()
            if self._stopping or self._ending:
                break  # set while the process ran
            if self._is_final():
                self._change(ChildState.FAILED)
                return
            if self.age_s() > _STEADY_S:
                self._wait_s = _FIRST_WAIT_S
            # Jitter keeps children that fell together from rising together.
            self.retry_in_s = self._wait_s * random.uniform(0.7, 1.0)  # noqa: S311
            self._wait_s = min(_LONGEST_WAIT_S, self._wait_s * 2)
            self._change(ChildState.WAITING)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.retry_in_s):
                    await self._waiting.wait()
            if self._waiting.is_set():
                break
            self.restarts += 1
        self._change(ChildState.STOPPED)

    async def _run_once(self) -> None:
        self.env = dict(self.spec.env())
        sink = self._output.open(self.spec.name)
        try:
            self._process = await self._spawn(sink)
        except OSError:
            self.exit_code = EXIT_NOT_STARTED
            return
        finally:
            sink.started()
        self._change(ChildState.STARTING)
        self.exit_code = await self._process.wait()
        await sink.close()
        if self._on_exit is not None:
            await self._on_exit(self, self.env)

    async def _spawn(self, sink: Sink) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self.spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sink.stdout,
            stderr=sink.stderr,
            env={**os.environ, **self.env},
            # Ctrl-C on a terminal must reach the supervisor alone.
            start_new_session=True,
            preexec_fn=die_with_parent(signal.SIGKILL),
        )

    def _is_final(self) -> bool:
        if self.exit_code == EXIT_MODEL:
            self._model_failures += 1
        else:
            self._model_failures = 0
        self._failures += self.exit_code != EXIT_REDIS
        tries = self.spec.tries
        if tries is not None and not self._worked and self._failures >= tries:
            return True
        return (
            self.exit_code in (EXIT_CONFIG, EXIT_HEALTH)
            or self._model_failures >= _MODEL_TRIES
        )

    async def stop(self, task: "asyncio.Task[None]") -> None:
        """Asks the process to end, then makes it.

        Args:
            task: The one that runs `run`.
        """
        self._stopping = True
        if self.pid is None:
            task.cancel()
        self.signal(signal.SIGTERM)
        _, late = await asyncio.wait([task], timeout=self.spec.grace_s)
        if late:
            self.signal(signal.SIGKILL)
            _, late = await asyncio.wait([task], timeout=_KILL_WAIT_S)
        if late:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        if self.state not in {ChildState.STOPPED, ChildState.FAILED}:
            self._change(ChildState.STOPPED)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal; harmless when the process is gone."""
        if self.pid is not None and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def _change(self, state: ChildState) -> None:
        self.state = state
        self._on_change(self)


class Supervisor:
    """The children of one pool, in the order in which they are drained.

    Args:
        children: In starting order; they are stopped in groups, last first.
    """

    def __init__(self, children: Sequence[Child]) -> None:
        self.children = list(children)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Starts all children."""
        for child in self.children:
            self._run(child)

    def _run(self, child: Child) -> None:
        name = child.spec.name
        self._tasks[name] = asyncio.create_task(child.run(), name=name)

    def add(self, child: Child) -> None:
        """Starts one more; no other may have its name."""
        self.children.append(child)
        self._run(child)

    async def remove(self, children: Sequence[Child]) -> None:
        """Stops some and forgets them."""
        names = [child.spec.name for child in children]
        await self.stop(names)
        # In place: others hold this list too.
        self.children[:] = [one for one in self.children if one.spec.name not in names]
        for name in names:
            self._tasks.pop(name, None)

    def tasks(self) -> list["asyncio.Task[None]"]:
        """The tasks that keep the children running."""
        return list(self._tasks.values())

    async def stop(self, names: Sequence[str]) -> None:
        """Stops some of the children, all at once, and waits for them."""
        chosen = [child for child in self.children if child.spec.name in names]
        await asyncio.gather(
            *(child.stop(self._tasks[child.spec.name]) for child in chosen)
        )

    def kill(self) -> None:
        """Ends all children at once."""
        for child in self.children:
            child.signal(signal.SIGKILL)
