"""One choice's output on its way out: which tokens may leave, and with what text.

A token is released when the text up to and including it is certain not to be part of
a stop string and its bytes are complete UTF-8. Tokens, text and log probabilities
leave together. Token ids hold everything generated, the stop string's tokens
included; text ends before the stop string.
"""

from .detokenizer import Detokenizer
from .stop import StopMatcher


class OutputBuffer:
    """Text of one choice, and how much of it has been released.

    Args:
        detokenizer: A fresh one, for this choice alone.
        stops: Matcher of the request's stop strings, or None without any.
    """

    __slots__ = (
        "_complete",
        "_detokenizer",
        "_ends",
        "_finished",
        "_released_text",
        "_stops",
        "num_released",
        "text",
    )

    def __init__(self, detokenizer: Detokenizer, stops: StopMatcher | None) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._ends: list[int] = []
        self._complete: list[bool] = []
        self._finished = False
        self._released_text = 0
        self.num_released = 0
        """Tokens released."""
        self.text = ""
        """All text so far; after `finish`, the final text."""

    @property
    def released_text(self) -> str:
        """The text that is out."""
        return self.text[: self._released_text]

    def push(self, token_id: int, *, may_stop: bool) -> str | None:
        """Appends a token.

        Args:
            token_id: The token.
            may_stop: False while min_tokens forbids a stop.

        Returns:
            The stop string that this token completed; the text is then cut before it.
        """
        new_from = len(self.text)
        self.text += self._detokenizer.push(token_id)
        self._mark(complete=not self._detokenizer.has_pending)
        if self._stops is None or not may_stop or len(self.text) == new_from:
            return None
        match = self._stops.find(self.text, new_from)
        if match is None:
            return None
        # What has been published is never taken back.
        self.text = self.text[: max(match[0], self._released_text)]
        return match[1]

    def push_silent(self) -> None:
        """Appends a token that ends the output and has no text of its own."""
        self._mark(complete=True)

    def _mark(self, *, complete: bool) -> None:
        self._ends.append(len(self.text))
        self._complete.append(complete)

    def finish(self, *, cut: bool) -> None:
        """Ends the output; everything left is released by the next `release`.

        Args:
            cut: A stop string ended it, so bytes still pending are beyond the end.
        """
        if not cut:
            self.text += self._detokenizer.flush()
        self._finished = True

    def release(self) -> tuple[int, str]:
        """Releases what has become certain.

        Returns:
            How many more tokens are released, and their text. After the end of a
            replayed output that can be text alone.
        """
        upto, end = self._certain()
        count, text = upto - self.num_released, self.text[self._released_text : end]
        self.num_released = upto
        self._released_text = max(end, self._released_text)
        return count, text

    def _certain(self) -> tuple[int, int]:
        """Returns how many tokens, and how many characters, may be out by now."""
        if self._finished:
            return len(self._ends), len(self.text)
        certain = len(self.text)
        if self._stops is not None:
            certain -= self._stops.uncertain(self.text)
        for upto in range(len(self._ends), self.num_released, -1):
            if self._complete[upto - 1] and self._ends[upto - 1] <= certain:
                return upto, self._ends[upto - 1]
        return self.num_released, self._released_text

    def mark_published(self, text: str) -> None:
        """Declares all tokens so far released, with `text`, by an earlier epoch.

        Args:
            text: What was published; it stands, whatever the replay would say.
        """
        self.num_released = len(self._ends)
        self._released_text = len(text)
        if not self.text.startswith(text):
            self.text = text
