"""Instruments, their exposition, and the files of Prometheus and Grafana."""

import json
import re
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support.promql import metrics_of

import tokenmill
from tokenmill.shared.config import Config, MetricsConfig
from tokenmill.shared.metrics import labels
from tokenmill.shared.metrics.catalog import CATALOG, shown_by
from tokenmill.shared.metrics.exposition import family_of, make_registry
from tokenmill.shared.metrics.instruments import (
    MOST_SERIES,
    OTHER,
    Counter,
    Gauge,
    Histogram,
)
from tokenmill.shared.metrics.targets import targets_of
from tokenmill.shared.process_card import ProcessCard
from tokenmill.shared.watch.statistics import RATE_MS, Ended, latency_of, rate_of

DEPLOY = Path(tokenmill.__file__).resolve().parent / "deploy"
KIND = ("worker",)


def samples(instrument: Any) -> dict[str, float]:
    return {
        f"{one.name}{sorted(one.labels.items())}": one.value
        for one in family_of(instrument).samples
    }


# --- instruments ------------------------------------------------------------------
def test_counter_and_gauge_count() -> None:
    counter = Counter("tokenmill_things", "Things.", "kind", kinds=KIND)
    counter.add("a")
    counter.add("a", by=2)
    counter.add("b", by=0)
    assert samples(counter) == {
        "tokenmill_things_total[('kind', 'a')]": 3,
        "tokenmill_things_total[('kind', 'b')]": 0,
    }
    gauge = Gauge("tokenmill_level", "Level.", kinds=KIND)
    gauge.set(to=5)
    gauge.add(by=-2)
    assert samples(gauge) == {"tokenmill_level[]": 3}
    gauge.replace({})
    assert samples(gauge) == {}
    bare = Counter("tokenmill_things", "Things.", kinds=KIND)
    assert samples(bare) == {"tokenmill_things_total[]": 0}  # before its first event


def test_histogram_is_cumulative_and_its_bounds_are_inclusive() -> None:
    histogram = Histogram(
        "tokenmill_time_seconds", "Time.", bounds=(0.1, 1.0), kinds=KIND
    )
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value)
    histogram.observe(0.2, times=3)
    text = {
        f"{s.name} {s.labels.get('le')}": s.value for s in family_of(histogram).samples
    }
    assert text == {
        "tokenmill_time_seconds_bucket 0.1": 2,
        "tokenmill_time_seconds_bucket 1.0": 6,
        "tokenmill_time_seconds_bucket +Inf": 7,
        "tokenmill_time_seconds_count None": 7,
        "tokenmill_time_seconds_sum None": pytest.approx(8.25),
    }


def test_series_have_a_bound_and_wrong_labels_are_refused() -> None:
    counter = Counter("tokenmill_things", "Things.", "kind", kinds=KIND)
    histogram = Histogram("tokenmill_s", "S.", "kind", bounds=(1,), kinds=KIND)
    for number in range(MOST_SERIES + 100):
        counter.add(str(number))
        histogram.observe(1, str(number))
    assert len(counter.values) == len(histogram.series) == MOST_SERIES + 1
    assert counter.values[OTHER,] == 100
    assert histogram.series[OTHER,].counts == [100, 0]
    with pytest.raises(ValueError, match="has the labels"):
        counter.add("a", "b")


def test_a_scrape_beside_counting_is_whole() -> None:
    counter = Counter("tokenmill_things", "Things.", "kind", kinds=KIND)
    stop = threading.Event()

    def count() -> None:
        number = 0
        while not stop.is_set():
            counter.add(str(number % 500))
            number += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        for _ in range(50):
            seen = [one.value for one in family_of(counter).samples]
            assert seen == sorted(seen, reverse=True)  # counted in turn, so never up
    finally:
        stop.set()
        thread.join()


def test_only_models_that_someone_of_ours_named_are_labels(monkeypatch) -> None:
    monkeypatch.setattr(labels, "_known", set())
    labels.know(["mine"])
    assert labels.model_label("mine") == "mine"
    assert labels.model_label("a-strangers") == OTHER
    labels.know(f"m{n}" for n in range(1000))
    assert len(labels._known) == labels.MOST_MODELS


# --- exposition ---------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["scheduler", "janitor", "worker", "gateway"])
def test_every_process_shows_its_families_with_help(kind: str) -> None:
    card = ProcessCard(kind=kind, id="x", host="h", pid=1, version="1.2")
    refreshed: list[int] = []
    registry = make_registry(card, [lambda: refreshed.append(1)])
    text = generate_latest(registry).decode()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    assert refreshed == [1]
    assert {one.name for one in shown_by(kind)} <= set(found)
    assert all(family.documentation for family in found.values())
    assert found["tokenmill_build_info"].samples[0].labels == {
        "version": "1.2",
        "kind": kind,
    }
    assert "process_resident_memory_bytes" in found


def test_names_follow_the_conventions() -> None:
    names = [one.name for one in CATALOG]
    assert len(set(names)) == len(names)
    for one in CATALOG:
        assert not one.name.endswith("_total"), "the library adds it"
        assert "_ms" not in one.name
        assert "milli" not in one.name
        assert set(one.labels).isdisjoint({"le", "id", "job", "job_id", "instance"})
        assert one.kinds
        if isinstance(one, Histogram):
            assert all(a < b for a, b in pairwise(one.bounds))
    for required in ("inference_requests", "inference_latency_seconds"):
        assert required in names
    assert "gpu_memory_usage_bytes" in names


