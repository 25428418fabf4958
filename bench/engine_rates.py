"""Our decode rate at fixed batch sizes, and our prefill rate, through whole steps."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from engine_ours import StepClock, checked, drain, requests_of
from engine_workload import Item
from harness import Figures

from tokenmill.workers.engine.detokenizer import TokenTable
from tokenmill.workers.engine.engine import Engine
from tokenmill.workers.engine.model.load import load_runner

if TYPE_CHECKING:
    from tokenmill.workers.engine.kv.store import KVKind
    from tokenmill.workers.engine.model.quantize import Weights

BATCHES = (1, 8, 16)
PROMPT, OUTPUT = 128, 64
"""Tokens before and during the timed decode steps, as in the other side's run."""
LONG_PROMPT, LONG_PROMPTS = 512, 4
"""Tokens of a prompt in the prefill run, and how many there are."""


def prompts(text: list[int], count: int, length: int, max_tokens: int) -> list[Item]:
    """Cuts `count` prompts of `length` tokens from a text, one after the other."""
    if len(text) < count * length:
        raise SystemExit(f"{count} prompts of {length} need more than {len(text)}")
    return [
        Item(f"p{n}", tuple(text[n * length : (n + 1) * length]), max_tokens)
        for n in range(count)
    ]


def run_rates(
    model: Path, text: list[int], *, weights: "Weights", kv: "KVKind", threads: int
) -> Figures:
    """Measures decode at batch 1, 8 and 16, and prefill.

    Args:
        model: Checkpoint directory.
        text: Tokens to cut prompts from.
        weights: Precision of linear layers.
        kv: Precision of the KV pool.
        threads: Compute threads.

    Returns:
        `decode_1`, `decode_8`, `decode_16` and `prefill`, tokens per second of whole
        engine steps, sampling and text included; `…_model`, of the model alone, as
        the other side counts.
    """
    clock = StepClock(load_runner(model, weights=weights, kv=kv, threads=threads))
    table = TokenTable.from_directory(model)
    _decode(clock, table, prompts(text, 1, PROMPT, OUTPUT), steps=4)  # warm
    figures: Figures = {}
    for batch in BATCHES:
        items = prompts(text, batch, PROMPT, 4 * PROMPT)
        whole, inside = _decode(clock, table, items, steps=OUTPUT)
        figures[f"decode_{batch}"] = batch * OUTPUT / whole
        figures[f"decode_{batch}_model"] = batch * OUTPUT / inside
    engine = Engine(clock, table, max_running=LONG_PROMPTS)
    clock.reset()
    began = time.perf_counter()
    for request in requests_of(prompts(text, LONG_PROMPTS, LONG_PROMPT, 1)):
        engine.add(request)
    drain(engine)
    tokens = LONG_PROMPT * LONG_PROMPTS
    figures["prefill"] = tokens / (time.perf_counter() - began)
    figures["prefill_model"] = tokens / sum(clock.seconds.values())
    return figures


def _decode(
    clock: StepClock, table: TokenTable, items: list[Item], *, steps: int
) -> tuple[float, float]:
    """Times steps in which every request decodes one token.

    Returns:
        Seconds of the whole steps, and of the model in them.
    """
    engine = Engine(clock, table, max_running=len(items))
    for request in requests_of(items):
        engine.add(request)
    while engine.capacity().prefill_backlog:
        checked(engine.step())
    clock.reset()
    began = time.perf_counter()
    for _ in range(steps):
        checked(engine.step())
    whole = time.perf_counter() - began
    if clock.steps["decode"] != steps or clock.decode_rows != steps * len(items):
        raise SystemExit(f"not all of {steps} steps decoded {len(items)} sequences")
    engine.abort_all()
    return whole, clock.seconds["decode"]
