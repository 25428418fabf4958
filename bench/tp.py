"""Step time of a model split over processes, and what they send each other.

    python bench/tp.py [--model DIR] [--tp 1,2,4] [--small] [--report]

A random Llama (or --model) is served by groups of ranks as `tokenmill work --tp` makes
them, one group after the other. Measured: a decode step of some sequences, a prefill
step, exchanges and bytes of each; the same steps of the undivided model are the
baseline, and its greedy tokens what the groups' are held against. The exchanges must be
those that the model's shape tells: two sums a layer and one for the embedding, each of
hidden * 4 bytes a token, and one gather of logits. The last line is one JSON object.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from harness import cores, finish, in_own_process, machine, quiet_logs, show

from tokenmill.shared.config import LogConfig, ModelConfig, WorkerConfig
from tokenmill.workers.engine.batch import SequenceSlice, StepBatch

if TYPE_CHECKING:
    from tokenmill.workers.engine.batch import ModelRunner

FLOAT = 4
"""Bytes of an activation."""
ONE_ROUND = 64 * 1024
"""Up to so many bytes a sum is one exchange of whole tensors, else two of parts."""
SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.05,
}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, help="a checkpoint's directory; else a random model")
    add("--tp", default="1,2,4", help="degrees; 1 is always the first")
    add("--weights", choices=["int8", "float32"], default="int8")
    add("--sequences", type=int, default=8, help="that decode together")
    add("--context", type=int, default=128, help="tokens before each decoded one")
    add("--prefill", type=int, default=256, help="tokens of a prefill step")
    add("--steps", type=int, default=30, help="decode steps that are timed")
    add("--threads", type=int, default=cores(), help="of all ranks together")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--small", action="store_true", help="a tiny model and few steps: seconds")
    add("--report", action="store_true", help="save the figures")
    return parser.parse_args()


def save_model(directory: Path, *, small: bool) -> Path:
    """Writes a random checkpoint; returns its directory."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {**SHAPE, **SMALL} if small else SHAPE
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(directory)
    return directory


