"""What the jobs of a run were given and said, read before Redis lets go of them."""

import json
import threading
from typing import Self

import redis

from tokenmill.shared.keys import INPUTS, JobId

EVERY_S = 5.0
"""A job's keys stay for a minute once its outcome stands in the run."""


class JobReader:
    """Reads each ended job of a pool once, on a thread, within a `with` block.

    Args:
        url: The pool's Redis.
    """

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url)
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.asked: dict[str, str] = {}
        """Job id -> everything that its model was given."""
        self.answered: dict[str, str] = {}
        """Job id -> what its model said."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        self._thread.join()
        self._read()  # what has ended since
        self._client.close()

    def _run(self) -> None:
        while not self._leave.wait(EVERY_S):
            self._read()

    def _read(self) -> None:
        for name in self._client.scan_iter(match=INPUTS, count=1000):
            job = name.decode().rpartition(":")[2]
            if job not in self.answered:
                keys = JobId.parse(job).keys
                self._keep(job, *self._client.mget(keys.input(job), keys.output(job)))

    def _keep(self, job: str, request: bytes | None, result: bytes | None) -> None:
        if request is None or result is None:
            return
        turns = json.loads(request).get("messages") or ()
        self.asked[job] = "\n".join(turn["content"] for turn in turns)
        choices = json.loads(result).get("choices") or ({"text": ""},)
        self.answered[job] = choices[0]["text"]