# --- statistics -----------------------------------------------------------------------
def test_percentiles_and_rates() -> None:
    ends = [Ended(0, "succeeded", "bulk", float(n), 2.0 * n) for n in range(101)]
    found = latency_of([*ends, Ended(0, "failed", "bulk", None, 5000.0)])
    assert (found.jobs, found.ttft_p50_ms, found.total_p95_ms) == (102, 50.0, 190.0)
    assert latency_of([]).ttft_p99_ms is None
    now = 1_000_000
    old = (now - RATE_MS - 1, "succeeded")
    recent = [(now - 1000, "failed"), (now - 2000, "succeeded")]
    assert rate_of([*recent, old], now, cut=False) == (0.2, 0.1)
    # More ended than were read: the rate is that of the two seconds read.
    assert rate_of(recent, now, cut=True) == (1.0, 0.5)
    assert rate_of([], now, cut=False) == (0.0, 0.0)


def test_targets_are_file_sd() -> None:
    cards = [
        ProcessCard(kind="worker", id="b", host="h", pid=1, metrics_url=None),
        ProcessCard(
            kind="worker", id="a", host="h", pid=1, metrics_url="http://h:9/metrics"
        ),
    ]
    assert targets_of(cards) == [
        {"targets": ["h:9"], "labels": {"kind": "worker", "host": "h"}}
    ]


def test_settings_have_their_defaults() -> None:
    assert Config().metrics == MetricsConfig(enabled=True, host="127.0.0.1", port=0)


# --- files of Prometheus and Grafana --------------------------------------------------
def rules() -> list[dict[str, Any]]:
    loaded = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
    assert set(loaded) == {"groups"}
    return [rule for group in loaded["groups"] for rule in group["rules"]]


def test_alert_rules_have_the_form_that_prometheus_reads() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["alert"].startswith("Tokenmill")
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert metrics_of(rule["expr"])
        assert str(rule.get("for", "1m"))[-1] in "smh"
    for needed in (
        *("RedisAway", "NoScheduler", "WorkerMissing", "NoProgress", "QueueOld"),
        *("SlowFirstToken", "LeasesLost", "DeadLetters", "KvPoolFull"),
    ):
        assert f"Tokenmill{needed}" in names


def test_a_new_pool_pages_nobody_and_one_that_lost_a_kind_is_noticed() -> None:
    exprs = {rule["alert"]: rule["expr"] for rule in rules()}
    # No shard yet, so no series of one; that schedulers run shows from their start.
    runs = 'absent(tokenmill_build_info{kind="scheduler"})'
    assert runs in exprs["TokenmillNoScheduler"]
    absent = re.compile(r"absent\(([^()]*)\)")
    looked_for = {name for expr in exprs.values() for name in absent.findall(expr)}
    kinds = {"scheduler", "worker", "janitor", "gateway"}
    assert looked_for == {f'tokenmill_build_info{{kind="{kind}"}}' for kind in kinds}
    assert "[15m:]" in exprs["TokenmillFewerProcesses"]


def test_what_every_janitor_shows_is_not_added_up() -> None:
    queries = [
        target["expr"]
        for panel in dashboard()["panels"]
        for target in panel.get("targets", [])
        if "tokenmill_bulk_runs" in target["expr"]
    ]
    assert queries == ["max by (state) (tokenmill_bulk_runs)"]


def test_the_scrape_configuration_reads_the_rules_of_this_folder() -> None:
    loaded = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    assert [(DEPLOY / "prometheus" / name).exists() for name in loaded["rule_files"]]
    (job,) = loaded["scrape_configs"]
    assert job["job_name"] == "tokenmill"
    assert job["dns_sd_configs"][0]["port"] == 9464


def dashboard() -> dict[str, Any]:
    return json.loads((DEPLOY / "grafana/dashboards/tokenmill.json").read_text())


def test_the_dashboard_has_the_form_that_grafana_reads() -> None:
    board = dashboard()
    assert board["uid"] == board["title"] == "tokenmill"
    assert isinstance(board["schemaVersion"], int)
    panels = board["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert taken.isdisjoint(cells), panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["type"] in ("timeseries", "stat")
        assert panel["fieldConfig"]["defaults"]["unit"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0
        assert all(t["datasource"]["type"] == "prometheus" for t in panel["targets"])
    assert {one["name"] for one in board["templating"]["list"]} == {
        "datasource",
        "model",
    }


def test_provisioning_names_what_compose_mounts() -> None:
    folder = DEPLOY / "grafana/provisioning"
    source = yaml.safe_load((folder / "datasources/prometheus.yml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    boards = yaml.safe_load((folder / "dashboards/tokenmill.yml").read_text())
    path = boards["providers"][0]["options"]["path"]
    compose = yaml.safe_load((DEPLOY.parent / "docker-compose.yml").read_text())
    mounts = compose["services"]["grafana"]["volumes"]
    assert f"./deploy/grafana/dashboards:{path}:ro" in mounts


def test_promql_names() -> None:
    query = (
        'histogram_quantile(0.95, sum by (le, x) (rate(a_bucket{m=~"$m"}[5m]))) '
        "/ on (i) group_left (k) b > 1e3 unless absent(c_total)"
    )
    assert metrics_of(query) == {"a_bucket", "b", "c_total"}
