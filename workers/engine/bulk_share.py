"""What bulk prompts get of a step's prefill while interactive ones want all of it."""

from typing import Final

SHARE: Final = 16
"""One prefill token in this many is for the oldest bulk prompt that runs."""


class BulkShare:
    """Deals a bulk prompt its share, in whole tokens, over the steps.

    A step that is paced may have room for two prompt tokens only: what is less than a
    token is kept for the steps that follow.
    """

    def __init__(self) -> None:
        self._rest = 0
        """Owed, in parts of a token: `SHARE` of them are one."""

    def of(self, room: int) -> int:
        """Returns the tokens of this step that are for bulk.

        Args:
            room: Prefill tokens that the step has room for.
        """
        share, self._rest = divmod(self._rest + room, SHARE)
        return share
