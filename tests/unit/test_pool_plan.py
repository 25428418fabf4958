"""The processes of a pool: what their environments carry."""

import pytest

from tokenmill.shared.config import Config, ModelConfig
from tokenmill.shared.config_check import check
from tokenmill.shared.errors import ConfigError
from tokenmill.shared.pool.plan import ALLOCATOR_VARIABLE, PoolOptions, plan_children


def environments() -> dict[str, dict[str, str]]:
    """The environment that each child is given, by name."""
    children = plan_children(PoolOptions(), Config(), "redis://host", console=False)
    return {child.name: dict(child.env()) for child in children}


def test_workers_allocate_in_segments_that_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(ALLOCATOR_VARIABLE, raising=False)
    found = environments()
    assert found["worker-0"]["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert ALLOCATOR_VARIABLE not in found["scheduler"]


def test_the_operators_allocator_settings_stand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ALLOCATOR_VARIABLE, "max_split_size_mb:128")
    assert ALLOCATOR_VARIABLE not in environments()["worker-0"]


def commands(model: ModelConfig) -> list[tuple[str, ...]]:
    config = Config(models=(model,))
    check(config, {})
    children = plan_children(PoolOptions(), config, "redis://host", console=False)
    return [child.command for child in children if child.name.startswith("worker")]


def test_each_replica_is_told_which_lengths_it_serves() -> None:
    model = ModelConfig(name="m", replicas=3, serves=("short", "long", "any"))
    told = [command[command.index("--serves") + 1] for command in commands(model)]
    assert told == ["short", "long", "any"]


def test_without_a_word_of_lengths_the_workers_setting_stands() -> None:
    (command,) = commands(ModelConfig(name="m"))
    assert "--serves" not in command


def test_lengths_for_another_number_of_replicas_are_refused() -> None:
    model = ModelConfig(name="m", replicas=3, serves=("short", "long"))
    with pytest.raises(ConfigError, match=r"models\[0\].serves.*2 entries.*3 replicas"):
        commands(model)
