"""How a version that is tried compares with the one that serves: a small record."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, cast

import msgspec

from .shadow_keys import samples_key, shadow_key
from .watch.statistics import percentile

if TYPE_CHECKING:
    import redis.asyncio

SkipReason = Literal[
    "waiting",
    "rate",
    "served_it",
    "no_share",
    "pinned",
    "adapter",
    "stored_input",
    "too_large",
    "gone",
    "unreadable",
    "refused",
]
SKIPPED: Final[Mapping[SkipReason, str]] = {
    "waiting": "enough copies waited",
    "rate": "too many a second",
    "served_it": "served by this version itself",
    "no_share": "served by a version without a share",
    "pinned": "for one version alone",
    "adapter": "with an adapter",
    "stored_input": "with an input in the store",
    "too_large": "too large a request",
    "gone": "not kept until it was copied",
    "unreadable": "written by another release",
    "refused": "refused by Redis",
}
"""Why jobs were not copied, for people; also fields `skipped:<reason>` of counters."""
MOST_SAMPLES: Final = 1000
KEEP_S: Final = 30 * 86_400


class ShadowSample(msgspec.Struct, frozen=True, array_like=True):
    """One job and its copy. Times are milliseconds since the start on a worker: a copy
    waits in the queue by design.
    """

    exact: bool
    """Whether all output tokens are the same."""
    prefix: float
    """Part of the longer output that both have in common from the beginning."""
    ttft_ms: tuple[float | None, float | None]
    """Start to first token: of the job, of its copy."""
    total_ms: tuple[float | None, float | None]
    """Start to end."""


class SideLatency(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies of one side in milliseconds from the start; None: no sample tells."""

    ttft_p50_ms: float | None = None
    ttft_p95_ms: float | None = None
    total_p50_ms: float | None = None
    total_p95_ms: float | None = None


class ShadowReport(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the copies to one version."""

    model: str
    version: str
    copied: int = 0
    compared: int = 0
    """Of these, compared with their originals; the figures are of the newest 1,000."""
    failed: int = 0
    """Copies that did not succeed."""
    skipped: int = 0
    """Jobs that were not copied."""
    skipped_by_reason: dict[str, int] = {}
    """The same by the reasons of `SKIPPED`; only those that there were."""
    last_error: str = ""
    exact: float | None = None
    """Part of the outputs that are the same to the last token."""
    prefix: float | None = None
    """Mean part of an output that is the same from its beginning."""
    serving: SideLatency = SideLatency()
    shadow: SideLatency = SideLatency()


async def read_report(
    client: "redis.asyncio.Redis", model: str, version: str
) -> ShadowReport:
    """Returns what is known of the copies to a version.

    Args:
        client: Redis; replies are bytes.
        model: Public name.
        version: That which is tried.
    """
    from .redis import translate  # late: it makes imports of the client slow
    from .script_runner import count_of, text

    with translate():
        pipe = client.pipeline(transaction=False)
        pipe.hgetall(shadow_key(model, version))
        pipe.lrange(samples_key(model, version), 0, MOST_SAMPLES - 1)
        row, raw = await pipe.execute()
    fields = {text(k): text(v) for k, v in cast("dict[bytes, bytes]", row).items()}
    samples: list[ShadowSample] = []
    for one in raw:
        try:
            samples.append(msgspec.json.decode(one, type=ShadowSample))
        except msgspec.MsgspecError:
            continue  # of another version of ours
    skipped: dict[str, int] = {
        reason: number
        for reason in SKIPPED
        if (number := count_of(fields.get(f"skipped:{reason}", "")))
    }
    return ShadowReport(
        model=model,
        version=version,
        copied=count_of(fields.get("copied", "")),
        compared=count_of(fields.get("compared", "")),
        failed=count_of(fields.get("failed", "")),
        skipped=sum(skipped.values()),
        skipped_by_reason=skipped,
        last_error=fields.get("last_error", ""),
        exact=_mean([float(one.exact) for one in samples]),
        prefix=_mean([one.prefix for one in samples]),
        serving=_side(samples, 0),
        shadow=_side(samples, 1),
    )


async def forget_report(
    client: "redis.asyncio.Redis", model: str, version: str
) -> None:
    """Begins anew: what is copied from now on is another trial."""
    from .redis import translate

    with translate():
        await client.delete(shadow_key(model, version), samples_key(model, version))


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def _side(samples: Sequence[ShadowSample], side: int) -> SideLatency:
    first = sorted(t for one in samples if (t := one.ttft_ms[side]) is not None)
    total = sorted(t for one in samples if (t := one.total_ms[side]) is not None)
    return SideLatency(
        ttft_p50_ms=percentile(first, 0.50),
        ttft_p95_ms=percentile(first, 0.95),
        total_p50_ms=percentile(total, 0.50),
        total_p95_ms=percentile(total, 0.95),
    )
