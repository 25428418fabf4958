"""A scheduler that starts with its Redis judges no live worker's lease at once."""

from support.servers import SERVERS, running
from support.shard_client import KEYS, Shard

from tokenmill.scheduler.outage import GRACE_S, restart_grace_s
from tokenmill.shared.redis import connect


async def test_leases_are_left_alone_where_the_server_has_only_just_started() -> None:
    with running(SERVERS[-1]) as server:
        client = connect(server.url)
        assert await restart_grace_s(client, KEYS) == 0  # nobody holds anything
        shard = await Shard(client).open("g1")
        await shard.run()
        grace_s = await restart_grace_s(client, KEYS)
        await client.aclose()
    assert grace_s > 0


class OldServer:
    """A server that has been up for long, with jobs under lease."""

    def __init__(self, uptime_s: int) -> None:
        self._uptime_s = uptime_s

    def pipeline(self, **_: object) -> "OldServer":
        return self

    def info(self, section: str) -> None:
        assert section == "server"

    def zcard(self, key: str) -> None:
        assert key == KEYS.lease

    async def execute(self, **_: object) -> list[object]:
        return [{"uptime_in_seconds": self._uptime_s}, 3]


async def test_an_old_server_costs_no_wait() -> None:
    assert await restart_grace_s(OldServer(1), KEYS) == GRACE_S  # type: ignore[arg-type]
    assert await restart_grace_s(OldServer(60), KEYS) == 0  # type: ignore[arg-type]
