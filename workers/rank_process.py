"""A follower's process: `python -m tokenmill.workers.rank_process`.

Started by `tokenmill work --tp`, never by hand. Its order comes on standard input, then
which adapters to load and drop, and its end means that the leader is gone; its reports
leave on what was standard output.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

import msgspec
import structlog

from ..shared.errors import EngineError, TokenmillError
from ..shared.logging import configure
from ..shared.pool.orphans import end_with
from .extras import model_stack
from .rank_order import RankOrder
from .rank_orders import LeaderLines, Orders
from .rank_reports import Failed, Progressed, Reached, Reports, Stage

EXIT_UNEXPECTED: Final = 70
"""EX_SOFTWARE: a fault of ours."""


def main() -> NoReturn:
    """Runs one follower to its end."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # A service manager may signal every process of a service. The leader drains
        # first, with the help of this one, and ends it then.
        signal.signal(number, signal.SIG_IGN)
    reports = Reports.in_place_of_stdout()
    lines, orders = LeaderLines(), Orders()
    line = lines.next()
    if line is None:
        _end(0)
    order = msgspec.json.decode(line, type=RankOrder)
    if not end_with(order.leader, signal.SIGKILL):
        _end(0)
    _in_background(lambda: _obey(orders, lines, reports))
    _in_background(lambda: reports.keep_alive(order.alive_s))
    configure(order.log, "worker")
    structlog.contextvars.bind_contextvars(group=order.group, rank=order.rank)
    _end(_work(order, reports, orders))


def _work(order: RankOrder, reports: Reports, orders: Orders) -> int:
    """Follows, and tells the leader how that ended. Returns the exit code."""
    try:
        with model_stack():
            _follow(order, reports, orders)
    except TokenmillError as error:
        reports.send(Failed(error.code, str(error)))
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - told to the leader, which ends all
        structlog.get_logger().error("rank_failed", exc_info=error)
        reports.send(Failed(EngineError.code, f"{type(error).__name__}: {error}"))
        return EXIT_UNEXPECTED
    return 0


def _follow(order: RankOrder, reports: Reports, orders: Orders) -> None:
    from .engine.adapters.serving import follow_adapters
    from .engine.parallel.communicator import connect_group
    from .engine.parallel.runner import follow
    from .engine.parallel.shard import Shard
    from .runner_loading import load_model_runner

    if order.backend == "nccl":
        import torch

        torch.cuda.set_device(order.rank)
    reports.send(Reached(Stage.ARRIVED))
    communicator = connect_group(
        Shard(order.rank, order.size),
        order.rendezvous,
        order.backend,
        order.worker.rank_timeout_s,
    )
    runner = load_model_runner(
        Path(order.path),
        order.model,
        order.worker,
        lambda stage, fraction: reports.send(Progressed(stage, fraction)),
        communicator,
    )
    if order.worker.adapters_memory_mb:
        orders.adapters = follow_adapters(
            runner, reports.send, max_rank=order.worker.max_adapter_rank
        )
    reports.send(Reached(Stage.READY))
    follow(runner, communicator)
    communicator.close()


def _obey(orders: Orders, lines: LeaderLines, reports: Reports) -> None:
    """Ends this process at the end of its input: the leader let it go, or is gone."""
    try:
        orders.obey(lines)
    except Exception as error:  # noqa: BLE001 - told to the leader, which ends all
        structlog.get_logger().error("rank_failed", exc_info=error)
        reports.send(Failed(EngineError.code, f"{type(error).__name__}: {error}"))
        _end(EXIT_UNEXPECTED)
    _end(0)


def _in_background(work: Callable[[], None]) -> None:
    threading.Thread(target=work, daemon=True).start()


def _end(code: int) -> NoReturn:
    """Ends at once: other threads may be in native code that nothing can stop."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)  # even where nobody reads the log any more


if __name__ == "__main__":
    main()
