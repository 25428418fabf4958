"""The processes of a pool: what their environments carry."""

import pytest

from tokenmill.shared.config import Config
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
