"""One batch as the driver's thread works with it: its input, its parts, its lines."""

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...shared.bulk.messages import RunSpec
from ...shared.messages import DEFAULT_MODEL
from ..bulk.accepted import accepted_by
from ..bulk.answers import RequestForm
from ..bulk.index import Index
from ..bulk.line_source import LineSource
from ..bulk.requests import RequestReader
from .batches_files import Assembled, assemble
from .batches_input import BatchReader, Checked, InputBounds, check_input
from .batches_models import BatchRecord
from .batches_parts import Parts, PartSink
from .files_store import FilesStore

if TYPE_CHECKING:
    from .context import Gateway

Ended = Literal["completed", "failed", "expired", "cancelled"]
"""How a batch may end."""


class OneBatch:
    """What the driver's thread works with."""

    def __init__(
        self,
        record: BatchRecord,
        store: FilesStore,
        source: LineSource,
        sink: PartSink,
        parts: Parts,
        form: RequestForm,
    ) -> None:
        self.record = record
        self.store = store
        self.source = source
        self.sink = sink
        self._parts = parts
        self._form = form

    @classmethod
    async def made(
        cls,
        owner: "Gateway",
        record: BatchRecord,
        store: FilesStore,
        path: Path,
        index: Index,
        stop: threading.Event,
    ) -> "OneBatch":
        """Puts it together."""
        settings = owner.config.gateway
        bounds = InputBounds(stop, settings.max_batch_lines, settings.max_batch_bytes)
        pool = await accepted_by(owner.client, record.tenant)
        reader = BatchReader(RequestReader(pool, DEFAULT_MODEL), record.endpoint)
        form = RequestForm(record.run)
        parts = Parts(store, record.name)
        return cls(
            record,
            store,
            LineSource(
                path,
                index,
                reader,
                record.total or None,
                watch=bounds,
                called="the input file",  # whose path is none of the caller's business
            ),
            PartSink(parts, index, form),
            parts,
            form,
        )

    @property
    def spec(self) -> RunSpec:
        """Of the bulk run that its requests are."""
        return RunSpec(
            kind="run",
            tenant=self.record.tenant,
            priority=self.record.priority,
            name=self.record.id,
            input_label=self.record.input_file_id,
            output_label=self.record.id,
        )

    def check(self, stop: threading.Event) -> Checked:
        """Looks at the whole input."""
        checked = check_input(self.source, stop)
        self.source.total = checked.total
        return checked

    def assemble(
        self, record: BatchRecord, ended: Ended, stop: threading.Event
    ) -> Assembled:
        """Writes the files of its output, under the ids that a record has."""
        rest = None if ended == "completed" else self.source
        return assemble(self.store, record, self._parts, rest, self._form, ended, stop)
