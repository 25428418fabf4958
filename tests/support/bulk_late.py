"""A model that nobody serves until a test says so: a run of its lines does not end.

What is to happen in the midst of a run then does, however slow the machine is.
"""

import subprocess
import sys
from collections.abc import Sequence

from tokenmill.shared.keys import MODELS

from .bulk_pool import BulkPool, request
from .waiting import wait_until_sync

MODEL = "late"
FIRST = 20
"""Lines that are for the pool's own model."""


class Late:
    """Makes the model known; `end` must follow.

    Args:
        pool: Whose own model answers at once.
    """

    def __init__(self, pool: BulkPool) -> None:
        self._pool = pool
        self._output = pool.up.directory / "late.out"
        self._worker: subprocess.Popen[bytes] | None = None
        card = pool.redis.hget(MODELS, "echo")
        pool.redis.hset(MODELS, MODEL, card.replace(b'"echo"', b'"late"', 1))

    @staticmethod
    def lines(count: int) -> Sequence[object]:
        """Lines of which some are answered at once, and the rest when it is served."""
        rest = range(FIRST, count)
        return [
            *(request(number) for number in range(FIRST)),
            *(request(number, model=MODEL) for number in rest),
        ]

    def serve(self) -> None:
        """Starts its worker."""
        with self._output.open("wb") as out:
            self._worker = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tokenmill", "work", "--name", MODEL),
                    *("--engine", "echo"),
                ],
                env={**self._pool.up.env, "TOKENMILL_URL": self._pool.url},
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        wait_until_sync(
            lambda: "ready: " in self._output.read_text(errors="replace"),
            what="the late worker",
        )

    def end(self) -> None:
        """Ends its worker, and nobody knows of it any more."""
        if self._worker is not None:
            self._worker.terminate()
            assert self._worker.wait(60) == 0
        self._pool.redis.hdel(MODELS, MODEL)
