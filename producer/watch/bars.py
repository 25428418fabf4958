"""Small drawings of characters: bars of KV blocks, a line of the last hour."""

from collections.abc import Sequence
from typing import Final

from rich.text import Text

_LEVELS: Final = "▁▂▃▄▅▆▇█"
_BLOCKS: Final = (("█", "cyan"), ("▒", "blue"), ("░", "bright_black"))
_PLAIN: Final = (("#", "cyan"), ("+", "blue"), (".", "bright_black"))
"""For a terminal that does not speak UTF-8."""


def stacked(parts: Sequence[int], width: int, *, utf8: bool = True) -> Text:
    """Returns a bar of the shares of up to three parts.

    Args:
        parts: Used, cached, free, say.
        width: Characters.
        utf8: Whether block characters can be shown.
    """
    whole = sum(parts)
    if not whole:
        parts, whole = (0, 0, 1), 1  # nothing is there, so nothing is held
    bar = Text()
    drawn = before = 0
    for count, (mark, style) in zip(parts, _BLOCKS if utf8 else _PLAIN, strict=False):
        before += count
        # Rounded up, so that a part which is there is seen; the last one fills.
        end = min(width, -(-before * width // whole))
        bar.append(mark * (end - drawn), style)
        drawn = end
    return bar


def sparkline(values: Sequence[float], width: int, *, utf8: bool = True) -> str:
    """Returns values as a line of levels, the newest at the right.

    Each character is the greatest of the values that it stands for.

    Args:
        values: In the order of time, none negative.
        width: Most characters.
        utf8: Whether the levels can be shown; else nothing is.
    """
    if not values or width < 1 or not utf8:
        return ""
    size = -(-len(values) // width)
    first = len(values) % size
    starts = [*([0] if first else []), *range(first, len(values), size)]
    ends = [*starts[1:], len(values)]
    parts = [max(values[a:b]) for a, b in zip(starts, ends, strict=True)]
    most = max(parts)
    if most <= 0:
        return _LEVELS[0] * len(parts)
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[round(part / most * top)] for part in parts)
