"""The same request gives the same tokens, whatever else goes on in the engine.

Alone in one prefill; among fifteen others; in small chunks; preempted; with its prefix
in the cache; its steps halved for want of memory. On a real (tiny) model, with the
store in which decoding reads what was rounded.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.invariance import OUTPUT, Scarce, drain, others, small, wanted

from tokenmill.workers.engine.detokenizer import TokenTable
from tokenmill.workers.engine.engine import Engine
from tokenmill.workers.engine.kernels.ops import backend_report
from tokenmill.workers.engine.kv.store import KVKind
from tokenmill.workers.engine.model.load import load_runner
from tokenmill.workers.engine.request import EngineRequest


def ways(runner: object, table: TokenTable, request: EngineRequest) -> dict[str, tuple]:
    """The request's tokens in each situation."""

    def engine(scarce: object = runner, **options: object) -> Engine:
        return Engine(scarce, table, **{"step_target_ms": 0.0, **options})

    found = {}

    def run(name: str, made: Engine, beside: list[EngineRequest]) -> Engine:
        for one in (*beside[:8], request, *beside[8:]):
            made.add(one)
        found[name] = drain(made)["wanted"]
        return made

    run("alone", engine(prefix_cache=False), [])
    run("among others", engine(), others(request))
    run("in chunks", engine(prefill_chunk=7, prefix_cache=False), [])
    run("in chunks that follow the clock", engine(step_target_ms=None), others(request))
    twice = run("computed first", engine(), [])
    hits = twice.capacity().prefix_tokens_hit
    run("with a cached prefix", twice, [])
    assert twice.capacity().prefix_tokens_hit >= hits + 40
    pressed = engine(Scarce(runner, 16), kv_overcommit=16.0)
    run("preempted", pressed, small(request))
    # Two came before it and outlast it, so it is the one that had to yield.
    assert pressed.capacity().preemptions > 0
    halved = engine(Scarce(runner, runner.num_blocks, 20))
    run("in halved steps", halved, others(request))
    assert halved.capacity().out_of_memory > 0
    return found


def check(path: Path, kv: KVKind, seed: int, temperature: float) -> None:
    runner = load_runner(path, weights="int8", kv=kv, num_blocks=400, threads=1)
    table = TokenTable.from_directory(path)
    found = ways(runner, table, wanted(seed, temperature))
    differing = {name for name, tokens in found.items() if tokens != found["alone"]}
    assert not differing
    assert len(found["alone"]) == OUTPUT


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_tokens_do_not_depend_on_the_batch(
    seed: int, temperature: float, tiny_model: Callable[[str], Path]
) -> None:
    check(tiny_model("llama"), "int8", seed, temperature)


@pytest.mark.parametrize("kv", ["int4", "float32"])
def test_nor_with_other_stores(kv: KVKind, tiny_model: Callable[[str], Path]) -> None:
    check(tiny_model("llama"), kv, 5, 0.8)


@pytest.mark.parametrize("variant", ["gpt2", "mistral", "llama-dynamic", "qwen3"])
def test_nor_in_other_families(variant: str, tiny_model: Callable[[str], Path]) -> None:
    check(tiny_model(variant), "int8", 4, 0.8)


def check_on(backend: str, path: str) -> None:
    """Runs in a process of its own, whose kernels are those of `backend`."""
    assert backend_report()["backend"] == backend
    for seed, temperature in ((1, 0.0), (2, 0.8)):
        check(Path(path), "int8", seed, temperature)


def test_nor_without_the_extension(tiny_model: Callable[[str], Path]) -> None:
    """The kernels are chosen once a process, so another process runs the check."""
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from test_batch_invariance import check_on\n"
        f"check_on('numba', {str(tiny_model('llama'))!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TOKENMILL_KERNELS": "numba"},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
