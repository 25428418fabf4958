"""Output on its way: joined until it is sealed, then numbered and unchanged."""

from ..shared.messages import Delta, TokenLogprob
from ..shared.script_types import EmitItem
from .engine.request import TokenDelta
from .jobs import RunningJob


class Sealed:
    """A delta with its final sequence number, waiting for Redis."""

    __slots__ = ("item", "job", "num_tokens")

    def __init__(self, job: RunningJob, item: EmitItem, num_tokens: int) -> None:
        self.job = job
        self.item = item
        self.num_tokens = num_tokens


class Buffer:
    """New tokens of one choice, not yet sealed into a delta."""

    __slots__ = (
        "choice",
        "due",
        "job",
        "last",
        "logprobs",
        "offset",
        "texts",
        "tokens",
    )

    def __init__(self, job: RunningJob, delta: TokenDelta, due: float) -> None:
        self.job = job
        self.choice = delta.choice
        self.offset = delta.offset
        self.tokens: list[int] = []
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.last = delta
        self.due = due

    def add(self, delta: TokenDelta) -> None:
        """Appends what a step produced."""
        self.tokens += delta.token_ids
        self.texts.append(delta.text)
        self.logprobs += delta.logprobs or ()
        self.last = delta

    def seal(self) -> Delta:
        """Returns all of it as one delta."""
        return Delta(
            choice=self.choice,
            offset=self.offset,
            token_ids=tuple(self.tokens),
            text="".join(self.texts),
            logprobs=tuple(self.logprobs) if self.logprobs else None,
            finish_reason=self.last.finish_reason,
            stop_reason=self.last.stop_reason,
        )
