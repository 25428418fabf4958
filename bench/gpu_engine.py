"""The engine on a device: graphs on and off, on a random model and one workload."""

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from gpu_device import device_of
from gpu_model import write

from tokenmill.shared.messages import Sampling
from tokenmill.workers.engine.detokenizer import TokenTable
from tokenmill.workers.engine.engine import Engine
from tokenmill.workers.engine.model.gpu.graph_start import GraphOptions
from tokenmill.workers.engine.model.gpu.graphs import Replay
from tokenmill.workers.engine.model.load import load_runner
from tokenmill.workers.engine.model.quantize import Weights
from tokenmill.workers.engine.model.runner import TransformersRunner
from tokenmill.workers.engine.request import EngineRequest

Row = dict[str, object]
MAX_RUNNING, CHUNK, KV_MIB = 16, 512, 4096


def workload(vocabulary: int, *, smoke: bool) -> tuple[list[list[int]], int]:
    """Returns prompts of random tokens and the output tokens of each.

    Args:
        vocabulary: Token ids are below it.
        smoke: Two short prompts.
    """
    random = np.random.default_rng(0)
    lengths = [5, 9] if smoke else random.integers(64, 512, 2 * MAX_RUNNING).tolist()
    prompts = [random.integers(3, vocabulary, n).tolist() for n in lengths]
    return prompts, 3 if smoke else 64


def stage(facts: Row, deadline: float) -> Iterator[Row]:
    """Yields the model, its start, what graphs gain, and tokens a second."""
    device, smoke = device_of(facts), bool(facts["smoke"])
    path = Path(str(facts["directory"]))
    yield write(path, device, smoke=smoke)
    kinds: list[Weights] = ["int8", "bfloat16", "int8-a8"]
    for weights in kinds[: 1 if smoke else 3]:
        began = time.perf_counter()
        runner = _load(path, weights, smoke=smoke)
        yield {
            "what": f"start {weights}",
            "seconds": time.perf_counter() - began,
            "decoder": type(runner.model).__name__,
            "kv_blocks": runner.num_blocks,
        }
        for gain in runner.graph_gains:
            yield {
                "what": f"graph {weights} {gain.rows} rows",
                "launched_ms": gain.launched_ms,
                "replayed_ms": gain.replayed_ms,
                "speedup": gain.speedup,
            }
        yield _throughput(runner, f"engine {weights} graphs", smoke=smoke)
        if runner.graphs is not None:
            runner.graphs = None
            if not smoke and time.monotonic() < deadline - 15:
                yield _throughput(runner, f"engine {weights} launched", smoke=smoke)
        del runner
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if time.monotonic() > deadline - 45:
            return


def _load(path: Path, weights: Weights, *, smoke: bool) -> TransformersRunner:
    if not smoke:
        options = GraphOptions(max_running=MAX_RUNNING, step_tokens=MAX_RUNNING + CHUNK)
        return load_runner(
            path, weights=weights, device="cuda", kv_memory_mb=KV_MIB, graphs=options
        )
    from tokenmill.workers.engine.kernels.triton.ops import TritonOps
    from tokenmill.workers.engine.model.device import Target
    from tokenmill.workers.engine.model.gpu.graph_start import decode_graphs

    cpu = torch.device("cpu")
    target = Target(cpu, TritonOps(cpu), torch.float32)
    runner = load_runner(path, weights=weights, device=target, num_blocks=16)
    with torch.inference_mode():
        runner.graphs, buckets = decode_graphs(runner, 2, _EveryStep())
        runner.graphs.capture(buckets.all())
    return runner


class _EveryStep:
    """Stands in for graphs where there is no device: runs the padded step again."""

    def record(self, step: Replay) -> Replay:
        return step


def _throughput(runner: TransformersRunner, what: str, *, smoke: bool) -> Row:
    """Runs the workload, after one request that warms up."""
    prompts, output = workload(runner.vocab_size, smoke=smoke)
    table = TokenTable(tuple(b"a" for _ in range(runner.vocab_size)))
    engine = Engine(runner, table, max_running=MAX_RUNNING, prefill_chunk=CHUNK)
    if not smoke:
        _run(engine, prompts[:1], output)
    graphs = runner.graphs
    padded = 0 if graphs is None else graphs.padded_rows
    rows = runner.gemm_rows
    began = time.perf_counter()
    tokens = _run(engine, prompts, output)
    took = time.perf_counter() - began
    padded = 0 if graphs is None else graphs.padded_rows - padded
    return {
        "what": what,
        "tokens_per_s": tokens / took,
        "output_tokens": tokens,
        "seconds": took,
        "rows": runner.gemm_rows - rows,
        "padding_share": padded / (runner.gemm_rows - rows + padded),
    }


def _run(engine: Engine, prompts: list[list[int]], output: int) -> int:
    """Returns how many output tokens came."""
    for index, prompt in enumerate(prompts):
        engine.add(
            EngineRequest(
                id=str(index),
                token_ids=tuple(prompt),
                sampling=Sampling(max_tokens=output, temperature=0.0, ignore_eos=True),
                seed=index,
            )
        )
    tokens = 0
    while engine.has_work:
        for finished in engine.step().finished:
            if finished.error is not None:
                raise RuntimeError(finished.error.message)
            tokens += len(finished.choices[0].token_ids)
    return tokens
