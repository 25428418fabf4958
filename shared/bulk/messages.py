"""What driver and orchestrator of a bulk run tell each other: frozen structs, JSON."""

from typing import Final, Literal

import msgspec

from ..adapter_names import split_name
from ..messages import (
    DEFAULT_MODEL,
    DEFAULT_TENANT,
    JobError,
    JobResult,
    Prompt,
    Timings,
    Usage,
)

VERSION: Final = 1
"""Newest version of the records below that this code reads."""
MAX_WORDS: Final = 150
"""Words of a summary where nothing else is asked for."""

Kind = Literal["run", "summarize"]
"""run: an item is one job. summarize: an item is one document of any length."""
Mode = Literal["abstractive", "extractive"]
"""abstractive: the model writes. extractive: key sentences, chosen without a model."""
Settled = Literal["succeeded", "failed", "cancelled"]
RunState = Literal["open", "complete", "cancelling", "cancelled"]
"""complete: every item of a run whose total is known has settled. cancelling: items
are still being settled as cancelled."""
FeedStatus = Literal["new", "known", "closed"]
"""known: this item and generation was fed before. closed: the run is cancelled."""


class RunSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a run is to do; the same for all of its items."""

    v: int = 1
    kind: Kind
    tenant: str = DEFAULT_TENANT
    priority: int = 0
    """Of its jobs within class bulk; a smaller number is more urgent."""
    name: str = ""
    """For people."""
    model: str = DEFAULT_MODEL
    """For documents, and for requests that name none; `m:a` has the adapter `a`."""
    style: str | None = None
    """How summaries are to be written, in the caller's words."""
    max_words: int = MAX_WORDS
    """Most words of a document's summary."""
    mode: Mode = "abstractive"
    window_tokens: int = 2048
    """Most tokens of a document's text in one job."""
    overlap_tokens: int = 128
    """Most tokens that a window repeats of the one before."""
    keep_tree: bool = False
    """Outcomes carry the partial summaries."""
    webhook: str | None = None
    """Told when the run is complete or cancelled."""
    input_label: str = ""
    """What is read, for people."""
    output_label: str = ""

    @property
    def base(self) -> str:
        """The model without the adapter that it may name."""
        return split_name(self.model)[0]

    @property
    def adapter(self) -> str | None:
        """Name of the model's adapter; None: it names none."""
        return split_name(self.model)[1]


class Document(msgspec.Struct, frozen=True, omit_defaults=True):
    """A text to be summarized."""

    text: str
    title: str = ""


class Item(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line or document of the input: exactly one of `prompt` and `document`."""

    seq: int
    """From 0, in the order of the input."""
    generation: int = 0
    """Raised when an item that failed is tried again."""
    replaces: Literal["failed", "cancelled"] | None = None
    """How the generation before settled, if this run has counted it: what comes now
    takes its place in the counters."""
    custom_id: str = ""
    prompt: Prompt | None = None
    """Model and sampling as given; tenant and class are the run's."""
    document: Document | None = None


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Characters of a document's text, from `start` up to `end`."""

    start: int
    end: int


class Node(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One partial summary of a document."""

    level: int
    """0 summarizes the text, each next one the summaries before."""
    index: int
    spans: tuple[Span, ...]
    """What of the source it covers."""
    text: str
    tokens: int = 0
    """Of what was summarized here."""
    job_id: str | None = None
    fell_back: str | None = None
    """Why the model's text was replaced by key sentences."""


class Summary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A document's summary."""

    text: str
    words: int
    windows: int
    """Into which the text was divided."""
    levels: int
    mode: Mode
    source_tokens: int = 0
    fell_back: tuple[str, ...] = ()
    """`<level>:<index>: <why>` of each part that was summarized by key sentences
    because the model gave nothing of use."""
    tree: tuple[Node, ...] | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an item settled. Once for each item and generation."""

    v: int = 1
    seq: int
    generation: int = 0
    custom_id: str = ""
    state: Settled
    result: JobResult | None = None
    summary: Summary | None = None
    error: JobError | None = None
    usage: Usage = Usage()
    """Over all jobs of the item."""
    timings: Timings = Timings()
    """Of the item's only job; of a document, `total_ms` since it was fed."""
    job_ids: tuple[str, ...] = ()


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment. Times are milliseconds of Redis' clock."""

    run: str
    spec: RunSpec
    state: RunState
    total: int | None = None
    """Items in all, once the driver has fed the last; of those that Redis knows of,
    where it has lost the record of earlier ones."""
    fed: int = 0
    settled: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    """Lines of the input that could not be items, as the driver counts them."""
    acknowledged: int = 0
    open_jobs: int = 0
    ready_items: int = 0
    windows: int = 0
    """Jobs' worth of text into which documents were divided, over all levels."""
    jobs: int = 0
    """Jobs that have ended."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    fell_back: int = 0
    """Parts of documents that were summarized by key sentences instead."""
    created_ms: int = 0
    updated_ms: int = 0
    """Something was fed or settled."""
    driver_ms: int = 0
    """The driver's last sign of life."""
    left_ms: int = 0
    """The driver said that it leaves."""
    renewed_ms: int = 0
    """Its items were last renewed all together."""
    now_ms: int = 0

    @property
    def has_left(self) -> bool:
        """Whether the driver has said goodbye since it was last heard of."""
        return self.left_ms >= self.driver_ms > 0

    @property
    def in_redis(self) -> int:
        """Items that are in Redis: fed and not acknowledged."""
        return max(self.fed - self.acknowledged, 0)
