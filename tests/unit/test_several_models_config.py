"""Settings of several models: devices, shares, buckets, limits, and what is refused."""

import msgspec
import pytest

from tokenmill.shared.config import Config, ModelConfig
from tokenmill.shared.config_check import check
from tokenmill.shared.config_load import load_config
from tokenmill.shared.config_model import ModelLimits
from tokenmill.shared.errors import ConfigError
from tokenmill.shared.messages import PoolCard, Prompt, encode
from tokenmill.shared.model_terms import buckets_for, limits_for
from tokenmill.shared.new_job import new_job
from tokenmill.shared.placing import core_slices, shared_sets, slots_of
from tokenmill.shared.pool_card import pool_card

TOML = """
[[models]]
name = "small"
share = 0.25
buckets = [16, 64]
[models.limits]
max_waiting_jobs = 7
max_payload_bytes = 2048

[[models]]
name = "large"
devices = [0, 1, 2, 3]
tp = 2
replicas = 2
"""


def checked(*models: ModelConfig, **sections: object) -> Config:
    config = Config(models=models, **sections)
    check(config, {})
    return config


def model(name: str = "m", **fields: object) -> ModelConfig:
    return ModelConfig(name=name, **fields)


def test_a_file_gives_each_model_its_own(tmp_path) -> None:
    path = tmp_path / "pool.toml"
    path.write_text(TOML)
    config = load_config(path, {}).config
    assert buckets_for(config, "small") == (16, 64)
    assert buckets_for(config, "large") == config.pool.buckets
    assert buckets_for(config, "unlisted") == config.pool.buckets
    assert limits_for(config, "small").max_waiting_jobs == 7
    assert limits_for(config, "small").max_waiting_tokens == 50_000_000
    assert limits_for(config, "large") == config.limits
    assert [slot.devices for slot in slots_of(config.models)] == [(), (0, 1), (2, 3)]


def test_a_child_reads_the_same_from_its_environment(tmp_path) -> None:
    path = tmp_path / "pool.toml"
    path.write_text(TOML)
    models = load_config(path, {}).config.models
    told = {"TOKENMILL_MODELS": msgspec.json.encode(models).decode()}
    assert load_config(None, told).config.models == models


