"""Names in Redis: ids round-trip, everything of a shard shares its hash tag."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.shared.errors import UnknownJob
from tokenmill.shared.keys import (
    LANES,
    JobId,
    Keys,
    bucket_of,
    lane_of,
    new_unique,
    partition_of,
)
from tokenmill.shared.permanent_keys import (
    PERMANENT,
    PERMANENT_IN_SHARD,
    is_permanent,
)

MODELS = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,60}", fullmatch=True)


@given(MODELS, st.integers(0, 999))
def test_an_id_round_trips(model: str, partition: int) -> None:
    job_id = JobId(model, partition, new_unique())
    assert JobId.parse(str(job_id)) == job_id


@pytest.mark.parametrize(
    "text", ["", "x", "a.b", "m.0.SHOUT" + "x" * 20, "m{.0." + "a" * 20, "m.0.aa\n"]
)
def test_what_cannot_be_an_id_is_refused(text: str) -> None:
    with pytest.raises(UnknownJob, match="cannot be a job id"):
        JobId.parse(text)


def test_unique_parts_sort_by_time_and_differ() -> None:
    uniques = [new_unique() for _ in range(1000)]
    assert len(set(uniques)) == 1000
    assert [u[:11] for u in uniques] == sorted(u[:11] for u in uniques)
    assert set("".join(uniques)) <= set(string.hexdigits.lower())


def test_all_names_of_a_shard_share_one_hash_tag() -> None:
    keys = Keys("org/model", 3)
    names = [
        *(keys.lanes, keys.resume, keys.delayed, keys.lease, keys.deadline),
        *(keys.groups, keys.bell, keys.scheduler, keys.load, keys.recent),
        *(keys.done, keys.dead, keys.job("x"), keys.input("x"), keys.output("x")),
        *(keys.log("x"), keys.wake("x"), keys.ids("x"), keys.work("g")),
        *(keys.group("g"), keys.control("g"), keys.idempotency("t", "k")),
        keys.queue("bulk", "128", 7),
    ]
    assert len(set(names)) == len(names)
    assert {n[: len(keys.prefix)] for n in names} == {"tm:{org/model:3}:"}
    assert Keys.of_shard(keys.shard).prefix == keys.prefix


def test_buckets_hold_their_upper_bound() -> None:
    bounds = (128, 512)
    assert [bucket_of(n, bounds) for n in (1, 128, 129, 512, 513)] == [
        *("128", "128", "512", "512", "beyond")
    ]


@given(st.text(max_size=50), st.text(max_size=50), st.integers(1, 64))
def test_hashes_stay_in_range(tenant: str, key: str, partitions: int) -> None:
    assert 0 <= lane_of(tenant) < LANES
    assert 0 <= partition_of(tenant, key, partitions) < partitions


def test_hashes_are_the_documented_crc32() -> None:
    # docs/protocol.md promises these to clients in other languages.
    assert lane_of("default") == 223
    assert partition_of("acme", "order-17", 8) == 7


def test_only_what_is_bounded_may_stay_for_ever() -> None:
    keys = Keys("org/model", 3)
    permanent = [
        *PERMANENT,
        *(keys.prefix + name for name in PERMANENT_IN_SHARD),
        *(keys.queue("bulk", "128", 7), "tm:tokenizer:abc"),
    ]
    assert all(map(is_permanent, permanent))
    passing = [
        *(keys.job("x"), keys.input("x"), keys.output("x"), keys.log("x")),
        *(keys.work("g"), keys.group("g"), keys.rates, keys.idempotency("t", "k")),
        *("tm:other", "arq:job:1", f"{keys.prefix}lanes2"),
    ]
    assert not any(map(is_permanent, passing))
