"""The workload through our engine, in this process, without queue or network."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from engine_workload import Item, output_tokens
from harness import Figures

from tokenmill.shared.messages import JobClass, Sampling
from tokenmill.workers.engine.detokenizer import TokenTable
from tokenmill.workers.engine.engine import Engine
from tokenmill.workers.engine.model.load import load_runner
from tokenmill.workers.engine.request import EngineRequest, StepOutput

if TYPE_CHECKING:
    import torch

    from tokenmill.workers.engine.batch import ModelRunner, StepBatch
    from tokenmill.workers.engine.kv.store import KVKind
    from tokenmill.workers.engine.model.quantize import Weights


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
        self.weights_version = runner.weights_version
        self.kv_depends_on_length = runner.kv_depends_on_length
        self.gemm_rows = 0
        """Rows counted where they enter the model's first linear layer."""
        self.reset()

    def __getattr__(self, name: str) -> object:
        """Whatever else the engine asks of the model."""
        return getattr(self._runner, name)

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


def requests_of(
    items: list[Item], job_class: JobClass = JobClass.INTERACTIVE
) -> list[EngineRequest]:
    """Returns greedy requests with forced output lengths."""
    return [
        EngineRequest(
            id=item.id,
            token_ids=item.token_ids,
            sampling=Sampling(max_tokens=item.max_tokens, ignore_eos=True),
            seed=0,
            job_class=job_class,
        )
        for item in items
    ]


class KVBooks:
    """Slots of KV blocks after each step: allocated, and in use."""

    def __init__(self) -> None:
        self.allocated = 0
        self.used = 0
        self.most_allocated = 0

    def enter(self, engine: Engine) -> None:
        """Takes the pool's state after a step."""
        capacity = engine.capacity()
        self.allocated += capacity.allocated_tokens
        self.used += capacity.used_tokens
        self.most_allocated = max(self.most_allocated, capacity.allocated_tokens)

    @property
    def waste(self) -> float:
        """The part of the allocated slots that held no token, over all steps."""
        return 1 - self.used / self.allocated if self.allocated else 0.0


def checked(output: StepOutput) -> StepOutput:
    """Returns a step's output, and ends the benchmark if a request failed."""
    for finished in output.finished:
        if finished.error is not None:
            raise SystemExit(f"{finished.request_id}: {finished.error.message}")
    return output


def drain(engine: Engine, kv: KVBooks | None = None) -> dict[str, list[int]]:
    """Steps to the end and returns each request's output tokens."""
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        output = checked(engine.step())
        for delta in output.deltas:
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        if kv is not None:
            kv.enter(engine)
    return tokens


def run_ours(
    model: Path,
    items: list[Item],
    *,
    weights: "Weights",
    kv: "KVKind",
    max_running: int,
    threads: int,
    device: str = "auto",
    job_class: JobClass = JobClass.INTERACTIVE,
) -> Figures:
    """Runs all requests, submitted at once.

    Returns:
        Figures by name; rates in tokens per second, times in seconds or milliseconds.
    """
    began = time.perf_counter()
    clock = StepClock(
        load_runner(model, weights=weights, kv=kv, threads=threads, device=device)
    )
    load_s = time.perf_counter() - began
    table = TokenTable.from_directory(model)
    _warm(clock, table, items[0])
    books = KVBooks()
    engine = Engine(clock, table, max_running=max_running)
    began, cpu_before = time.perf_counter(), time.process_time()
    for request in requests_of(items, job_class):
        engine.add(request)
    produced = sum(map(len, drain(engine, books).values()))
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
        "kv_waste_percent": 100 * books.waste,
        "kv_most_allocated_tokens": books.most_allocated,
        **_engine_figures(engine, clock),
    }


def _warm(clock: StepClock, table: TokenTable, item: Item) -> None:
    """Runs the first steps, which are slower, on an engine of their own."""
    engine = Engine(clock, table)
    for request in requests_of([Item("warm", item.token_ids, 4)]):
        engine.add(request)
    drain(engine)
    clock.reset()


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
