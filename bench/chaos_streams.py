"""What one subscriber's journal says of one job's output. Pure.

An incarnation journals every delta that the library gives it. It may be given what an
earlier incarnation has journalled, once, and only from the offset that it asked for;
anything else that comes twice, late or after an end is a breach.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from chaos_journal import Line

Key = tuple[int, int, tuple[int, ...], str, str | None]
"""A delta: choice, offset, token ids, text, finish reason."""


@dataclass
class Text:
    """What one side says that one choice is."""

    ids: list[int]
    text: str
    reason: str | None = None


Output = dict[int, Text]
"""By choice."""


def key_of(line: Line) -> Key:
    """The delta of a line."""
    return line["c"], line["o"], tuple(line["i"]), line["x"], line["f"]


def append(output: Output, delta: Key) -> None:
    """Adds the next delta of its choice.

    Raises:
        ValueError: There is a gap, a repeat, or something after a choice's end.
    """
    choice, offset, ids, text, reason = delta
    one = output.setdefault(choice, Text([], ""))
    if one.reason is not None:
        raise ValueError(f"choice {choice} goes on after its end at {offset}")
    if offset != len(one.ids):
        have = len(one.ids)
        raise ValueError(f"choice {choice} has {have} tokens, then offset {offset}")
    one.ids += ids
    one.text += text
    one.reason = reason


@dataclass
class Incarnation:
    """One life of a subscriber, as far as one job goes.

    Args:
        first: The offset that it asked the library for.
        earlier: What earlier ones have journalled.
    """

    first: int
    earlier: frozenset[Key]
    _next: dict[int, int] = field(default_factory=dict)
    """Choice -> the offset that must come now."""
    _ended: set[int] = field(default_factory=set)
    _given: set[Key] = field(default_factory=set)

    def take(self, delta: Key) -> bool:
        """Judges the next delta.

        Returns:
            Whether no earlier incarnation had it.

        Raises:
            ValueError: The library should not have given it now.
        """
        choice, offset, ids, _, reason = delta
        stop = offset + len(ids)
        what = f"choice {choice}, tokens {offset} to {stop}"
        if stop < self.first or (ids and stop == self.first):
            raise ValueError(f"{what}: lies before the wanted offset {self.first}")
        if choice not in self._next and offset > self.first:
            raise ValueError(f"{what}: comes first, though {self.first} was wanted")
        if choice in self._ended:
            raise ValueError(f"{what}: goes on after the end of this choice")
        if delta in self._given:
            raise ValueError(f"{what}: was given twice")
        due = self._next.get(choice, offset)
        if offset != due:
            raise ValueError(f"{what}: a gap or a repeat; {due} should have come")
        self._next[choice] = stop
        self._given.add(delta)
        if reason is not None:
            self._ended.add(choice)
        return delta not in self.earlier


def output_of_stream(lines: Iterable[Line]) -> Output:
    """Joins what all incarnations of a subscriber were given of one job.

    Raises:
        ValueError: A delta came twice to one incarnation, went back, left a gap, came
            after an end, or is no copy of what an earlier incarnation was given.
    """
    found: Output = {}
    had: set[Key] = set()
    ended = False
    life: Incarnation | None = None
    for line in lines:
        if ended:
            raise ValueError(f"something comes after the end: {line}")
        ended = "end" in line
        if "resume" in line:
            life = Incarnation(line["resume"], frozenset(had))
        elif "o" in line:
            if life is None:
                raise ValueError(f"a delta before the stream was begun: {line}")
            delta = key_of(line)
            if life.take(delta):
                append(found, delta)
            had.add(delta)
    return found


def progress(lines: Iterable[Line]) -> Iterator[float]:
    """Times at which the subscriber got something that it did not have."""
    had: set[Key] = set()
    for line in lines:
        if "o" in line:
            delta = key_of(line)
            if delta in had:
                continue
            had.add(delta)
        if "t" in line:
            yield line["t"]
