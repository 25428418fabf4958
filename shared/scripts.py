"""Every change of a job's state in Redis: typed wrappers around the Lua scripts.

One `.lua` file per script stands in `lua/`, with a header that names every key and
argument. A script is atomic, so a job moves from one state of `lifecycle.TRANSITIONS`
to the next with its entry, lease, credit and counters, or not at all.
"""

from .script_types import (
    CancelStatus,
    DispatchItem,
    DispatchReply,
    EmitItem,
    EmitStatus,
    EndState,
    EnqueueReply,
    FailStatus,
    FinishItem,
    FinishStatus,
    GroupInfo,
    Limits,
    NewJob,
    RenewStatus,
    Started,
    StartItem,
    TenantLimits,
)
from .scripts_dead import DeadScripts
from .scripts_publish import PublishScripts
from .scripts_queue import QueueScripts
from .scripts_reap import ReapReport, ReapScripts
from .scripts_scheduler import SchedulerScripts
from .scripts_worker import WorkerScripts

__all__ = [
    "CancelStatus",
    "DispatchItem",
    "DispatchReply",
    "EmitItem",
    "EmitStatus",
    "EndState",
    "EnqueueReply",
    "FailStatus",
    "FinishItem",
    "FinishStatus",
    "GroupInfo",
    "Limits",
    "NewJob",
    "ReapReport",
    "RenewStatus",
    "Scripts",
    "StartItem",
    "Started",
    "TenantLimits",
]


class Scripts(
    QueueScripts,
    SchedulerScripts,
    ReapScripts,
    DeadScripts,
    WorkerScripts,
    PublishScripts,
):
    """All scripts of one shard.

    Args:
        redis: A client from `shared.redis.connect`; it must not decode replies.
        keys: The shard's names.
    """
