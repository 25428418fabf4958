"""A request with an adapter gives the same tokens, whatever else the engine does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from support import invariance
from support.invariance import OUTPUT, Scarce, drain, small, wanted
from support.tiny_adapters import save_tiny_adapter

from tokenmill.workers.engine.adapters.cache import AdapterCache
from tokenmill.workers.engine.adapters.checkpoint import adapter_digest
from tokenmill.workers.engine.adapters.serving import serve_adapters
from tokenmill.workers.engine.detokenizer import TokenTable
from tokenmill.workers.engine.engine import Engine
from tokenmill.workers.engine.kv.store import KVKind
from tokenmill.workers.engine.model.load import load_runner
from tokenmill.workers.engine.request import EngineRequest

Keys = tuple[str | None, ...]


def others(like: EngineRequest) -> list[EngineRequest]:
    """Fewer than for the base alone: each step has a product an adapter and layer."""
    return invariance.others(like)[:9]


def dressed(requests: list[EngineRequest], keys: Keys) -> list[EngineRequest]:
    """Gives each request an adapter, by turns."""
    return [
        msgspec.structs.replace(one, adapter=keys[index % len(keys)])
        for index, one in enumerate(requests)
    ]


def loaded(base: Path, directory: Path, kv: KVKind) -> tuple[object, AdapterCache]:
    runner = load_runner(base, weights="int8", kv=kv, num_blocks=400, threads=1)
    cache = serve_adapters(runner, max_bytes=1 << 26)
    for seed, name in enumerate("ab"):
        path = save_tiny_adapter(base, directory / name, rank=4 + seed, seed=seed)
        cache.load(name, path, adapter_digest(path)).release()
    return runner, cache


def ways(runner: object, cache: AdapterCache, table: TokenTable, one: EngineRequest):
    """The request's tokens in each situation."""

    def engine(scarce: object = runner, **options: object) -> Engine:
        options = {"step_target_ms": 0.0, "adapters": cache, **options}
        return Engine(scarce, table, **options)

    found = {}

    def run(name: str, made: Engine, beside: list[EngineRequest]) -> Engine:
        for each in (*beside[:5], one, *beside[5:]):
            made.add(each)
        found[name] = drain(made)["wanted"]
        return made

    run("alone", engine(prefix_cache=False), [])
    run("among its own", engine(), dressed(others(one), (one.adapter,)))
    run("among all", engine(), dressed(others(one), ("a", None, "b")))
    run("among plain ones", engine(), others(one))
    run("in chunks", engine(prefill_chunk=7), dressed(others(one), ("b", "a")))
    twice = run("computed first", engine(), [])
    hits = twice.capacity().prefix_tokens_hit
    run("with a cached prefix", twice, [])
    assert twice.capacity().prefix_tokens_hit >= hits + 40
    pressed = engine(Scarce(runner, 16), kv_overcommit=16.0)
    run("preempted", pressed, dressed(small(one), ("b", None)))
    assert pressed.capacity().preemptions > 0
    halved = engine(Scarce(runner, runner.num_blocks, 20))
    run("in halved steps", halved, dressed(others(one), ("a", None, "b")))
    assert halved.capacity().out_of_memory > 0
    return found


@pytest.mark.parametrize(
    ("variant", "kv", "temperature"),
    [
        ("llama", "int4", 0.8),
        ("qwen3", "float32", 0.0),
        ("gpt2", "int8", 0.8),
    ],
)
def test_tokens_of_an_adapter_do_not_depend_on_the_batch(
    variant: str,
    kv: KVKind,
    temperature: float,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    base = tiny_model(variant)
    runner, cache = loaded(base, tmp_path, kv)
    table = TokenTable.from_directory(base)
    plain = wanted(4, temperature)
    by_key = {}
    # One with an adapter; and, once, one without among those that have one.
    for key in ("a", None) if variant == "llama" else ("a",):
        one = msgspec.structs.replace(plain, adapter=key)
        found = ways(runner, cache, table, one)
        differing = {name for name, ids in found.items() if ids != found["alone"]}
        assert not differing
        assert len(found["alone"]) == OUTPUT
        by_key[key] = found["alone"]
    assert by_key["a"] != by_key.get(None)