class Steps:
    """Batches of some sequences, each with KV blocks of its own.

    Args:
        sequences: How many.
        context: Tokens of each before the first decoded one.
        block_size: Tokens per block.
        vocabulary: Ids are drawn from it.
    """

    def __init__(
        self, sequences: int, context: int, block_size: int, vocabulary: int
    ) -> None:
        self._ids = np.random.default_rng(0)
        self._context = context
        self._vocabulary = vocabulary
        blocks = -(-(2 * context) // block_size)
        self._tables = [
            tuple(range(i * blocks, (i + 1) * blocks)) for i in range(sequences)
        ]

    def prefill(self, index: int, length: int) -> StepBatch:
        """Returns a step with the first tokens of one sequence."""
        ids = self._ids.integers(0, self._vocabulary, length, dtype=np.int64)
        part = SequenceSlice(0, length, length, self._tables[index])
        positions = np.arange(length, dtype=np.int64)
        return StepBatch(ids, positions, (part,), np.array([length - 1]))

    def fill(self) -> Iterator[StepBatch]:
        """Yields the steps that fill every sequence's context."""
        for index in range(len(self._tables)):
            yield self.prefill(index, self._context)

    def decode(self, ids: np.ndarray, past: int) -> StepBatch:
        """Returns a step with one token of every sequence.

        Args:
            ids: int64 [sequences].
            past: Tokens decoded before.
        """
        at, count = self._context + past, len(self._tables)
        parts = tuple(
            SequenceSlice(i, 1, at + 1, table) for i, table in enumerate(self._tables)
        )
        return StepBatch(
            ids,
            np.full(count, at, dtype=np.int64),
            parts,
            np.arange(count, dtype=np.int64),
        )


def measure(path: Path, size: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Loads a group and times its steps. Runs in a process of its own."""
    model = ModelConfig(
        name="bench", path=str(path), tp=size, weights=options["weights"], kv="float32"
    )
    worker = WorkerConfig(
        threads=options["threads"],
        device=options["device"],
        num_blocks=options["blocks"],
        cuda_graphs=False,
    )
    runner, counts, close = open_runner(path, model, worker)
    try:
        return time_steps(runner, counts, options)
    finally:
        close()


def open_runner(
    path: Path, model: ModelConfig, worker: WorkerConfig
) -> tuple["ModelRunner", Mapping[str, Any], Callable[[], None]]:
    """Returns a runner, the counts of its exchanges, and what ends it."""
    from tokenmill.workers.rank_group import RankGroup
    from tokenmill.workers.runner_loading import load_model_runner

    if model.tp == 1:
        return load_model_runner(path, model, worker), {}, lambda: None
    group = RankGroup.start(path, model, worker, log=LogConfig(level="warning"))
    runner = group.load(partial(load_model_runner, path, model))
    return runner, runner.communicator.counts, group.close


def time_steps(
    runner: "ModelRunner", counts: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Times prefill and decode; what they exchange is counted over the decode steps."""
    steps = Steps(
        options["sequences"],
        max(options["context"], options["prefill"]),
        runner.block_size,
        runner.vocab_size,
    )
    for batch in steps.fill():
        logits = runner.run(batch)
    prefill_s = []
    for _ in range(max(3, options["steps"] // 10)):
        batch = steps.prefill(0, options["prefill"])
        prefill_s.append(timed(runner, batch)[0])
    ids = np.zeros(options["sequences"], dtype=np.int64)
    decode_s, tokens = [], []
    before = snapshot(counts)
    for past in range(options["steps"]):
        took, logits = timed(runner, steps.decode(ids, past))
        decode_s.append(took)
        ids = logits.argmax(dim=-1).cpu().numpy().astype(np.int64)
        tokens += ids.tolist()
    after = snapshot(counts)
    figures: dict[str, Any] = {
        "prefill_ms": 1000 * statistics.median(prefill_s),
        "decode_ms": 1000 * statistics.median(decode_s),
        "tokens": tokens,
    }
    for kind, (calls, sent) in after.items():
        earlier = before[kind]
        figures[f"{kind}_calls"] = (calls - earlier[0]) / options["steps"]
        figures[f"{kind}_bytes"] = (sent - earlier[1]) / options["steps"]
    return figures


def timed(runner: "ModelRunner", batch: StepBatch) -> tuple[float, Any]:
    """Runs a step; returns its seconds and logits."""
    began = time.perf_counter()
    logits = runner.run(batch).cpu()
    return time.perf_counter() - began, logits


def snapshot(counts: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Copies the counters: calls and bytes by kind."""
    return {kind: (one.calls, one.bytes) for kind, one in counts.items()}


def expected(config: Mapping[str, int], size: int, tokens: int) -> dict[str, float]:
    """Returns the exchanges of a step, as rank 0 counts them, by the model's shape.

    Args:
        config: Of the model.
        size: Ranks.
        tokens: Of the step.
    """
    sums = 2 * config["num_hidden_layers"] + 1
    payload = tokens * config["hidden_size"] * FLOAT
    # All get everyone's tensors; of large ones a part each, added up, then the sums.
    whole = size == 2 or payload <= ONE_ROUND
    piece = -(-tokens * config["hidden_size"] // size) * FLOAT
    sent = (size - 1) * (payload if whole else 2 * piece)
    return {
        "all_reduce_calls": sums,
        "all_reduce_bytes": sums * sent,
        "gather_calls": 1,
    }


def compare(
    figures: dict[str, Any], base: dict[str, Any], wanted: Mapping[str, float]
) -> list[str]:
    """Adds ratios to a group's figures; returns what is not as expected."""
    problems = []
    for name, value in wanted.items():
        figures[f"expected_{name}"] = value
        if figures[name] != value:
            problems.append(f"{name} is {figures[name]:g}, expected {value:g}")
    same = sum(a == b for a, b in zip(figures["tokens"], base["tokens"], strict=True))
    figures["tokens_equal_percent"] = 100 * same / len(base["tokens"])
    for name in ("prefill_ms", "decode_ms"):
        figures[f"{name}_ratio"] = figures[name] / base[name]
    return problems


def main() -> int:
    """Runs every degree in turn."""
    options = parse()
    quiet_logs()
    degrees = sorted({1, *map(int, options.tp.split(","))})
    if options.small:
        options.sequences, options.context, options.prefill = 2, 16, 24
        options.steps = 4
    report: dict[str, Any] = {
        "benchmark": "tp", **machine(), "threads": options.threads,
        "sequences": options.sequences, "context": options.context,
        "prefill_tokens": options.prefill, "weights": options.weights,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        path = options.model or save_model(Path(directory), small=options.small)
        report["degrees"], report["problems"] = run_all(path, degrees, options)
    return finish(report, save=options.report)


def run_all(
    path: Path, degrees: list[int], options: argparse.Namespace
) -> tuple[dict[str, Any], list[str]]:
    """Returns figures by degree, and problems."""
    import json

    config = json.loads((path / "config.json").read_text())
    longest = 2 * max(options.context, options.prefill)
    asked = {**vars(options), "blocks": options.sequences * (-(-longest // 8)) + 8}
    found: dict[str, Any] = {}
    problems: list[str] = []
    for size in degrees:
        figures = in_own_process(measure, path, size, asked)
        if size > 1:
            wanted = expected(config, size, options.sequences)
            differing = compare(figures, found["1"], wanted)
            problems += [f"tp={size}: {problem}" for problem in differing]
            sent = figures["all_reduce_bytes"] / options.sequences
            figures["sum_bytes_per_token"] = sent
        found[str(size)] = figures
        show(f"tp={size}", {k: v for k, v in figures.items() if k != "tokens"})
    for figures in found.values():
        del figures["tokens"]
    return found, problems


if __name__ == "__main__":
    raise SystemExit(main())
