"""Every process is scraped while a pool works, and its figures are what was done."""

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.gateway_thread import RunningGateway
from support.pools import MODEL, UpProcess, up
from support.promql import metrics_of
from support.waiting import wait_until_sync

import tokenmill
from tokenmill import Client, Prompt, Sampling
from tokenmill.shared.errors import TokenmillError
from tokenmill.shared.metrics.catalog import CATALOG
from tokenmill.shared.metrics.instruments import Counter
from tokenmill.shared.metrics.targets import FILE_NAME

DEPLOY = Path(tokenmill.__file__).resolve().parent / "deploy"
KINDS = {"scheduler", "worker", "janitor", "gateway"}
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@contextmanager
def janitor(pool: UpProcess) -> Iterator[None]:
    command = [sys.executable, "-m", "tokenmill", "janitor", "--url", pool.url]
    with (pool.directory / "janitor.out").open("wb") as out:
        process = subprocess.Popen(command, env=pool.env, stdout=out, stderr=out)
    try:
        yield
    finally:
        process.terminate()
        assert process.wait(60) == 0


class Scrapes:
    """What all processes of a pool show, summed over processes."""

    def __init__(self, directory: Path) -> None:
        self.families: set[str] = set()
        self.samples: Samples = {}
        self.kinds: list[str] = []
        for entry in json.loads((directory / FILE_NAME).read_text()):
            (address,) = entry["targets"]
            url = f"http://{address}/metrics"
            try:
                with urllib.request.urlopen(url, timeout=60) as reply:
                    assert reply.headers["Content-Type"].startswith("text/plain")
                    self._add(reply.read().decode())
            except (OSError, http.client.HTTPException):
                continue  # it was killed, and its card has not expired yet
            self.kinds.append(entry["labels"]["kind"])

    def _add(self, text: str) -> None:
        for family in text_string_to_metric_families(text):
            self.families |= names_of(family.name, family.type)
            for one in family.samples:
                key = (one.name, tuple(sorted(one.labels.items())))
                self.samples[key] = self.samples.get(key, 0.0) + one.value

    def sum(self, name: str, **labels: str) -> float:
        wanted = set(labels.items())
        return sum(
            value
            for (found, has), value in self.samples.items()
            if found == name and wanted <= set(has)
        )

    def values(self, name: str, label: str) -> set[str]:
        return {
            value
            for (found, has) in self.samples
            for key, value in has
            if found == name and key == label
        }


def names_of(name: str, kind: str) -> set[str]:
    """Series of a family as queries name them, there or not."""
    if kind == "counter":
        return {f"{name}_total"}
    if kind == "histogram":
        return {f"{name}_bucket", f"{name}_count", f"{name}_sum"}
    return {name}


async def work(url: str) -> tuple[list[object], list[str]]:
    """Has jobs succeed, fail, be cancelled and expire; returns what came of them."""
    async with Client(url) as mill:

        def prompt(text: str, **fields: object) -> Prompt:
            return Prompt(text, model=MODEL, **fields)  # type: ignore[arg-type]

        good = [prompt(f"answer number {n:03}") for n in range(30)]
        long = prompt("x" * 100, sampling=Sampling(max_tokens=1800, ignore_eos=True))
        jobs = await mill.submit_many(
            [
                *good,
                *(prompt("some bulk text", job_class="bulk") for _ in range(10)),
                prompt("x" * 5000),
                msgspec.structs.replace(long, deadline_s=1.0),
                *(long for _ in range(3)),
            ],
            when_unserved="wait",
        )
        for job in jobs[-3:]:
            await job.cancel()
        results = await asyncio.gather(
            *(job.result() for job in jobs), return_exceptions=True
        )
        states = [(await job.info()).state for job in jobs]
        assert not any(
            isinstance(r, Exception) and not isinstance(r, TokenmillError)
            for r in results
        )
        return results, states


@pytest.fixture(scope="module")
def worked(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Scrapes, list[object], list[str], UpProcess]]:
    directory = tmp_path_factory.mktemp("pool")
    settings = {
        "TOKENMILL_TENANTS": '{"default": {"weight": 2}}',
        "TOKENMILL_WORKER_MAX_CONTEXT": "2000",
    }
    # The gateway runs in this process, which may have counted for other modules.
    with (
        pytest.MonkeyPatch.context() as patch,
        up(directory, "--standby", "1", engine="echo:2", **settings) as pool,
    ):
        for one in CATALOG:
            if isinstance(one, Counter):
                patch.setattr(one, "values", {})
        gateway = RunningGateway(pool.url, directory, "none")
        with janitor(pool):
            gateway.start()
            try:
                results, states = asyncio.run(work(pool.url))
                with urllib.request.urlopen(f"{gateway.base}/v1/models") as reply:
                    assert reply.status == 200
                wait_until_sync(lambda: all_there(directory), what="all targets")
                wait_until_sync(
                    lambda: ended(directory) >= len(states),
                    what="all ends counted",
                )
                yield Scrapes(directory), results, states, pool
            finally:
                gateway.stop()


def all_there(directory: Path) -> bool:
    path = directory / FILE_NAME
    if not path.exists():
        return False
    found = json.loads(path.read_text())
    kinds = [entry["labels"]["kind"] for entry in found]
    return set(kinds) == KINDS and kinds.count("scheduler") == 2


