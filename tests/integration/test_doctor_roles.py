"""`tokenmill doctor` by role of deploy/redis: what it may not see is no fault."""

import pytest
from support.composed import Composition, composed
from support.servers import SERVERS

from tokenmill.shared.config import Config
from tokenmill.shared.keys import SHARDS, Keys
from tokenmill.shared.pool.doctor import examine
from tokenmill.shared.webhook_keys import ANNOUNCED


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with composed(tmp_path_factory.mktemp("roles"), SERVERS[-1]) as whole:
        with whole.admin() as admin:
            admin.sadd(SHARDS, "m:0")
            admin.hset(Keys("m", 0).load, "jobs", 0)
            admin.xadd(ANNOUNCED, {"id": "x"}, id="1-1")
        yield whole


async def test_a_producer_is_told_what_it_cannot_see_and_no_error(
    server: Composition,
) -> None:
    found = await examine(Config(), server.url("producer"))
    # That nothing runs here it says like any other; the pool as such can be read.
    wrong = {one.name for one in found if one.severity == "error"}
    assert wrong == {"model smollm2-135m", "scheduler m:0"}
    hidden = {one.name for one in found if "not visible" in one.message}
    assert hidden >= {"webhooks late", "webhooks given up", "api-keys"}


async def test_the_janitor_sees_what_is_late(server: Composition) -> None:
    found = await examine(Config(), server.url("janitor"))
    (late,) = [one for one in found if one.name == "webhooks late"]
    assert "1 announcements were not taken" in late.message
