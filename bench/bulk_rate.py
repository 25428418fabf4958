"""Bulk through a pool against the bare engine, on the same prompts and threads."""

import gzip
import json
import subprocess
import time
from pathlib import Path

from bulk_loss import PEPS
from bulk_pool import BulkPool
from engine_ours import drain, requests_of
from engine_workload import Item
from harness import Figures, in_own_process
from tokenizers import Tokenizer

from tokenmill.shared.messages import JobClass
from tokenmill.workers.engine.detokenizer import TokenTable
from tokenmill.workers.engine.engine import Engine
from tokenmill.workers.engine.model.load import load_runner

Prompts = list[tuple[str, tuple[int, ...]]]
"""Texts with their tokens."""


def prompts_of(
    model: Path, count: int, tokens: int, *, backwards: bool = False
) -> Prompts:
    """Cuts the documents into prompts, with the tokens of their texts.

    Args:
        model: Directory with tokenizer.json.
        count: How many.
        tokens: Of each, roughly.
        backwards: Begin with the last document: for prompts that share nothing with
            those from the first.
    """
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    found: Prompts = []
    with gzip.open(PEPS, "rt", encoding="utf-8") as file:
        lines = file.readlines()
    for line in reversed(lines) if backwards else lines:
        ids = tokenizer.encode(json.loads(line)["text"]).ids
        for start in range(0, len(ids) - tokens, tokens):
            text = tokenizer.decode(ids[start : start + tokens])
            found.append((text, tuple(tokenizer.encode(text).ids)))
            if len(found) == count:
                return found
    raise SystemExit(f"the documents give {len(found)} prompts of {tokens} tokens")


def bare(
    model: Path, prompts: Prompts, output: int, threads: int, turn: int
) -> Figures:
    """Runs all prompts through the engine alone, in this process.

    Returns:
        Tokens per second, prompt and output, from the first step to the last.
    """
    runner = load_runner(model, threads=threads)
    table = TokenTable.from_directory(model)
    warm = Engine(runner, table)
    for request in requests_of([Item("warm", prompts[0][1], 4)], JobClass.BULK):
        warm.add(request)
    drain(warm)
    engine = Engine(runner, table, max_running=16)
    items = [Item(f"{turn}-{n}", ids, output) for n, (_, ids) in enumerate(prompts)]
    began = time.perf_counter()
    for request in requests_of(items, JobClass.BULK):
        engine.add(request)
    produced = sum(map(len, drain(engine).values()))
    seconds = time.perf_counter() - began
    read = sum(len(ids) for _, ids in prompts)
    return {"tokens_per_s": (read + produced) / seconds, "seconds": seconds}


def through_pool(
    pool: BulkPool, model: str, prompts: Prompts, output: int, turn: int
) -> Figures:
    """Runs all prompts by `bulk run`.

    Returns:
        Tokens per second by the command's own clock: from its first line to its last.
    """
    source = pool.directory / f"rate-{turn}.jsonl"
    options = {"max_tokens": output, "ignore_eos": True, "control_tokens": "as_text"}
    source.write_text(
        "".join(
            json.dumps({"id": n, "prompt": text, "options": options}) + "\n"
            for n, (text, _) in enumerate(prompts)
        )
    )
    # Each turn has a tenant of its own, so that none finds another's prefixes cached.
    command = pool.start(
        *("run", source, "-o", source.with_suffix(".out"), "--model", model),
        *("--tenant", f"turn-{turn}", "--json"),
        stdout=subprocess.PIPE,
    )
    out, _ = command.communicate()
    if command.returncode:
        raise SystemExit(f"bulk run ended with {command.returncode}")
    report = json.loads(out.splitlines()[-1])["report"]
    tokens = report["prompt_tokens"] + report["completion_tokens"]
    return {
        "tokens_per_s": tokens / report["seconds"],
        "seconds": report["seconds"],
        "prompt_tokens": report["prompt_tokens"],
        "completion_tokens": report["completion_tokens"],
    }


def measure(
    pool: BulkPool,
    name: str,
    model: Path,
    *,
    count: int,
    tokens: int,
    output: int,
    rounds: int,
    threads: int,
) -> dict[str, object]:
    """Runs both in turn, and compares the best of each."""
    prompts = prompts_of(model, count, tokens)
    engine: list[Figures] = []
    bulk: list[Figures] = []
    for turn in range(rounds):
        engine.append(in_own_process(bare, model, prompts, output, threads, turn))
        bulk.append(through_pool(pool, name, prompts, output, turn))
    best_engine = max(one["tokens_per_s"] for one in engine)
    best_bulk = max(one["tokens_per_s"] for one in bulk)
    return {
        "prompts": count,
        "prompt_tokens": sum(len(ids) for _, ids in prompts),
        "output_tokens": count * output,
        "engine_tokens_per_s": best_engine,
        "bulk_tokens_per_s": best_bulk,
        "bulk_to_engine": best_bulk / best_engine,
        "engine_turns": engine,
        "bulk_turns": bulk,
    }