def test_config_show_names_the_limits_that_differ(tmp_path) -> None:
    path = tmp_path / "pool.toml"
    path.write_text(TOML)
    rows = {key: value for key, value, _ in load_config(path, {}).rows()}
    assert rows["models[0].limits"] == {
        "max_waiting_jobs": 7,
        "max_payload_bytes": 2048,
    }
    assert rows["models[1].limits"] == {}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"share": 0.0}, r"models\[0\].share.*above 0 and at most 1"),
        ({"share": 1.5}, r"models\[0\].share.*above 0 and at most 1"),
        ({"tp": 0}, r"models\[0\].tp.*1 to 64"),
        ({"devices": (-1,)}, "numbered from 0"),
        ({"devices": (0, 1, 2), "tp": 2, "replicas": 2}, "3 are listed; expected 4"),
        ({"devices": (0, 1), "replicas": 1}, "2 are listed; expected 1"),
        ({"devices": (0, 1), "replicas": 3}, "cannot share out evenly; expected 3"),
        ({"devices": (0, 0), "tp": 2}, r"need a device each.*\[0, 0\]"),
        ({"buckets": (64, 16)}, "rising numbers of tokens, or nothing"),
        ({"buckets": ()}, "rising numbers"),
        ({"limits": ModelLimits(max_waiting_jobs=0)}, r"limits.max_waiting_jobs"),
        ({"limits": ModelLimits(max_payload_bytes=1)}, "value from 1024"),
        ({"share": 0.5, "tp": 3}, "this host come to 1.5"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(fields, says) -> None:
    with pytest.raises(ConfigError, match=says):
        checked(model(**fields))


def test_an_unknown_limit_is_refused_with_those_there_are(tmp_path) -> None:
    path = tmp_path / "pool.toml"
    path.write_text('[[models]]\nname = "m"\nlimits = {jobs = 3}\n')
    with pytest.raises(ConfigError, match=r"limits.*jobs.*known here: max_waiting_"):
        load_config(path, {})


def test_more_than_a_whole_device_cannot_be_given_away() -> None:
    with pytest.raises(ConfigError, match=r"device 1 come to 1.25 \(a 0.5, b 0.75\)"):
        checked(
            model("a", devices=(0, 1), replicas=2, share=0.5),
            model("b", devices=(1,), share=0.75),
        )
    third = 1 / 3
    checked(*(model(name, devices=(0,), share=third) for name in "abc"))
    checked(*(model(name, share=0.5) for name in "ab"))
    with pytest.raises(ConfigError, match=r"models\[2\].share.*this host come to 1.5"):
        checked(*(model(name, share=0.5) for name in "abc"))


def test_replicas_share_listed_devices_in_turn() -> None:
    four = model(devices=(4, 5), replicas=4)
    assert [slot.devices for slot in slots_of([four])] == [(4,), (5,), (4,), (5,)]
    split = model(devices=(0, 1), tp=2, replicas=2)
    assert [slot.devices for slot in slots_of([split])] == [(0, 1), (0, 1)]
    checked(four, model("n", devices=(6, 6), replicas=2))


def test_devices_that_a_replica_joins_have_one_server() -> None:
    def sets(*models: ModelConfig) -> list[tuple[int, ...]]:
        return shared_sets(slots_of(models))

    assert sets(model(devices=(0, 1), replicas=2)) == []  # each owns its device
    assert sets(model("a", devices=(0,)), model("b", devices=(0,))) == [(0,)]
    joined = sets(
        model("a", devices=(0, 1), tp=2),
        model("b", devices=(1,)),
        model("c", devices=(2,)),
        model("d", devices=(3, 3), replicas=2),
    )
    assert joined == [(0, 1), (3,)]
    # A chain is one set, in whatever order it comes.
    chain = [model("x", devices=(2, 3), tp=2), model("y", devices=(0, 1), tp=2)]
    assert sets(*chain, model("z", devices=(1, 2), tp=2)) == [(0, 1, 2, 3)]


def test_replicas_have_cores_of_their_own() -> None:
    def cores(count: int, *models: ModelConfig) -> list[tuple[int, ...]]:
        return core_slices(slots_of(models), range(count))

    halves = [model("a", share=0.5), model("b", share=0.5)]
    assert cores(4, *halves) == [(0, 1), (2, 3)]
    assert cores(2, *halves) == [(0,), (1,)]
    assert cores(1, *halves) == [(0,), (0,)]
    assert cores(8, model(share=0.25, tp=2), model("n", share=0.5)) == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
    ]
    thirds = cores(8, *(model(name, share=1 / 3) for name in "abc"))
    assert sorted(core for part in thirds for core in part) == list(range(8))
    assert cores(4, model("a"), model("b", share=0.5)) == [(), (0, 1)]
    assert cores(4, model(devices=(0,), share=0.5)) == [()]
    assert cores(0, *halves) == [(), ()]


def test_a_producer_takes_the_model_s_buckets_and_bytes() -> None:
    config = checked(
        model("a", buckets=(4, 8), limits=ModelLimits(max_payload_bytes=2048)),
        model("b"),
    )
    card = msgspec.json.decode(encode(pool_card(config)), type=PoolCard)
    assert set(card.by_model) == {"a"}
    assert card.all_buckets() == [4, 8, 128, 512, 2048, 8192]
    text = "x" * 20  # some six tokens
    assert new_job(Prompt(text, model="a"), None, card).bucket == "8"
    assert new_job(Prompt(text, model="b"), None, card).bucket == "128"
    assert card.of_model("a").max_payload_bytes == 2048
    with pytest.raises(Exception, match="2048"):
        new_job(Prompt("x" * 4000, model="a"), None, card)
    new_job(Prompt("x" * 4000, model="b"), None, card)


def test_a_card_without_models_of_its_own_is_as_before() -> None:
    config = checked(model("a"))
    assert b"by_model" in encode(pool_card(config))
    card = PoolCard()
    assert card.of_model("a") is card
