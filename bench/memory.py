"""Memory: what the KV pool wastes, and what each precision takes against float16.

    python bench/memory.py [--report]

Each precision loads in a process of its own, which counts the bytes of its tensors by
part and how far its resident memory grew. The float16 sides are transformers' own: the
model in float16, and its static cache. KV pools are written full first, since untouched
pages take no memory. KV waste is measured on the mixed workload, step by step, beside
what contiguous caches of static batches would waste on it. The last line is JSON.
"""

import argparse
from pathlib import Path

import memory_sides
import msgspec
from engine_ours import run_ours
from engine_workload import read_workload
from harness import Figures, cores, finish, in_own_process, machine, quiet_logs, show
from memory_waste import static_waste

from tokenmill.workers.engine.model.resolve import resolve_model

HERE = Path(__file__).parent
WASTE_TARGET_PERCENT = 2.0
SAVING_TARGET_PERCENT = 45.0
WEIGHTS = ("float32", "int8", "nf4")
KV = ("float32", "int8", "int4")
SLOTS, CONTEXT = 16, 1024
"""The pool whose bytes are counted: so many sequences of so many tokens."""


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="smollm2-135m")
    add("--workload", type=Path, default=HERE / "workloads" / "mixed.jsonl")
    add("--limit", type=int, help="take only the first N requests")
    add("--threads", type=int, default=cores())
    add("--require-targets", action="store_true", help="fail where one is missed")
    add("--report", action="store_true", help="save, and write docs/benchmarks.md")
    return parser.parse_args()


def savings(sides: dict[str, Figures], part: str) -> dict[str, float]:
    """Returns how many percent less than float16 each precision takes.

    Args:
        sides: Figures of each precision, "float16" among them.
        part: Name of the figure that is compared.
    """
    base = sides["float16"][part]
    return {
        name: round(100 * (1 - figures[part] / base), 1)
        for name, figures in sides.items()
        if name != "float16"
    }


def weight_sides(model: Path) -> dict[str, Figures]:
    """Returns the bytes of the weights in each precision, each in its own process."""
    sides = {"float16": in_own_process(memory_sides.weights_of_transformers, model)}
    for kind in WEIGHTS:
        sides[kind] = in_own_process(memory_sides.weights_of_ours, model, kind)
    return sides


def kv_sides(model: Path) -> dict[str, Figures]:
    """Returns the bytes of a KV pool in each precision, each in its own process."""
    shape = (model, SLOTS, CONTEXT)
    sides = {"float16": in_own_process(memory_sides.kv_of_transformers, *shape)}
    for kind in KV:
        sides[kind] = in_own_process(memory_sides.kv_of_ours, *shape, kind)
    return sides


def waste(options: argparse.Namespace, model: Path) -> dict[str, float]:
    """Returns the KV waste on the workload, of ours and of static batches."""
    items = read_workload(options.workload, model, options.limit)
    ours = in_own_process(
        run_ours,
        model,
        items,
        weights="int8",
        kv="int8",
        max_running=SLOTS,
        threads=options.threads,
    )
    lengths = [(len(item.token_ids), item.max_tokens) for item in items]
    return {
        "paged_percent": ours["kv_waste_percent"],
        "static_longest_of_batch_percent": 100 * static_waste(lengths, SLOTS),
        "static_full_context_percent": 100 * static_waste(lengths, SLOTS, CONTEXT),
        "most_allocated_tokens": ours["kv_most_allocated_tokens"],
    }


class Targets(msgspec.Struct, frozen=True):
    """The three figures that are wanted, in percent."""

    waste: float
    kv_saving: float
    linear_saving: float

    def missed(self) -> list[str]:
        """Says which targets are missed."""
        found = []
        if self.waste >= WASTE_TARGET_PERCENT:
            found.append(f"KV waste {self.waste:.2f} %, wanted < 2 %")
        for name, saving in (("KV", self.kv_saving), ("layers", self.linear_saving)):
            if saving < SAVING_TARGET_PERCENT:
                found.append(f"INT8 {name} save {saving:.1f} % of float16, wanted 45 %")
        return found


def main() -> int:
    """Runs the benchmark."""
    options = parse()
    quiet_logs()
    host = machine()
    model = resolve_model(options.model, None)
    weights, kv = weight_sides(model), kv_sides(model)
    wasted = waste(options, model)
    for name, figures in weights.items():
        show(f"weights, {name}", figures)
    for name, figures in kv.items():
        show(f"KV of {SLOTS} x {CONTEXT} tokens, {name}", figures)
    show("KV allocated and not used, mixed workload", wasted)
    saved = {
        "linear_layers": savings(weights, "linear_mib"),
        "all_weights": savings(weights, "all_mib"),
        "kv": savings(kv, "tensors_mib"),
    }
    for part, figures in saved.items():
        show(f"percent less than float16, {part}", figures)
    targets = Targets(
        wasted["paged_percent"], saved["kv"]["int8"], saved["linear_layers"]["int8"]
    )
    report: dict[str, object] = {
        "benchmark": "memory",
        "machine": host,
        "weights": weights,
        "kv_slots": SLOTS * CONTEXT,
        "kv": kv,
        "saved_percent": saved,
        "waste": wasted,
        "targets_missed": targets.missed(),
        "problems": targets.missed() if options.require_targets else [],
    }
    return finish(report, save=options.report)


if __name__ == "__main__":
    raise SystemExit(main())
