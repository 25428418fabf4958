"""The scheduler of bench/scale.py: as `tokenmill schedule` runs it, with a stopwatch.

    scale_scheduler.py URL FILE [--standby]

On SIGUSR1 it writes when each of its parts ended, by the monotonic clock, and how long
it took: `plan` in processor time, `step` (a plan and its dispatches) and `read` by the
clock.
"""

import asyncio
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from tokenmill.scheduler import dispatching
from tokenmill.scheduler.dispatching import Dispatcher
from tokenmill.scheduler.loop import serve
from tokenmill.scheduler.reading import LaneReader
from tokenmill.shared.config_load import load_config
from tokenmill.shared.logging import configure
from tokenmill.shared.redis import connect

P = ParamSpec("P")
T = TypeVar("T")
SPANS: dict[str, list[tuple[float, float]]] = {"plan": [], "step": [], "read": []}


def timed(name: str, work: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Keeps how long a part took by the clock."""

    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        began = time.monotonic()
        try:
            return await work(*args, **kwargs)
        finally:
            now = time.monotonic()
            SPANS[name].append((now, now - began))

    return run


def timed_plan(work: Callable[P, T]) -> Callable[P, T]:
    """Keeps the processor time of a plan."""

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        began = time.thread_time()
        made = work(*args, **kwargs)
        SPANS["plan"].append((time.monotonic(), time.thread_time() - began))
        return made

    return run


def write(file: Path) -> None:
    """Leaves what was kept; the file appears whole or not at all."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(SPANS), encoding="utf-8")
    part.rename(file)
    for spans in SPANS.values():
        spans.clear()


def put_stopwatches() -> None:
    """Times the parts of every scheduler that this process makes from now on."""
    names = vars(dispatching)
    names["plan_parts"] = timed_plan(names["plan_parts"])
    for kind, name in ((Dispatcher, "step"), (LaneReader, "read")):
        setattr(kind, name, timed(name, getattr(kind, name)))


def main() -> int:
    """Runs the scheduler until SIGTERM."""
    url, file = sys.argv[1], Path(sys.argv[2])
    put_stopwatches()
    signal.signal(signal.SIGUSR1, lambda *_: write(file))
    config = load_config().config
    configure(config.log, "scheduler")

    async def run() -> int:
        client = connect(url, max_connections=config.redis.max_connections)
        return await serve(client, config, standby="--standby" in sys.argv)

    return asyncio.run(run())


if __name__ == "__main__":
    sys.exit(main())
