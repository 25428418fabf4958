"""Several models in one pool: queues, bounds and cores of their own."""

import json
import os
from collections.abc import Iterator

import psutil
import pytest
import redis
from support.pools import UpProcess, up
from support.waiting import wait_until_sync

from tokenmill import Prompt, SyncClient
from tokenmill.shared.errors import PayloadTooLarge, QueueFull
from tokenmill.shared.keys import Keys

MODELS = [
    {
        "name": "echo",
        "share": 0.5,
        "buckets": [4, 8],
        "limits": {"max_waiting_jobs": 2, "max_payload_bytes": 2048},
    },
    {"name": "other", "share": 0.5},
]


@pytest.fixture(scope="module")
def two_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    """Two models, each with half of the host."""
    told = {"TOKENMILL_MODELS": json.dumps(MODELS)}
    directory = tmp_path_factory.mktemp("models")
    with up(directory, "--model", "other", **told) as running:
        wait_until_sync(lambda: running.text.count("| ready: model") == 2)
        yield running


def test_each_model_is_answered_and_has_its_own_keys(two_models) -> None:
    with SyncClient(two_models.url) as mill:
        jobs = [mill.submit(Prompt("hi there", model=m)) for m in ("echo", "other")]
        for job in jobs:
            assert job.result(timeout=60).text == "hi there"
        assert jobs[0].info().bucket == "8"
        assert jobs[1].info().bucket == "128"
    with redis.Redis.from_url(two_models.url) as client:
        groups = [client.zrange(Keys(m, 0).groups, 0, -1) for m in ("echo", "other")]
    assert len(groups[0]) == len(groups[1]) == 1
    assert groups[0] != groups[1]


def test_limits_are_of_the_model_s_queue_alone(two_models) -> None:
    with redis.Redis.from_url(two_models.url) as client:

        def limit(model: str, field: str) -> int:
            return int(client.hget(Keys(model, 0).limits, field) or 0)

        wait_until_sync(lambda: limit("other", "max_waiting_jobs"))
        assert limit("echo", "max_waiting_jobs") == 2
        assert limit("other", "max_waiting_jobs") == 100_000
        assert limit("echo", "max_payload_bytes") == 2048
        assert limit("other", "max_payload_bytes") == 4 * 1024 * 1024
    with SyncClient(two_models.url) as mill:

        def later(model: str) -> None:
            mill.submit(Prompt("wait", model=model, delay_s=60))

        for model in ("echo", "other", "echo", "other", "other"):
            later(model)
        with pytest.raises(QueueFull, match="max_waiting_jobs"):
            later("echo")
        large = "x" * 3000
        with pytest.raises(PayloadTooLarge):
            mill.submit(Prompt(large, model="echo"))
        assert mill.submit(Prompt(large, model="other")).result(timeout=60)


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs two cores that can be bound",
)
def test_workers_that_share_the_host_have_cores_of_their_own(two_models) -> None:
    mine = [
        set(psutil.Process(two_models.pids(name)[-1]).cpu_affinity())
        for name in ("worker-0", "worker-1")
    ]
    assert not mine[0] & mine[1]
    assert mine[0] | mine[1] == os.sched_getaffinity(0)
    scheduler = psutil.Process(two_models.pids("scheduler")[-1])
    assert set(scheduler.cpu_affinity()) == os.sched_getaffinity(0)
