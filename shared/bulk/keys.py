"""Names in Redis of bulk runs.

Everything of one run carries one hash tag, `tm:bulk:{<run>}:…`, so that a script
touches one slot. `shared/keys.py` names this module and takes over `PERMANENT`.
"""

import re
import secrets
import string
from typing import Final

RUNS: Final = "tm:bulk:runs"
"""zset, run -> Redis ms of its creation; permanent, trimmed by the janitor."""
DIRTY: Final = "tm:bulk:dirty"
"""set of runs with something to do; permanent, empty when nothing is."""
BELL: Final = "tm:bulk:bell"
"""stream of one entry, written after a run was put among the dirty ones: the janitor
waits for it beside the terminal events; permanent."""
QUEUE: Final = "tm:arq:bulk"
"""zset, arq's queue of runs to be advanced; permanent."""
EVENTS: Final = "tm:events"
"""hash, `<model>:<partition>` -> id of the last terminal event that was handled;
permanent."""
ALIVE: Final = "tm:bulk:alive"
"""string, an orchestrator is there; expires when none has said so for a while."""

PERMANENT: Final = (RUNS, DIRTY, BELL, QUEUE, EVENTS)
"""Names that stay in Redis for ever; everything of a run has an expiry."""

RUN_ID: Final = re.compile(r"[a-z0-9]{10}")
_ALPHABET: Final = string.ascii_lowercase + string.digits


def new_run_id() -> str:
    """Returns a new run id: 10 random characters of a-z and 0-9."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(10))


class RunKeys:
    """Names of one run.

    Args:
        run: Its id.
    """

    __slots__ = ("prefix", "run")

    def __init__(self, run: str) -> None:
        self.run = run
        self.prefix = f"tm:bulk:{{{run}}}:"

    @property
    def record(self) -> str:
        """hash, the spec and the counters."""
        return f"{self.prefix}run"

    def item(self, seq: int) -> str:
        """hash, one item until its outcome is acknowledged."""
        return f"{self.prefix}item:{seq}"

    @property
    def ready(self) -> str:
        """zset, seq -> seq of items with something to be done now."""
        return f"{self.prefix}ready"

    @property
    def open(self) -> str:
        """Set of job ids whose end is not recorded."""
        return f"{self.prefix}open"

    @property
    def unsent(self) -> str:
        """Set of those open job ids that may not have been enqueued yet."""
        return f"{self.prefix}unsent"

    @property
    def ended(self) -> str:
        """Set of those open job ids that are known to have ended."""
        return f"{self.prefix}ended"

    @property
    def out(self) -> str:
        """Stream of outcomes that are not acknowledged: field o, JSON Outcome."""
        return f"{self.prefix}out"

    @property
    def all_but_items(self) -> tuple[str, ...]:
        """Every key besides those of items."""
        return (
            *(self.record, self.ready, self.open, self.unsent),
            *(self.ended, self.out),
        )
