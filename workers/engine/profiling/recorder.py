"""Writes what was timed, as a trace that Perfetto and chrome://tracing open.

The form is Chrome's JSON array with one event a line and no closing bracket, which
readers do not need: a file of a process that was killed is whole up to its last step.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import structlog

DETAIL_EVERY: Final = 8
"""Each eighth step is timed kernel by kernel. That makes it slower, so only the others
tell how long steps and phases take."""
MOST_BYTES: Final = 512 * 1024 * 1024
"""Then no more is written."""
_FLUSH_S: Final = 1.0
_log = structlog.get_logger(__name__)


class Recorder:
    """Keeps the spans of the step that runs, and writes them when it ends.

    Args:
        path: The file; one that is there is replaced.
        facts: What ran, for whoever compares two files.
    """

    def __init__(self, path: Path, facts: Mapping[str, object]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.detail = False
        """Whether the step that runs is timed kernel by kernel."""
        self._file = path.open("w", encoding="utf-8")
        self._size = 0
        self._steps = 0
        self._spans: list[tuple[str, str, int, int]] = []
        self._began = 0
        self._flushed = 0.0
        self._file.write("[\n")
        self._write({"name": "tokenmill", "ph": "M", "args": dict(facts)})
        name = {"name": f"worker of {facts.get('model', 'a model')}"}
        self._write({"name": "process_name", "ph": "M", "args": name})

    def begin(self) -> None:
        """A step begins."""
        is_turn = self._steps % DETAIL_EVERY == DETAIL_EVERY - 1
        self.detail = is_turn and not self._file.closed
        self._spans.clear()
        self._began = time.perf_counter_ns()

    def add(self, kind: str, name: str, began_ns: int) -> None:
        """Notes that something took from `began_ns` until now.

        Args:
            kind: `phase` or `kernel`.
            name: What it was.
            began_ns: By `time.perf_counter_ns`.
        """
        self._spans.append((kind, name, began_ns, time.perf_counter_ns()))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a phase of the step for the length of a block."""
        began = time.perf_counter_ns()
        try:
            yield
        finally:
            self.add("phase", name, began)

    def end(self, tokens: int, sequences: int) -> None:
        """The step ended; one that computed nothing is not written.

        Args:
            tokens: Rows that were computed.
            sequences: Whose they were.
        """
        ended = time.perf_counter_ns()
        if not tokens or self._file.closed:
            return
        try:
            self._record(ended, tokens, sequences)
        except OSError as error:  # a full disk must not end anyone's job
            self._stopped(error)

    def _record(self, ended: int, tokens: int, sequences: int) -> None:
        self._steps += 1
        for kind, name, began, end in self._spans:
            self._event(kind, name, began, end)
        args = {"tokens": tokens, "sequences": sequences, "detail": self.detail}
        self._event("step", "step", self._began, ended, args)
        if time.monotonic() - self._flushed > _FLUSH_S:
            self._file.flush()
            self._flushed = time.monotonic()
        if self._size > MOST_BYTES:
            _log.warning("profile_full", path=str(self.path), bytes=self._size)
            self.close()

    def close(self) -> None:
        """Writes what is left; later steps are not recorded."""
        if self._file.closed:
            return
        try:
            self._file.close()
        except OSError as error:
            self._stopped(error)

    def _stopped(self, error: OSError) -> None:
        """Says once that the file cannot be written, and writes no more."""
        _log.warning(
            "profile_stopped",
            path=str(self.path),
            error=str(error),
            cure="free disk space, or profile into another directory",
        )
        with suppress(OSError):  # closing writes what is left; the file is closed then
            self._file.close()

    def _event(
        self,
        kind: str,
        name: str,
        began: int,
        ended: int,
        args: Mapping[str, object] | None = None,
    ) -> None:
        event: dict[str, object] = {
            "name": name,
            "cat": kind,
            "ph": "X",
            "ts": began / 1000,
            "dur": (ended - began) / 1000,
        }
        self._write(event if args is None else {**event, "args": args})

    def _write(self, event: Mapping[str, object]) -> None:
        line = json.dumps({**event, "pid": 1, "tid": 1}, separators=(",", ":"))
        self._size += self._file.write(f"{line},\n")
