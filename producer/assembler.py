"""From deltas that may come twice, late or not at all to a gapless stream. No I/O.

Deltas are units: their text cannot be cut by token. A worker that takes a job over
continues at the next offset, so copies are whole copies.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from ..shared.errors import InvalidRequest, ProtocolError
from ..shared.lifecycle import State
from ..shared.messages import Choice, Delta, End, JobResult


class Fit(Enum):
    """How a delta stands to what has been seen of its choice."""

    NEW = auto()
    """The next one."""
    SEEN = auto()
    """A copy of what was seen already."""
    AHEAD = auto()
    """Something before it is missing: read the log."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far one choice was read: what a reader keeps to go on after it."""

    num_tokens: int = 0
    num_characters: int = 0
    """Of the text of these tokens."""
    num_empty: int = 0
    """Deltas without tokens since the last token."""
    finished: bool = False

    def after(self, delta: Delta) -> "Position":
        """Returns the position behind the next delta of this choice."""
        num_empty = 0 if delta.token_ids else self.num_empty + 1
        return Position(
            self.num_tokens + len(delta.token_ids),
            self.num_characters + len(delta.text),
            num_empty,
            delta.finish_reason is not None,
        )


@dataclass(slots=True)
class _Progress:
    """What has been seen of one choice."""

    num_tokens: int = 0
    num_characters: int = 0
    finished: bool = False
    empty: list[Delta] = field(default_factory=list)
    """Deltas without tokens at the present offset: only content tells copies apart."""
    num_known: int = 0
    """How many of those an earlier reader has had: the log repeats them in order."""
    is_border: bool = True
    """Whether one delta is known to end here; not yet of an earlier reader's word."""

    @classmethod
    def from_position(cls, position: Position) -> "_Progress":
        return cls(
            num_tokens=position.num_tokens,
            num_characters=position.num_characters,
            finished=position.finished,
            num_known=position.num_empty,
            is_border=position.num_tokens == 0,
        )


