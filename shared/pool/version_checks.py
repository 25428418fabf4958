"""What `tokenmill doctor` says of a model's versions: who gets its jobs, who waits."""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import redis.asyncio

from ..keys import Keys
from ..redis import Finding
from ..routes import Route, who_serves
from ..script_types import GroupInfo
from ..versions import Versions, VersionSpec


class Stranded(msgspec.Struct, frozen=True):
    """A waiting job that no live worker of its shard may run."""

    job_id: str
    wants: str
    """What it waits for, in words."""


async def examine_versions(
    client: redis.asyncio.Redis,
    keys: Keys,
    groups: Sequence[GroupInfo],
    stranded: Sequence[Stranded],
) -> list[Finding]:
    """Looks at the route of a shard's model and at what waits for a version.

    Args:
        client: Redis.
        keys: The shard's names.
        groups: Its live workers.
        stranded: Of the waiting jobs that were looked at.
    """
    route, specs = await Versions(client, keys.model).read()
    live = Counter(group.version for group in groups if group.state == "ready")
    name = f"versions {keys.shard}"
    states = {version: (spec.state, spec.reason) for version, spec in specs.items()}
    found = _route(name, route, states, live)
    found += [
        _partly(name, spec)
        for spec in specs.values()
        if spec.failures and spec.state != "failed"
    ]
    if stranded:
        first = stranded[0]
        found.append(
            Finding(
                "warning",
                name,
                f"at least {len(stranded)} jobs wait for a worker that nobody is: "
                f"{first.job_id} waits for {first.wants}",
                "start a worker of that version, or cancel the jobs; others go on",
            )
        )
    return found


def _partly(name: str, spec: VersionSpec) -> Finding:
    """A version that some hosts cannot load, while others have it or try to."""
    hosts = "; ".join(f"{host}: {reason}" for host, reason in spec.failures.items())
    load = f"tokenmill models load {spec.model.name} {spec.version}"
    return Finding(
        "warning",
        name,
        f"version {spec.version} cannot be loaded on {hosts}",
        f"mend that and {load}, which tries there again; workers elsewhere are not "
        "touched",
    )


def _route(
    name: str,
    route: Route,
    states: Mapping[str, tuple[str, str]],
    live: Mapping[str, int],
) -> list[Finding]:
    if not (route.shares or route.retiring or states) and len(live) < 2:
        return []
    known = ", ".join(
        f"{version} {states.get(version, ('without specification', ''))[0]}, "
        f"{live.get(version, 0)} workers"
        for version in sorted({*states, *live, *route.shares})
    )
    found = [Finding("info", name, f"jobs go to {who_serves(route.shares)}; {known}")]
    away = [version for version in sorted(route.shares) if not live.get(version)]
    if away:
        others = [version for version in sorted(route.shares) if live.get(version)]
        instead = f"go to {', '.join(others)}" if others else "wait"
        found.append(
            Finding(
                "warning" if others else "error",
                name,
                f"no live worker of {', '.join(away)}, which has a share: its jobs "
                f"{instead}",
                "start its workers, or give its share to another version with "
                "tokenmill models switch or rollback; tokenmill models retire ends a "
                "model that nobody wants any more",
            )
        )
    if route.retiring:
        found.append(
            Finding(
                "warning",
                name,
                "the model retires: it takes no new jobs",
                "tokenmill models retire goes on with it, load takes it back",
            )
        )
    for version, (state, reason) in sorted(states.items()):
        if state == "failed":
            found.append(
                Finding(
                    "warning",
                    name,
                    f"version {version} has failed: {reason or 'no reason recorded'}",
                    "it gets no jobs; mend it and load it again, or remove it",
                )
            )
    return found


async def find_stranded(
    client: redis.asyncio.Redis,
    keys: Keys,
    job_ids: Sequence[str],
    groups: Sequence[GroupInfo],
) -> list[Stranded]:
    """Returns those of some waiting jobs that no live worker may run.

    Args:
        client: Redis.
        keys: The shard's names.
        job_ids: Waiting jobs.
        groups: The live workers.
    """
    pipe = client.pipeline(transaction=False)
    for job_id in job_ids:
        pipe.hmget(keys.job(job_id), ["version", "weights"])
    rows = await pipe.execute(raise_on_error=False) if job_ids else []
    ready = [group for group in groups if group.state == "ready"]
    versions = {group.version.encode() for group in ready}
    weights = {group.weights_version.encode() for group in ready}
    found: list[Stranded] = []
    for job_id, row in zip(job_ids, rows, strict=True):
        if not isinstance(row, list):
            continue
        pin, begun = row
        if pin and pin not in versions:
            wants = f"version {pin.decode(errors='replace')}"
            found.append(Stranded(job_id, wants))
        elif begun and begun not in weights:
            wants = f"weights {begun.decode(errors='replace')}, which it was begun with"
            found.append(Stranded(job_id, wants))
    return found