def ended(directory: Path) -> float:
    return Scrapes(directory).sum("inference_requests_total")


def test_each_job_is_counted_once_whoever_ended_it(worked) -> None:
    scrapes, _, states, _ = worked
    assert {"succeeded", "cancelled", "failed", "expired"} == set(states)
    for state in set(states):
        found = scrapes.sum("inference_requests_total", status=state)
        assert found == states.count(state), state
    assert scrapes.sum("inference_requests_total") == len(states)
    assert scrapes.values("inference_requests_total", "model") == {MODEL}


def test_latencies_tokens_and_batches_agree_with_the_results(worked) -> None:
    scrapes, results, _, _ = worked
    done = [result for result in results if not isinstance(result, Exception)]
    assert scrapes.sum("inference_latency_seconds_count") == len(done)
    total_s = sum(result.timings.total_ms for result in done) / 1000
    assert scrapes.sum("inference_latency_seconds_sum") == pytest.approx(total_s)
    first = "tokenmill_time_to_first_token_seconds_count"
    assert scrapes.sum(first, job_class="bulk") == 10
    tokens = sum(result.usage.completion_tokens for result in done)
    assert scrapes.sum("tokenmill_output_tokens_total") >= tokens
    assert scrapes.sum("tokenmill_output_tokens_total", job_class="bulk") == 140
    gaps = scrapes.sum("tokenmill_inter_token_seconds_count", job_class="bulk")
    assert gaps == 140 - 10
    assert scrapes.sum("tokenmill_dispatched_jobs_total") >= len(done)
    assert scrapes.sum("tokenmill_batch_jobs_sum") == scrapes.sum(
        "tokenmill_dispatched_jobs_total"
    )
    steps = scrapes.sum("tokenmill_steps_total")
    assert scrapes.sum("tokenmill_step_seconds_count") >= steps > 0


def test_gauges_show_the_shard_once_though_two_schedulers_run(worked) -> None:
    scrapes, _, _, _ = worked
    assert scrapes.kinds.count("scheduler") == 2
    assert scrapes.sum("tokenmill_scheduler_active") == 1
    assert scrapes.sum("tokenmill_worker_groups", state="ready") == 1
    assert scrapes.sum("tokenmill_queue_jobs") == 0
    buckets = scrapes.values("tokenmill_queue_jobs", "bucket")
    assert buckets == {"128", "512", "2048", "8192", "beyond"}
    assert scrapes.sum("tokenmill_kv_blocks", state="free") == 1_000_000
    assert scrapes.sum("tokenmill_worker_resident_bytes") > 10_000_000
    assert scrapes.sum("tokenmill_redis_away") == 0
    states = scrapes.values("tokenmill_bulk_runs", "state")
    assert states == {"open", "complete", "cancelling", "cancelled"}
    tenants = scrapes.values("tokenmill_tenant_waiting_jobs", "tenant")
    assert tenants == {"default", "other"}


def test_the_gateway_counts_routes_and_not_paths(worked) -> None:
    scrapes, _, _, _ = worked
    name = "tokenmill_http_requests_total"
    assert scrapes.sum(name, route="/v1/models", status="200", method="GET") == 1
    assert scrapes.sum("tokenmill_http_open_requests") == 0


def test_every_query_reads_a_metric_that_some_process_shows(worked) -> None:
    scrapes, _, _, _ = worked
    known = scrapes.families | {"up"}  # which Prometheus itself makes
    board = json.loads((DEPLOY / "grafana/dashboards/tokenmill.json").read_text())
    queries = [
        target["expr"]
        for panel in board["panels"]
        for target in panel.get("targets", [])
    ]
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
    queries += [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    assert len(queries) > 50
    for query in queries:
        query = query.replace("$__rate_interval", "1m")
        assert metrics_of(query) <= known, query
    used = set().union(*(metrics_of(query) for query in queries))
    ours = {name for name in known if name.startswith(("tokenmill_", "inference_"))}
    unused = {
        name for name in ours - used if not name.endswith(("_count", "_sum", "_bucket"))
    }
    assert unused == set(), "shown by processes, read by no panel and no rule"


def test_a_worker_that_dies_is_seen_and_its_jobs_are_not_counted_twice(worked) -> None:
    before, _, _, pool = worked

    async def lose() -> None:
        async with Client(pool.url) as mill:
            slow = Sampling(max_tokens=600, ignore_eos=True)
            job = await mill.submit(Prompt("x" * 20, model=MODEL, sampling=slow))
            async for delta in job.stream():
                if delta.offset > 5:
                    break
            os.kill(pool.pids("worker-0")[-1], signal.SIGKILL)
            assert (await job.result()).usage.completion_tokens == 600

    asyncio.run(lose())

    def counted() -> bool:
        after = Scrapes(pool.directory)
        # The dead worker's counters are gone with it; the new one has this job alone.
        ended = after.sum("inference_requests_total", status="succeeded")
        return after.sum("tokenmill_leases_lost_total") == 1 and ended == 1

    wait_until_sync(counted, what="one lost lease and one end")
    assert before.sum("inference_requests_total", status="succeeded") == 40