class Assembler:
    """Puts one job's deltas in order, each exactly once.

    Args:
        from_offset: Deltas whose tokens all lie before this one are left out, for
            every choice. The first delta given is the one that contains the token
            with this index, and may begin before it.
        positions: Choice -> what an earlier reader has had of it; nothing of that is
            given again.
    """

    def __init__(
        self, from_offset: int = 0, positions: Mapping[int, Position] | None = None
    ) -> None:
        self._from_offset = from_offset
        self._choices = {
            choice: _Progress.from_position(position)
            for choice, position in (positions or {}).items()
        }
        self.end: End | None = None
        """Set once the last record was seen."""

    @property
    def num_tokens(self) -> int:
        """Tokens seen over all choices."""
        return sum(p.num_tokens for p in self._choices.values())

    def add(self, delta: Delta) -> tuple[Fit, Delta | None]:
        """Takes a delta from the log or from the channel.

        Args:
            delta: Any delta of the job.

        Returns:
            How it fits, and the delta if the caller is to have it.

        Raises:
            ProtocolError: It overlaps what was seen without being a copy.
            InvalidRequest: An earlier reader's position lies in the midst of it.
        """
        if self.end is not None:
            return Fit.SEEN, None
        progress = self._choices.setdefault(delta.choice, _Progress())
        fit = self._fit(delta, progress) if _has_content(delta) else Fit.SEEN
        if fit is Fit.AHEAD:
            return fit, None
        if delta.end is not None:
            self.end = delta.end
        if fit is Fit.SEEN:
            return fit, None
        self._advance(delta, progress)
        return fit, delta if self._wanted(delta) else None

    @property
    def has_strays(self) -> bool:
        """Whether nothing seen so far ends at some position of an earlier reader."""
        return not all(p.is_border for p in self._choices.values())

    def check_positions(self, result: JobResult | None, *, has_log: bool) -> None:
        """Refuses positions at which nothing of the job ends; the log was added.

        Args:
            result: Of the job, if it has ended.
            has_log: Whether there was one; the borders of one that expired are unknown.

        Raises:
            InvalidRequest: They are none of this job's, or lie ahead of it.
        """
        whole = {c.index: c for c in result.choices} if result is not None else {}
        for index, progress in self._choices.items():
            if progress.is_border:
                continue
            choice = whole.get(index)
            most = 0 if choice is None else len(choice.token_ids)
            if has_log or result is None:
                # What the log lacks is read from the result, in one piece.
                fits = progress.num_tokens == most
            elif result.state == State.SUCCEEDED:
                fits = progress.num_tokens <= most
            else:
                fits = True  # such a result need not have the output
            if not fits:
                raise _no_border(index, progress)

    def complete(self, result: JobResult) -> list[Delta]:
        """Fills in what the log no longer holds from the recorded result.

        Args:
            result: The terminal result of the same job.

        Returns:
            At most one delta for each choice. Sets `end`.
        """
        deltas = []
        for choice in result.choices:
            delta = self._remainder(choice)
            if delta is not None and self._wanted(delta):
                deltas.append(delta)
        self.end = End(
            state=result.state,
            finish_reasons=tuple(c.finish_reason for c in result.choices),
            usage=result.usage,
            error=result.error,
        )
        return deltas

    def _fit(self, delta: Delta, progress: _Progress) -> Fit:
        stop = delta.offset + len(delta.token_ids)
        if not progress.is_border:
            progress.is_border = progress.num_tokens in (delta.offset, stop)
        if progress.finished or stop < progress.num_tokens:
            return Fit.SEEN
        if delta.offset > progress.num_tokens:
            return Fit.AHEAD
        if not delta.token_ids:
            return _fit_empty(delta, progress)
        if stop == progress.num_tokens:
            return Fit.SEEN
        if delta.offset == progress.num_tokens:
            return Fit.NEW
        if not progress.is_border:
            raise _no_border(delta.choice, progress)
        raise ProtocolError(
            f"choice {delta.choice}: a delta covers tokens {delta.offset} to {stop}, "
            f"of which {progress.num_tokens} were seen; expected the next or a copy"
        )

    def _advance(self, delta: Delta, progress: _Progress) -> None:
        if delta.token_ids:
            progress.empty.clear()
            progress.num_known = 0
        else:
            progress.empty.append(delta)
        progress.num_tokens += len(delta.token_ids)
        progress.num_characters += len(delta.text)
        progress.finished = delta.finish_reason is not None

    def _wanted(self, delta: Delta) -> bool:
        stop = delta.offset + len(delta.token_ids)
        return stop > self._from_offset or not (
            delta.token_ids or stop < self._from_offset
        )

    def _remainder(self, choice: Choice) -> Delta | None:
        progress = self._choices.setdefault(choice.index, _Progress())
        if progress.finished:
            return None
        seen = progress.num_tokens
        delta = Delta(
            choice=choice.index,
            offset=seen,
            token_ids=choice.token_ids[seen:],
            text=choice.text[progress.num_characters :],
            logprobs=None if choice.logprobs is None else choice.logprobs[seen:],
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
        self._advance(delta, progress)
        return delta


def _fit_empty(delta: Delta, progress: _Progress) -> Fit:
    if delta in progress.empty:
        return Fit.SEEN
    if len(progress.empty) < progress.num_known:
        progress.empty.append(delta)
        return Fit.SEEN
    return Fit.NEW


def _no_border(choice: int, progress: _Progress) -> InvalidRequest:
    return InvalidRequest(
        "positions",
        f"nothing in the output of this job ends at token {progress.num_tokens} of "
        f"choice {choice}; expected where an earlier reader of the same job stopped, "
        "or nothing for the beginning",
    )


def _has_content(delta: Delta) -> bool:
    return bool(delta.token_ids or delta.text or delta.finish_reason)
