"""The live view of `tokenmill top`: looks again and again, and outlives blips."""

import asyncio
import time
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.live import Live

from ...shared.errors import RedisUnavailable, RedisUnsuitable
from .keyboard import keys
from .render import render
from .view import TopView, look

if TYPE_CHECKING:
    from ..client import Client


class Top:
    """Keeps a terminal up to date until a key ends it.

    Args:
        mill: An open client, of little patience.
        console: The terminal.
        every_s: Seconds between two looks.
    """

    def __init__(self, mill: "Client", console: Console, every_s: float) -> None:
        self._mill = mill
        self._console = console
        self._every_s = every_s
        self._done = asyncio.Event()
        self._away_since: float | None = None

    async def run(self) -> None:
        """Shows the pool until `q`, Ctrl-C or the terminal's end."""
        view = await look(self._mill)
        with (
            keys(self._on_key),
            Live(
                self._screen(view),
                console=self._console,
                screen=self._console.is_terminal,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            ) as live,
        ):
            while not await self._is_done(self._every_s):
                view = await self._look(view)
                live.update(self._screen(view), refresh=True)

    def _on_key(self, key: str) -> None:
        if key in "qQ":
            self._done.set()

    async def _is_done(self, within_s: float) -> bool:
        try:
            await asyncio.wait_for(self._done.wait(), within_s)
        except TimeoutError:
            return False
        return True

    async def _look(self, last: TopView) -> TopView:
        """Looks again; while Redis is away what was seen last stays, and says so."""
        try:
            view = await look(self._mill)
        except (RedisUnavailable, RedisUnsuitable):
            if self._away_since is None:
                self._away_since = time.monotonic()
            return last
        self._away_since = None
        return view

    def _screen(self, view: TopView) -> RenderableType:
        away = None
        if self._away_since is not None:
            seconds = time.monotonic() - self._away_since
            away = f"Redis does not answer for {seconds:.0f} s; this is what was before"
        return screen_of(view, self._console, away=away)


def screen_of(
    view: TopView, console: Console, *, away: str | None = None, whole: bool = False
) -> RenderableType:
    """Returns what fits on a console.

    Args:
        view: What to show.
        console: Its size and encoding decide.
        away: Why what is shown is old, if it is.
        whole: Show everything, whatever the height.
    """
    return render(
        view,
        width=console.width,
        height=None if whole else console.height,
        utf8=console.encoding.startswith("utf"),
        away=away,
    )
