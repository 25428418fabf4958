"""Measures what a loaded model takes in a process of its own; prints JSON lines.

    python plan_memory.py CHECKPOINT WARM-UP-CHECKPOINT [SETTINGS, ...]

Each of the settings has a process and a line, in their order. The processes are forked
when imports are done, which take most of the time, and before anything has threads. A
tiny model of the same family and precision runs first, so that kernels and threads are
there before the memory is looked at. Pools are written full, since pages that nobody
touched take no memory.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from pathlib import Path

import numpy as np

from tokenmill.workers.engine.batch import SequenceSlice, StepBatch
from tokenmill.workers.engine.model.lean_import import import_transformers
from tokenmill.workers.engine.model.load import load_runner
from tokenmill.workers.engine.model.runner import TransformersRunner

# Run as a script and imported as a module; the benchmarks are no package.
sys.path.append(str(Path(__file__).parents[2] / "bench"))
from model_tensors import own_tensors, tensors_of

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_MAPS = Path("/proc/self/maps")


def weight_bytes(runner: TransformersRunner) -> int:
    """Returns the bytes of a model's tensors, each storage once."""
    seen: dict[int, int] = {}
    for module in runner.model.modules():
        for tensor in own_tensors(module):
            if tensor.device.type != "meta":
                seen[tensor.untyped_storage().data_ptr()] = tensor.nbytes
    return sum(seen.values())


def mapped_bytes(runner: TransformersRunner) -> int:
    """Returns the bytes of weights that are pages of the checkpoint's files."""
    ranges = []
    for line in _MAPS.read_text().splitlines():
        if line.endswith(".safetensors"):
            first, last = line.split()[0].split("-")
            ranges.append(range(int(first, 16), int(last, 16)))
    seen: dict[int, int] = {}
    for module in runner.model.modules():
        for tensor in own_tensors(module):
            address = tensor.data_ptr()
            if any(address in one for one in ranges):
                seen[address] = tensor.nbytes
    return sum(seen.values())


def kilobytes(name: str) -> int:
    """Returns a figure of this process as the kernel has it."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise LookupError(name)


def largest_step(runner: TransformersRunner, chunk: int, running: int) -> StepBatch:
    """Returns a step of one chunk and sequences that decode, each with logits."""
    lengths = [chunk, *[1] * (running - 1)]
    starts = np.cumsum([0, *lengths])
    blocks = iter(range(runner.num_blocks))
    slices = tuple(
        SequenceSlice(
            int(start),
            length,
            length,
            tuple(next(blocks) for _ in range(-(-length // runner.block_size))),
        )
        for start, length in zip(starts, lengths, strict=False)
    )
    return StepBatch(
        token_ids=np.arange(starts[-1], dtype=np.int64) % 100,
        positions=np.concatenate([np.arange(length) for length in lengths]),
        slices=slices,
        logit_rows=starts[1:].astype(np.int64) - 1,
    )


def measure(path: str, warm_up: str, settings: dict[str, int | str]) -> dict[str, int]:
    """Returns bytes of tensors, and how far the resident memory grew at its peak."""
    chunk, running = int(settings.pop("chunk")), int(settings.pop("running"))
    tiny = load_runner(Path(warm_up), **settings)  # type: ignore[arg-type]
    tiny.run(largest_step(tiny, min(chunk, 64), running))
    del tiny
    gc.collect()
    before, files = kilobytes("VmRSS"), kilobytes("RssFile")
    runner = load_runner(Path(path), **settings)  # type: ignore[arg-type]
    gc.collect()
    store = list(tensors_of(list(runner._state.layers)))
    for tensor in store:
        tensor.fill_(1)
    step = largest_step(runner, chunk, running)
    _CLEAR.write_text("5")  # the peak so far, of loading, is forgotten
    for _ in range(2):
        logits = runner.run(step)
        logits.argmax(dim=-1)
        del logits
    # Of the files only what is kept counts: the system takes other pages back.
    droppable = (kilobytes("RssFile") - files) * 1024 - mapped_bytes(runner)
    return {
        "weights": weight_bytes(runner),
        "kv": sum(tensor.nbytes for tensor in store),
        "grown": (kilobytes("VmHWM") - before) * 1024 - droppable,
    }


def main() -> None:
    """Measures one after the other."""
    import_transformers()
    importlib.import_module("transformers.models.llama.modeling_llama")
    for settings in json.loads(sys.argv[3]):
        child = os.fork()
        if not child:
            found = measure(sys.argv[1], sys.argv[2], settings)
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            raise SystemExit(f"{settings}: status {status}")


if __name__ == "__main__":
    main()
