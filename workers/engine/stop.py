"""Stop strings across token boundaries."""

from collections import defaultdict


class StopMatcher:
    """Finds stop strings in growing text and says how much of its end is uncertain.

    Holds no text itself, so one matcher serves all choices of a request.

    Args:
        stops: Stop strings, none of them empty.
    """

    __slots__ = ("_prefixes", "_stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        # Proper prefixes by their last character, longest first: most tokens end in
        # a character that no prefix ends in, and cost one lookup.
        prefixes: defaultdict[str, set[str]] = defaultdict(set)
        for stop in stops:
            for length in range(1, len(stop)):
                prefixes[stop[length - 1]].add(stop[:length])
        self._prefixes = {
            last: sorted(found, key=len, reverse=True)
            for last, found in prefixes.items()
        }

    def find(self, text: str, new_from: int) -> tuple[int, str] | None:
        """Finds the stop string that is complete first.

        Args:
            text: All text so far.
            new_from: Index where the newest text begins; only a string that ends in
                the newest text counts, since older ends were judged before.

        Returns:
            Where it begins and which it is, the earliest end first and then the
            earliest beginning; None when there is none.
        """
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, new_from - len(stop) + 1))
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else (best[1], best[2])

    def uncertain(self, text: str) -> int:
        """Returns how many characters at the end may begin a stop string."""
        for prefix in self._prefixes.get(text[-1:], ()):
            if text.endswith(prefix):
                return len(prefix)
        return 0
