"""A tensor-parallel group as its leader has it: started, loaded, watched, ended."""

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from ..shared.config import LogConfig, ModelConfig, WorkerConfig
from ..shared.errors import TokenmillError
from ..shared.pool.placement import available_cores
from .rank_order import RankOrder, orders, share_threads
from .rank_place import check_degree, choose_place
from .rank_progress import LeastProgress, Progress
from .rank_rendezvous import Rendezvous
from .rank_reports import Stage
from .ranks import Ranks

if TYPE_CHECKING:
    from .engine.model.runner import TransformersRunner
    from .engine.parallel.communicator import Communicator
    from .rank_runner import GroupRunner

LoadShard = Callable[
    [WorkerConfig, Progress | None, "Communicator"], "TransformersRunner"
]
"""Loads this process's shard with its own share of threads and a common progress."""
_SIGNS: Final = 10
"""Signs of life in the time that a rank may be silent."""
_STOP_S: Final = 2.0
"""Followers are told to stop within this time, or not at all."""


class RankGroup:
    """Rank 0 of a group and its followers; this process leads.

    Args:
        first: The order of rank 1.
        worker: Settings of the whole worker, on the device of the group.
        threads: Of each rank.
        rendezvous: Where they meet.
        progress: Told how far the slowest rank is.
    """

    def __init__(
        self,
        first: RankOrder,
        worker: WorkerConfig,
        threads: tuple[int, ...],
        rendezvous: Rendezvous,
        progress: Progress | None,
    ) -> None:
        self.size = first.size
        self._first = first
        self._worker = msgspec.structs.replace(worker, threads=threads[0])
        self._rendezvous = rendezvous
        self._progress = LeastProgress(first.size, progress or _silent)
        self._runner: GroupRunner | None = None
        self._log = structlog.get_logger()
        self.ranks = Ranks(
            orders(first, worker, threads),
            silence_s=worker.rank_timeout_s / 2,
            inherited=rendezvous.inherited,
            on_progress=self._progress.update,
        )

    @classmethod
    def start(
        cls,
        path: Path,
        model: ModelConfig,
        worker: WorkerConfig,
        progress: Progress | None = None,
        log: LogConfig | None = None,
    ) -> "RankGroup":
        """Checks what was asked for, then starts the followers.

        Args:
            path: The model's directory.
            model: Its settings; `tp` is the number of ranks.
            worker: Limits of the whole worker.
            progress: Told how far the slowest rank is.
            log: How followers log.

        Raises:
            ConfigError: The model does not split so, or there are too few devices.
            ModelLoadError: Its config.json cannot be read.
        """
        check_degree(path, model.tp)
        place = choose_place(worker.device, model.tp)
        threads = share_threads(worker.threads or _cores(), model.tp)
        worker = msgspec.structs.replace(worker, device=place.device)
        rendezvous = Rendezvous()
        name = structlog.contextvars.get_contextvars().get("group", "w")
        first = RankOrder(
            group=str(name),
            rank=1,
            size=model.tp,
            leader=os.getpid(),
            path=str(path),
            model=model,
            worker=worker,
            backend=place.backend,
            rendezvous=rendezvous.path,
            # Half of the time-out of an exchange may pass in silence.
            alive_s=worker.rank_timeout_s / 2 / _SIGNS,
            log=log or LogConfig(),
        )
        group = cls(first, worker, threads, rendezvous, progress)
        group.ranks.start()
        return group

    def load(self, load_shard: LoadShard) -> "GroupRunner":
        """Loads rank 0's shard beside the followers'.

        Args:
            load_shard: Loads it.

        Returns:
            The runner of the whole group.

        Raises:
            ModelLoadError: A rank is lost; the message has its own words.
        """
        runner = self.ranks.run(lambda: self._join(load_shard))
        self.ranks.wait(Stage.READY)
        self._runner = runner
        self._log.info("group_ready", size=self.size, followers=self.ranks.pids)
        return runner

    def _join(self, load_shard: LoadShard) -> "GroupRunner":
        from .engine.parallel.communicator import connect_group
        from .engine.parallel.shard import Shard
        from .rank_runner import GroupRunner

        # Starts take seconds of unequal length: nobody looks for who is not there yet.
        self.ranks.wait(Stage.ARRIVED)
        first = self._first
        communicator = connect_group(
            Shard(0, first.size),
            first.rendezvous,
            first.backend,
            self._worker.rank_timeout_s,
        )
        runner = load_shard(self._worker, self._own_progress, communicator)
        return GroupRunner(runner, communicator, self.ranks.fail)

    def _own_progress(self, stage: str, fraction: float) -> None:
        self._progress.update(0, stage, fraction)

    def close(self) -> None:
        """Ends the followers: by a word where they listen, else by force."""
        if self._runner is not None and self.ranks.lost is None:
            # It may be in a step that never ends, so nobody waits for it for long.
            told = threading.Thread(target=self._tell, name="stop", daemon=True)
            told.start()
            told.join(_STOP_S)
        self.ranks.close()
        self._rendezvous.close()

    def _tell(self) -> None:
        assert self._runner is not None
        with contextlib.suppress(TokenmillError):  # the end of their input says it too
            self._runner.close()


def _cores() -> int:
    return len(available_cores()) or os.cpu_count() or 1


def _silent(_stage: str, _fraction: float) -> None:
    """Progress that nobody watches."""
