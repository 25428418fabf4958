"""What `tokenmill doctor` says of one shard: workers, scheduler, and what stands still.

A scheduler that fails in a loop keeps its lease; what shows is that jobs wait though
there is room for them.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

import redis.asyncio

from ..clock import redis_ms
from ..config import Config
from ..keys import Keys
from ..redis import Finding
from ..script_types import EngineCounters, GroupInfo
from ..scripts import Scripts
from ..shadow_keys import SHADOW_TENANT
from ..versions import Versions
from .queue_checks import examine_queue
from .version_checks import find_stranded

STILL_MS: Final = 10_000
"""Jobs that have waited this long with room for them should have been dispatched."""
_LOOKED_AT: Final = 64
"""Entries of a stream among which the oldest is looked for."""
_WATCH_S: Final = 1.0
"""How long is looked whether anything is dispatched after all."""


async def workers_of(
    client: redis.asyncio.Redis, model: str, cards: set[str], shards: list[str]
) -> Finding:
    """Says how many workers serve a model.

    Args:
        client: Redis.
        model: Its public name.
        cards: Models that were ever served.
        shards: All that are known.
    """
    alive = 0
    for shard in shards:
        keys = Keys.of_shard(shard)
        if keys.model == model:
            alive += len(await Scripts(client, keys).groups())
    if alive:
        return Finding("info", f"model {model}", f"{alive} live workers")
    seen = "was served here before" if model in cards else "was never served here"
    return Finding(
        "error",
        f"model {model}",
        f"no live worker; it {seen}",
        f"start one with: tokenmill work --name {model}",
    )


async def examine_shard(
    client: redis.asyncio.Redis, shard: str, config: Config
) -> list[Finding]:
    """Looks at a shard's scheduler and engines.

    Args:
        client: Redis.
        shard: A member of `tm:shards`.
        config: Settings in force.
    """
    keys = Keys.of_shard(shard)
    groups = await Scripts(client, keys).groups()
    scheduler = await _scheduler_of(client, keys)
    findings = [scheduler]
    for group in groups:
        findings += findings_of(group)
    if scheduler.severity == "info":
        still = await _standing_still(client, keys, groups)
        findings += [still] if still is not None else []
    losses = config.scheduler.isolate_after_losses
    return [*findings, *await examine_queue(client, keys, groups, losses)]


async def _scheduler_of(client: redis.asyncio.Redis, keys: Keys) -> Finding:
    fields = await _fields(client, keys.scheduler)
    until_ms = int(fields.get(b"until", b"0") or 0)
    if until_ms > await redis_ms(client):
        owner = fields.get(b"owner", b"?").decode()
        return Finding("info", f"scheduler {keys.shard}", f"active: {owner}")
    return Finding(
        "error",
        f"scheduler {keys.shard}",
        "none is active: jobs wait for ever",
        "start one with: tokenmill schedule",
    )


def findings_of(info: GroupInfo) -> list[Finding]:
    """Says what a worker's engine has counted: load, steps and memory.

    Args:
        info: Of the worker's last heartbeat.
    """
    counted = info.counters
    if counted is None:
        return [Finding("info", f"engine {info.group}", "says nothing of itself")]
    found = [_load(info, counted), _steps(info, counted), _memory(info, counted)]
    return [*found, *([_adapters(info, counted)] if counted.adapter_loads else [])]


def _load(info: GroupInfo, counted: EngineCounters) -> Finding:
    """Warns of requests that came without room."""
    text = (
        f"{counted.free_blocks} of {counted.pool_blocks or info.total_blocks} blocks "
        f"free, {counted.num_running} of {info.max_running} running, "
        f"{counted.prefill_backlog} tokens to prefill, {counted.overruns} overruns"
    )
    if info.serves != "any":
        text += f"; serves {info.serves} prompts first"
    if info.tp > 1:
        text += f"; split over {info.tp} processes (tp)"
    if not counted.overruns:
        return Finding("info", f"engine {info.group}", text)
    return Finding(
        "warning",
        f"engine {info.group}",
        f"{text}: so many requests came without room and had to wait inside the worker",
        "restart the worker, which settles its accounts with the scheduler; if they "
        "come again, have all schedulers and workers of one version",
    )


def _adapters(info: GroupInfo, counted: EngineCounters) -> Finding:
    text = (
        f"{counted.adapters} in memory; {counted.adapter_loads} loaded, "
        f"{counted.adapter_evictions} of them evicted for others"
    )
    return Finding("info", f"adapters {info.group}", text)


def _steps(info: GroupInfo, counted: EngineCounters) -> Finding:
    a, b = info.step_fit_ms
    text = (
        f"{counted.steps} steps of {counted.scheduled_tokens} tokens, a step takes "
        f"{a:.3g} ms + {b:.3g} ms a token"
    )
    return Finding("info", f"steps {info.group}", text)


def _memory(info: GroupInfo, counted: EngineCounters) -> Finding:
    """Warns of an engine whose steps did not fit in memory."""
    unused = counted.allocated_tokens - counted.used_tokens
    hits = _percent(counted.prefix_tokens_hit, counted.prefix_tokens_asked)
    text = (
        f"{counted.cached_blocks} free blocks keep a prefix, {hits} of prompts came "
        f"from there, {_percent(unused, counted.allocated_tokens)} of KV in use is "
        f"waste, {counted.preemptions} preemptions, {counted.out_of_memory} steps "
        "halved for want of memory"
    )
    if not counted.out_of_memory:
        return Finding("info", f"memory {info.group}", text)
    return Finding(
        "warning",
        f"memory {info.group}",
        text,
        "lower worker.kv_memory_mb, worker.max_running or worker.prefill_chunk, or "
        "free memory on its host; tokenmill inspect shows what is needed",
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "none"


async def _standing_still(
    client: redis.asyncio.Redis, keys: Keys, groups: list[GroupInfo]
) -> Finding | None:
    """Returns a warning when jobs wait long, there is room, and nothing is done.

    Room of a version without a share is for nobody who waits.
    """
    route = await Versions(client, keys.model).route()
    roomy = [
        group
        for group in groups
        if _has_room(group) and (route is None or route.shares.get(group.version))
    ]
    if not roomy:
        return None
    waited_ms = await _longest_wait_ms(client, keys, groups)
    if waited_ms is None or waited_ms < STILL_MS:
        return None
    before = await _dispatched_tokens(client, keys)
    await asyncio.sleep(_WATCH_S)
    if await _dispatched_tokens(client, keys) != before:
        return None
    jobs = int((await _fields(client, keys.load)).get(b"jobs", b"0"))
    return Finding(
        "warning",
        f"dispatch {keys.shard}",
        f"{jobs} jobs wait, the oldest for {waited_ms // 1000} s, though "
        f"{roomy[0].group} has room, and nothing is dispatched",
        "read the log of the active scheduler for what fails, and restart it; with one "
        "on standby another takes over at once",
    )


def _has_room(info: GroupInfo) -> bool:
    room = min(info.credit_running, info.credit_blocks, info.credit_tokens)
    return info.state == "ready" and room > 0


async def _longest_wait_ms(
    client: redis.asyncio.Redis, keys: Keys, groups: Sequence[GroupInfo]
) -> int | None:
    """Age of the oldest entry of all lanes, or None where nothing waits.

    What waits for a version without a worker rightly stands still, and so may copies.
    """
    oldest = await client.zrange(keys.lanes, 0, 0)
    streams = [f"{keys.prefix}q:{lane.decode()}" for lane in oldest]
    since: dict[str, int] = {}
    for stream in (*streams, keys.resume):
        for entry_id, fields in await client.xrange(stream, count=_LOOKED_AT):
            if fields.get(b"tenant") == SHADOW_TENANT.encode():
                continue
            name = fields.get(b"id", b"").decode(errors="replace")
            since.setdefault(name, int(entry_id.partition(b"-")[0]))
    for job in await find_stranded(client, keys, list(since), groups):
        since.pop(job.job_id)
    return await redis_ms(client) - min(since.values()) if since else None


async def _dispatched_tokens(client: redis.asyncio.Redis, keys: Keys) -> bytes:
    return (await _fields(client, keys.load)).get(b"drained_tokens", b"0")


async def _fields(client: redis.asyncio.Redis, key: str) -> dict[bytes, bytes]:
    async with client.pipeline(transaction=False) as pipe:
        pipe.hgetall(key)
        (fields,) = await pipe.execute()
    assert isinstance(fields, dict)
    return fields
