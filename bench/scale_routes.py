"""A registered version and a route, for bench/scale.py, and what they cost."""

import asyncio
from collections.abc import Mapping

import redis.asyncio
from scale_verdict import LESS_IS_BETTER, MORE_IS_BETTER

from tokenmill.shared.config_model import ModelConfig
from tokenmill.shared.versions import Versions, VersionSpec

MODEL = "echo"
NO_PART_OF_IT = ("scheduler_rss_mib",)
"""Measured once a level, before there is a route."""


async def add_route(client: "redis.asyncio.Redis") -> None:
    """Adds a version beside the one that serves, and a route that gives that one all.

    From then on the scheduler reads the route with its groups, and each job has a
    version that it belongs to by its id.

    Args:
        client: The shard's server.
    """
    versions = Versions(client, MODEL)
    await versions.fix({"v1": 100.0})
    config = ModelConfig(name=MODEL, version="v2")
    await versions.add(VersionSpec(version="v2", model=config))


def register(url: str) -> None:
    """The same for who has no loop.

    Args:
        url: Of the shard's server.
    """

    async def add() -> None:
        async with redis.asyncio.Redis.from_url(url) as client:
            await add_route(client)

    asyncio.run(add())


def cost(
    without: Mapping[str, object], routed: Mapping[str, object]
) -> dict[str, float]:
    """Returns each figure with a route over that without.

    Args:
        without: Of one level, without versions.
        routed: Of the same level afterwards.
    """
    names = [n for n in (*MORE_IS_BETTER, *LESS_IS_BETTER) if n not in NO_PART_OF_IT]
    return {
        name: round(float(str(routed[name])) / float(str(without[name])), 3)
        for name in names
    }
