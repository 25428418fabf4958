"""Lines of an output: what became of documents."""

import msgspec

from ...shared.bulk.messages import Node
from ...shared.messages import Usage, encode
from .answers import LineFault, fault_of
from .flow import Done, Settled


class SummaryLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A document's line: `summary` and what goes with it, or `error`."""

    id: str | int | None
    title: str = ""
    summary: str | None = None
    words: int | None = None
    windows: int | None = None
    """Into which the text was divided."""
    levels: int | None = None
    mode: str | None = None
    source_tokens: int | None = None
    """None where nobody counted them: key sentences are chosen without a tokenizer."""
    usage: Usage | None = None
    fell_back: tuple[str, ...] = ()
    """Parts summarized by key sentences, since the model gave nothing of use."""
    tree: tuple[Node, ...] | None = None
    error: LineFault | None = None


class SummaryForm:
    """Writes lines of documents."""

    def __call__(self, settled: Settled) -> bytes:
        """Returns the line of a settled document."""
        return encode(_line(settled))


def _line(settled: Settled) -> SummaryLine:
    if not isinstance(settled, Done):
        named = _id(settled.custom_id, settled.label)
        return SummaryLine(id=named, error=fault_of(settled))
    item, outcome = settled.fed.item, settled.outcome
    named = _id(item.custom_id, settled.fed.label)
    title = "" if item.document is None else item.document.title
    summary = outcome.summary
    if outcome.state != "succeeded" or summary is None:
        return SummaryLine(id=named, title=title, error=fault_of(settled))
    return SummaryLine(
        id=named,
        title=title,
        summary=summary.text,
        words=summary.words,
        windows=summary.windows,
        levels=summary.levels,
        mode=summary.mode,
        source_tokens=summary.source_tokens or None,
        usage=outcome.usage,
        fell_back=summary.fell_back,
        tree=summary.tree,
    )


def _id(custom_id: str | None, label: str) -> str | int | None:
    return int(custom_id) if custom_id is not None and label == "number" else custom_id
