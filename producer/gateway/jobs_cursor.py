"""Ids of events: how far each choice was read, so that a stream goes on from any one.

An id holds all choices, since a browser sends back the last one alone. It is
`<choice>:<tokens>.<characters>` for each choice, joined by commas; after it `.<number>`
where deltas without tokens followed, and `!` where the choice has ended. The id of the
last event of a job has `;end` behind it.
"""

import re
from typing import Final

from ...shared.errors import InvalidRequest
from ...shared.messages import Delta
from ..assembler import Position

_MOST_CHARACTERS: Final = 2000
_NUMBER: Final = "[0-9]{1,10}"
_PART: Final = re.compile(
    rf"(?P<choice>[0-9]{{1,2}}):(?P<tokens>{_NUMBER})\.(?P<characters>{_NUMBER})"
    rf"(?:\.(?P<empty>{_NUMBER}))?(?P<finished>!?)"
)
_END: Final = ";end"
FIELD: Final = "Last-Event-ID"


class Cursor:
    """Where a reader of a job's stream stands.

    Args:
        positions: Choice -> how far it was read.
        ended: Whether the last event of the job was read too.
        field: Where the caller sent it.
    """

    def __init__(
        self,
        positions: dict[int, Position] | None = None,
        *,
        ended: bool = False,
        field: str = FIELD,
    ) -> None:
        self.positions = positions or {}
        self.ended = ended
        self.field = field

    @classmethod
    def parse(cls, event_id: str, field: str = FIELD) -> "Cursor":
        """Takes the id of an event apart.

        Args:
            event_id: As it was received.
            field: Where the caller sent it.

        Raises:
            InvalidRequest: It is not one that this gateway gave.
        """
        text = event_id.removesuffix(_END)
        parts = text.split(",") if text else []
        matches = [_PART.fullmatch(part) for part in parts]
        if len(event_id) > _MOST_CHARACTERS or not all(matches):
            raise InvalidRequest(
                field,
                f"{event_id[:60]!r} is no id of an event of this stream; expected the "
                "id of the last event as it was received, or none for the beginning",
            )
        positions = {
            int(match["choice"]): Position(
                num_tokens=int(match["tokens"]),
                num_characters=int(match["characters"]),
                num_empty=int(match["empty"] or 0),
                finished=bool(match["finished"]),
            )
            for match in matches
            if match is not None
        }
        return cls(positions, ended=event_id.endswith(_END), field=field)

    def advance(self, delta: Delta) -> str:
        """Moves behind the next delta; returns the id of its event."""
        position = self.positions.get(delta.choice) or Position(num_tokens=delta.offset)
        self.positions[delta.choice] = position.after(delta)
        return str(self)

    def end(self) -> str:
        """Moves behind the end of the job; returns the id of its event."""
        self.ended = True
        return str(self)

    def __str__(self) -> str:
        parts = (
            _part(choice, position)
            for choice, position in sorted(self.positions.items())
        )
        return ",".join(parts) + (_END if self.ended else "")


def _part(choice: int, position: Position) -> str:
    text = f"{choice}:{position.num_tokens}.{position.num_characters}"
    if position.num_empty:
        text += f".{position.num_empty}"
    return text + ("!" if position.finished else "")
