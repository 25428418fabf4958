"""Lost leases in words: why a worker went, and what a job that was with it says.

Who knows why a worker ended says so through `Scripts.forfeit`; the words stay with the
job's record until its lease is taken, and go from there into its errors.
"""

import signal
from typing import Final

from .messages import JobError
from .script_endings import Hint
from .script_runner import count_of

UNKNOWN: Final = (
    "its lease ran out, so the worker died, or was stopped or cut off for longer"
)
"""Said when nobody noted a cause."""
LONGEST: Final = 400
"""Characters of a cause that are kept."""
_HINTS: Final = {
    signal.SIGKILL: ", as by a host that is out of memory",
    signal.SIGSEGV: ", a fault in native code",
    signal.SIGABRT: ", a fault in native code",
    signal.SIGBUS: ", a fault in native code",
}


def step_stuck(limit_s: float) -> str:
    """Says that a worker ended itself since a step did not come back.

    Args:
        limit_s: `worker.step_timeout_s`, in seconds.
    """
    return (
        f"a step took longer than worker.step_timeout_s={limit_s:g} s, so the worker "
        "ended itself; raise worker.step_timeout_s if the model is merely slow"
    )


def process_ended(exit_code: int | None) -> str:
    """Says how a worker's process ended.

    Args:
        exit_code: As of `subprocess`: negative for a signal; None when not known.
    """
    if exit_code is None:
        return "the worker's process ended"
    who = "the worker" if exit_code < 0 else "the worker's process"
    return f"{who} {how_it_ended(exit_code)}"


def how_it_ended(exit_code: int) -> str:
    """Says how any process ended, as the rest of a sentence that begins with it.

    Args:
        exit_code: As of `subprocess`: negative for a signal.
    """
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        number = signal.Signals(-exit_code)
    except ValueError:
        return f"was killed by signal {-exit_code}"
    return f"was killed by {number.name}{_HINTS.get(number, '')}"


def one_line(cause: str) -> str:
    """Returns a cause as it is kept: one line of bounded length."""
    return " ".join(cause.split())[:LONGEST]


def is_counted(hint: Hint) -> bool:
    """Whether the loss of this job's lease counts, by the rule of `reap.lua`."""
    noted = _noted(hint)
    return hint.state == "running" and not (noted is not None and noted[0] == "0")


def lost(hint: Hint) -> JobError:
    """Returns what is recorded with a job that is redelivered."""
    how = " alone" if hint.alone == "1" else ""
    return JobError(
        "lease_lost",
        f"worker {hint.owner or '?'} was lost while it ran this job{how}: "
        f"{_cause(hint)}",
    )


def convicted(hint: Hint) -> JobError:
    """Returns the error of a job that took its worker along while it ran alone."""
    losses = count_of(hint.lease_losses) + 1
    alone = count_of(hint.alone_losses) + 1
    workers = "worker was" if losses == 1 else "workers were"
    return JobError(
        "lease_lost",
        f"{losses} {workers} lost while running this job, {alone} of them while it ran "
        f"alone; the last time: {_cause(hint)}; it is kept among the dead letters: see "
        "`tokenmill dead`",
    )


def unstartable(hint: Hint) -> JobError:
    """Returns the error of a job that living workers were given and did not start."""
    return JobError(
        "start_lost",
        f"the job was given to living workers {count_of(hint.start_losses) + 1} "
        "times and none could start it, as when its record or log in Redis is "
        "damaged; it is kept among the dead letters: see `tokenmill dead`",
    )


def _noted(hint: Hint) -> tuple[str, str] | None:
    """Whether the loss counts, and why it happened, as noted of this very run."""
    epoch, _, rest = hint.lost.partition(" ")
    if not rest or epoch != hint.epoch:
        return None
    counts, _, cause = rest.partition(" ")
    return counts, cause


def _cause(hint: Hint) -> str:
    noted = _noted(hint)
    return (noted[1] if noted else "") or UNKNOWN
