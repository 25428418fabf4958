"""Ids of a run's jobs say which job of which item they are."""

import pytest

from tokenmill.shared.bulk.job_ids import (
    MOST_GENERATION,
    MOST_SEQ,
    Place,
    place_of,
)
from tokenmill.shared.bulk.keys import RUN_ID, RunKeys, new_run_id
from tokenmill.shared.errors import InvalidRequest
from tokenmill.shared.keys import JobId, new_unique, partition_of
from tokenmill.shared.permanent_keys import is_permanent

RUN = "abcdefgh12"


@pytest.mark.parametrize(
    "place",
    [
        Place(RUN, 0, 0),
        Place(RUN, 123_456, 3, 2, 77),
        Place(RUN, MOST_SEQ, MOST_GENERATION, 35, 36**4 - 1),
    ],
)
def test_a_place_comes_back_from_its_id(place: Place):
    job_id = place.job_id("org/model-1.5", "t", 8)
    assert place_of(str(job_id)) == place
    assert JobId.parse(str(job_id)) == job_id
    assert job_id.partition == partition_of("t", place.unique, 8)
    assert len(place.unique) == 25


def test_ids_of_other_jobs_are_of_no_run():
    assert place_of(f"m.0.{new_unique()}") is None
    assert place_of(f"m.0.b{'a' * 30}") is None
    assert place_of("") is None


@pytest.mark.parametrize(
    "place",
    [
        Place(RUN, MOST_SEQ + 1, 0),
        Place(RUN, 0, MOST_GENERATION + 1),
        Place(RUN, 0, 0, 36),
        Place(RUN, 0, 0, 0, 36**4),
        Place(RUN, -1, 0),
    ],
)
def test_what_an_id_cannot_hold_is_refused(place: Place):
    with pytest.raises(InvalidRequest, match="out of range"):
        _ = place.unique


def test_everything_of_a_run_has_its_hash_tag_and_expires():
    run = new_run_id()
    assert RUN_ID.fullmatch(run)
    keys = RunKeys(run)
    names = [*keys.all_but_items, keys.item(3)]
    assert all(name.startswith(f"tm:bulk:{{{run}}}:") for name in names)
    assert not any(map(is_permanent, names))
    assert all(map(is_permanent, ("tm:bulk:runs", "tm:bulk:dirty", "tm:events")))
