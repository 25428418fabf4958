"""Driving the run of an output to its end, and finishing the output."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from ...shared.bulk.messages import RunSpec
from ..client import Client
from .accepted import Accepted
from .answers import RequestForm
from .documents import DocumentReader, FileSource
from .driver import BulkDriver
from .finishing import finish
from .flow import Progress, Report, Source
from .identity import Identity
from .index import Index
from .line_source import LineSource
from .off_loop import off_loop
from .opening import Begun
from .place import Place
from .requests import RequestReader
from .sink import FileSink
from .summaries import SummaryForm

OnProgress = Callable[[Progress], None]
Copy = Callable[[bytes], None]


class Drive(msgspec.Struct, frozen=True):
    """A run that is to be driven to its end."""

    mill: Client
    accepted: Accepted
    begun: Begun
    keep_ms: int
    on_progress: OnProgress

    async def to_its_end(
        self, place: Place, index: Index, copy: Copy | None = None
    ) -> Report:
        """Drives it, and makes the output of what was written.

        Args:
            place: The output.
            index: Its index.
            copy: Is given every line that is written.
        """
        spec = self.begun.spec
        form = RequestForm(self.begun.run) if spec.kind == "run" else SummaryForm()
        sink = FileSink(place, index, form, copy)
        driver = BulkDriver(
            self.mill,
            _source(spec, index, self.accepted),
            sink,
            spec,
            run_id=self.begun.run,
            reopen=True,
            on_progress=self.on_progress,
            keep_ms=self.keep_ms,
        )
        try:
            report = await driver.run()
        finally:
            sink.close()
        if report.state == "complete":
            ordered = self.begun.ordered
            await off_loop(
                lambda check: finish(place, index, ordered=ordered, check=check)
            )
        return report


def _source(spec: RunSpec, index: Index, accepted: Accepted) -> Source:
    path = Path(index.fact("input", str) or "")
    identity = index.fact("source", Identity)
    total = None if identity is None else identity.items
    if spec.kind == "run":
        return LineSource(path, index, RequestReader(accepted, spec.model), total)
    if index.fact("in_lines", bool):
        return LineSource(path, index, DocumentReader(), total)
    return FileSource(path, index, total)
