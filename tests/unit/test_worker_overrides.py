"""Options of `tokenmill work` over the settings: which are refused, and how."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from tokenmill.shared.config_load import load_config
from tokenmill.shared.errors import ConfigError, RedisUnavailable
from tokenmill.shared.pool.starting import Overrides, overridden
from tokenmill.workers import service
from tokenmill.workers.cli import work
from tokenmill.workers.cli_overrides import chosen_model, with_worker

UNREACHABLE = "redis://127.0.0.1:1"


@pytest.fixture(autouse=True)
def work_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TOKENMILL_CONFIG", raising=False)
    monkeypatch.setattr("tokenmill.shared.logging.configure", lambda *_: None)


@pytest.mark.parametrize(
    ("options", "key", "problem"),
    [
        ({"device": "tpu"}, "worker.device", "'tpu' is unusable: .*auto, cpu, cuda"),
        ({"serves": "x"}, "worker.serves", "'x' is unusable: .*any, short, long"),
        ({"threads": 0}, "worker.threads", "value 0; expected a value from 1"),
        ({"weights": "int4"}, "models.weights", "'int4' is unusable: .*int8, float32"),
        ({"kv": "int9"}, "models.kv", "'int9' is unusable: .*int8, int4, float32"),
        ({"tp": 65}, "models.tp", "value 65; expected 1 to 64"),
    ],
)
async def test_an_option_is_refused_as_its_setting_is(
    options: dict[str, Any], key: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        await work(model="smollm2-135m", url=UNREACHABLE, **options)
    assert (caught.value.key, caught.value.origin) == (key, "command line")


async def test_a_profile_that_cannot_be_is_refused_before_redis_is_looked_for(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="profile it with tp = 1"):
        await work(model="m", url=UNREACHABLE, tp=3, profile=tmp_path / "p")
    with pytest.raises(ConfigError, match="expected model, echo or echo:<ms per step>"):
        await work(model="m", url=UNREACHABLE, engine="modell")


async def test_a_load_that_failed_while_redis_was_away_leaves_no_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: left.append(what))

    failed = asyncio.Event()

    async def away(_: object) -> None:
        await failed.wait()
        raise RedisUnavailable("it is away")

    async def loading() -> Any:
        failed.set()
        raise ConfigError("profile", "cannot be")

    monkeypatch.setattr(service, "_reach", away)
    with pytest.raises(RedisUnavailable):
        await service._examined(None, None, loading(), 60.0)  # type: ignore[arg-type]
    gc.collect()
    assert left == []


def test_options_go_over_the_settings_and_leave_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[worker]\nthreads = 3\n[[models]]\nname = "m"\nkv = "int4"\n')
    settings = with_worker(load_config(file, {}), threads=None, device="cpu")
    assert (settings.worker.threads, settings.worker.device) == (3, "cpu")
    chosen = chosen_model(settings, "/there", "m", weights="float32", kv=None)
    assert (chosen.path, chosen.weights, chosen.kv) == ("/there", "float32", "int4")


def test_a_pool_names_the_command_line_where_its_option_is_wrong() -> None:
    with pytest.raises(ConfigError, match="expected 0 to 1024") as caught:
        overridden(load_config(environ={}), Overrides(workers=2000))
    assert caught.value.origin == "command line"
