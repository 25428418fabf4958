"""Shares of versions, and to which version a job falls."""

import zlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.scheduler.targets import WEIGHTS_GRACE_S, Aim, Targets
from tokenmill.shared.errors import InvalidRequest, VersionConflict
from tokenmill.shared.routes import Route, Split, apportioned, check_shares, with_share

IDS = [f"m.0.{number:020d}" for number in range(4000)]
V1, V2, W = ("v1", "w1"), ("v2", "w2"), "w1"


class Group:
    """What `Aim` looks at."""

    def __init__(self, version: str, weights: str) -> None:
        self.version, self.weights = version, weights


def test_a_job_falls_to_a_version_by_the_crc_of_its_id() -> None:
    route = Route(shares={"v2": 10.0, "v1": 90.0})
    for job_id in IDS[:200]:
        expected = "v1" if zlib.crc32(job_id.encode()) % 10_000 < 9000 else "v2"
        assert route.version_of(job_id) == expected


def test_shares_are_kept_within_the_noise_of_a_sample() -> None:
    split = Split({"a": 50.0, "b": 30.0, "c": 20.0, "d": 0.0})
    found = Counter(map(split.of, IDS))
    assert set(found) == {"a", "b", "c"}
    for version, part in (("a", 0.5), ("b", 0.3), ("c", 0.2)):
        assert abs(found[version] / len(IDS) - part) < 0.04


def test_no_job_changes_sides_in_a_gradual_move() -> None:
    before: set[str] = set()
    for percent in (0.0, 0.5, 1.0, 10.0, 50.0, 99.99, 100.0):
        split = Split({"v1": 100 - percent, "v2": percent})
        now = {job_id for job_id in IDS if split.of(job_id) == "v2"}
        assert before <= now
        before = now
    assert len(before) == len(IDS)


def test_without_shares_every_version_serves() -> None:
    assert Route().version_of(IDS[0]) is None
    assert Targets(Route(), [V1, V2]).needs(IDS[0], "", "") == ""


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ({"v1": 60.0, "v2": 30.0}, "90 % together; expected 100"),
        ({"v1": 100.005}, "expected 0 to 100"),
        ({"v1": 50.001, "v2": 49.999}, "steps of 0.01"),
        ({"v1": -1.0, "v2": 101.0}, "expected 0 to 100"),
        ({"v1": float("nan")}, "expected 0 to 100"),
        ({"a b": 100.0}, "cannot be a version's name"),
        ({}, "0 % together"),
    ],
)
def test_shares_that_are_wrong_are_refused(shares, words) -> None:
    with pytest.raises(InvalidRequest, match=words):
        check_shares(shares)


@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "c"]), st.integers(1, 97), min_size=1
    ).map(lambda parts: {n: 100 * p / sum(parts.values()) for n, p in parts.items()}),
    st.integers(0, 10_000),
)
def test_the_others_keep_their_proportions(parts, steps) -> None:
    rounded = {name: round(part, 2) for name, part in parts.items()}
    percent = steps / 100
    made = with_share(rounded, "new", percent)
    assert sum(made.values()) == pytest.approx(100)
    assert made.get("new", 0) == percent
    for name, part in rounded.items():
        assert made.get(name, 0) == pytest.approx(part * (100 - percent) / 100, abs=0.1)


def test_many_small_shares_are_exact() -> None:
    """Each rounded by itself, five of 0.006 % would be more than there is."""
    others = {f"v{number}": 20.0 for number in range(5)}
    made = with_share(others, "new", 99.97)
    assert sorted(made.values()) == [0.01, 0.01, 0.01, 99.97]
    assert sum(apportioned(dict.fromkeys("abc", 1.0)).values()) == pytest.approx(100)


def test_a_rest_that_nobody_could_take_is_refused() -> None:
    with pytest.raises(VersionConflict, match="that with 90 %"):
        with_share({}, "v2", 10)
    assert with_share({"v1": 100.0}, "v2", 100) == {"v2": 100}


def test_what_a_job_needs() -> None:
    targets = Targets(Route(shares={"v1": 100.0}), [V1, V2])
    assert targets.needs("x", "", "") == "=v1"
    assert targets.needs("x", "v2", "") == "=v2"
    assert targets.needs("x", "", "w2") == "#w2"
    assert targets.needs("x", "v1", "w1") == "=v1#w1"
    assert targets.offered == {"=v1", "=v2", "#w1", "#w2", "=v1#w1", "=v2#w2"}


def test_a_version_without_a_group_leaves_its_jobs_to_the_others() -> None:
    shares = {"v1": 20.0, "v2": 60.0, "v3": 20.0}
    both = Targets(Route(shares=shares), [V1, ("v3", "w3"), ("v4", "w4")])
    assert both.away == ("v2",)
    found = Counter(map(both.version_of, IDS))
    assert set(found) == {"v1", "v3"}
    # Its own jobs of v1 and v3 stay, and theirs are divided evenly among them.
    assert abs(found["v1"] / len(IDS) - 0.5) < 0.04
    kept = Split(shares)
    for job_id in IDS:
        own = kept.of(job_id)
        assert own == "v2" or both.version_of(job_id) == own


def test_with_no_live_version_of_a_share_jobs_wait_for_their_own() -> None:
    targets = Targets(Route(shares={"v1": 100.0}), [V2])
    assert targets.needs("x", "", "") == "=v1"
    assert "=v1" not in targets.offered


def test_a_started_job_waits_for_its_weights_for_a_while() -> None:
    now = [100.0]
    aim = Aim(monotonic=lambda: now[0])
    groups = [Group(*V2)]
    assert aim.targets(groups, Route(), [W]).needs("x", "", W) == "#w1"
    now[0] += WEIGHTS_GRACE_S - 1
    assert aim.targets(groups, Route(), [W]).needs("x", "", W) == "#w1"
    # A worker with them comes and goes: the wait begins anew.
    aim.targets([Group(*V1), *groups], Route(), [W])
    now[0] += 2
    assert aim.targets(groups, Route(), [W]).needs("x", "", W) == "#w1"
    now[0] += WEIGHTS_GRACE_S
    assert aim.targets(groups, Route(), [W]).needs("x", "", W) == ""
    assert aim.targets(groups, Route(shares={"v2": 100.0}), [W]).needs("x", "", W) == (
        "=v2"
    )


def test_weights_of_a_registered_version_are_waited_for_without_end() -> None:
    now = [0.0]
    aim = Aim(monotonic=lambda: now[0])
    route = Route(weights={"v1": W})
    for _ in range(3):
        now[0] += WEIGHTS_GRACE_S
        assert aim.targets([Group(*V2)], route, [W]).needs("x", "", W) == "#w1"


def test_nothing_is_made_anew_while_nothing_changes() -> None:
    aim = Aim()
    groups = [Group(*V1), Group(*V1), Group(*V2)]
    first = aim.targets(groups, Route(serial=1, shares={"v1": 100.0}))
    again = aim.targets(groups[::-1], Route(serial=9, shares={"v1": 100.0}))
    assert again is first
    assert aim.targets(groups[:2], Route(shares={"v1": 100.0})) is not first
