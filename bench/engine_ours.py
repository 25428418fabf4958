"""The workload through our engine, in this process, without queue or network."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from engine_workload import Item, output_tokens

from tokenmill.shared.messages import Sampling
from tokenmill.workers.engine.detokenizer import TokenTable
from tokenmill.workers.engine.engine import Engine
from tokenmill.workers.engine.model.load import load_runner
from tokenmill.workers.engine.request import EngineRequest

if TYPE_CHECKING:
    import torch

    from tokenmill.workers.engine.batch import ModelRunner, StepBatch

Figures = dict[str, float]


class StepClock:
    """A runner that also keeps books: time and tokens, with and without prefill.

    Args:
        runner: The model.
    """

    def __init__(self, runner: "ModelRunner") -> None:
        self._runner = runner
        self.vocab_size = runner.vocab_size
        self.max_context = runner.max_context
        self.eos_token_ids = runner.eos_token_ids
        self.block_size = runner.block_size
        self.num_blocks = runner.num_blocks
        self.gemm_rows = 0
        """Rows counted where they enter the model's first linear layer."""
        self.reset()

    def reset(self) -> None:
        """Starts the books again."""
        self.seconds = {"decode": 0.0, "prefill": 0.0}
        self.steps = {"decode": 0, "prefill": 0}
        self.prefill_tokens = 0
        self.decode_rows = 0
        self._rows_before = self._runner.gemm_rows

    def run(self, batch: "StepBatch") -> "torch.Tensor":
        """Runs a step and enters it in the books."""
        started = time.perf_counter()
        logits = self._runner.run(batch)
        self.gemm_rows = self._runner.gemm_rows - self._rows_before
        prefill = sum(
            part.query_length for part in batch.slices if part.query_length > 1
        )
        kind = "prefill" if prefill else "decode"
        self.seconds[kind] += time.perf_counter() - started
        self.steps[kind] += 1
        self.prefill_tokens += prefill
        self.decode_rows += len(batch.token_ids) - prefill
        return logits


def _requests(items: list[Item]) -> list[EngineRequest]:
    return [
        EngineRequest(
            id=item.id,
            token_ids=item.token_ids,
            sampling=Sampling(max_tokens=item.max_tokens, ignore_eos=True),
            seed=0,
        )
        for item in items
    ]


def _drain(engine: Engine) -> int:
    """Steps to the end and returns how many output tokens came out."""
    count = 0
    while engine.has_work:
        output = engine.step()
        count += sum(len(delta.token_ids) for delta in output.deltas)
        for finished in output.finished:
            if finished.error is not None:
                raise SystemExit(f"{finished.request_id}: {finished.error.message}")
    return count


def run_ours(
    model: Path,
    items: list[Item],
    *,
    weights: Literal["int8", "float32"],
    kv: Literal["int8", "float32"],
    max_running: int,
    prefill_chunk: int,
    threads: int,
) -> Figures:
    """Runs all requests, submitted at once.

    Returns:
        Figures by name; rates in tokens per second, times in seconds or milliseconds.
    """
    began = time.perf_counter()
    clock = StepClock(load_runner(model, weights=weights, kv=kv, threads=threads))
    load_s = time.perf_counter() - began
    table = TokenTable.from_directory(model)
    warm = Engine(clock, table)
    for request in _requests([Item("warm", items[0].token_ids, 4)]):
        warm.add(request)
    _drain(warm)

    clock.reset()
    engine = Engine(clock, table, max_running=max_running, prefill_chunk=prefill_chunk)
    began, cpu_before = time.perf_counter(), time.process_time()
    for request in _requests(items):
        engine.add(request)
    produced = _drain(engine)
    seconds = time.perf_counter() - began
    cpu_s = time.process_time() - cpu_before
    engine.check_integrity()
    if produced != output_tokens(items):
        raise SystemExit(f"{produced} tokens came out, not {output_tokens(items)}")
    return {
        "output_tokens_per_s": produced / seconds,
        "total_tokens_per_s": engine.capacity().scheduled_tokens / seconds,
        "seconds": seconds,
        "cpu_s": cpu_s,
        "load_s": load_s,
        "output_tokens": produced,
        "outside_model_s": seconds - sum(clock.seconds.values()),
        **_engine_figures(engine, clock),
    }


def _engine_figures(engine: Engine, clock: StepClock) -> Figures:
    capacity = engine.capacity()
    base, slope = capacity.step_fit_ms
    decode_steps = max(1, clock.steps["decode"])
    return {
        "scheduled_tokens": capacity.scheduled_tokens,
        "gemm_rows": clock.gemm_rows,
        "steps": capacity.steps,
        "decode_steps": clock.steps["decode"],
        "decode_step_ms": 1e3 * clock.seconds["decode"] / decode_steps,
        "decode_s": clock.seconds["decode"],
        "prefill_steps": clock.steps["prefill"],
        "prefill_s": clock.seconds["prefill"],
        "prefill_tokens": clock.prefill_tokens,
        "decode_rows": clock.decode_rows,
        "step_fit_base_ms": base,
        "step_fit_ms_per_token": slope,
    }
