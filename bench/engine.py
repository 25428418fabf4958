"""Tokens per second through the engine, against every installed peer, in one call.

    python bench/engine.py [--llama-cpp DIR] [--vllm-python PYTHON] [--report]

Each side runs alone, in its own process, one after the other, with the same prompt
tokens, the same forced output lengths and at most 16 sequences at once; then decode at
batch 1, 8 and 16 and prefill, where the peer has a bench for it. Fast sides run
`--repeat` times in turn. Exits with 1 when the rows counted at the model's first linear
layer are not the tokens that were scheduled, or with --require-targets when a ratio is
below its target. The last line is one JSON object. How to install the peers:
bench/peers/README.md.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import engine_llama
import engine_rates
import engine_vllm
import msgspec
from engine_compare import LLAMA, OURS, PEERS, STATIC, VLLM, Comparison, compare_all
from engine_ours import run_ours
from engine_static import run_static
from engine_workload import Item, output_tokens, read_text, read_workload
from harness import Figures, cores, finish, in_own_process, machine, quiet_logs, show

from tokenmill.shared.messages import JobClass
from tokenmill.workers.engine.model.resolve import resolve_model

HERE = Path(__file__).parent
HOW = "not installed: see bench/peers/README.md"
Side = Callable[[], Figures]


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--workload", type=Path, default=HERE / "workloads" / "mixed.jsonl")
    add(
        "--against",
        default="auto",
        help=f"'auto' (all that are installed), 'none', or of {', '.join(PEERS)}, "
        "with commas between",
    )
    add("--model", default="smollm2-135m", help="built-in name, directory or hub id")
    add("--weights", choices=["int8", "float32"], default="int8")
    add("--kv", choices=["int8", "int4", "float32"], default="int8")
    add("--job-class", choices=["bulk", "interactive"], default="bulk")
    add("--max-running", type=int, default=16)
    add("--threads", type=int, default=cores())
    add("--device", default="cpu", help="'cuda' compares with hf-static there")
    add("--limit", type=int, help="take only the first N requests")
    add("--repeat", type=int, default=2, help="tries of the fast sides")
    add("--no-rates", action="store_true", help="the workload only")
    add("--llama-cpp", type=Path, help=f"else ${engine_llama.VARIABLE} or the path")
    add("--vllm-python", type=Path, help=f"else ${engine_vllm.VARIABLE}")
    add("--require-targets", action="store_true", help="fail where one is missed")
    add("--report", action="store_true", help="save, and write docs/benchmarks.md")
    return parser.parse_args()


class Peers(msgspec.Struct, frozen=True):
    """Which peers take part, and where they are."""

    llama: Path | None
    vllm: Path | None
    static: bool
    missing: tuple[str, ...]
    """Asked for and not installed."""


def find_peers(options: argparse.Namespace) -> Peers:
    """Finds the peers that were asked for."""
    everyone = PEERS if options.device == "cpu" else (STATIC,)
    asked = set(everyone if options.against == "auto" else options.against.split(","))
    if unknown := asked - {*PEERS, "none"}:
        raise SystemExit(f"--against knows {', '.join(PEERS)}; not {unknown}")
    llama = engine_llama.find(options.llama_cpp) if LLAMA in asked else None
    vllm = engine_vllm.find(options.vllm_python) if VLLM in asked else None
    found = {LLAMA: llama, VLLM: vllm, STATIC: STATIC}
    missing = tuple(name for name in PEERS if name in asked and found[name] is None)
    return Peers(llama, vllm, STATIC in asked, missing)


def workload_sides(
    options: argparse.Namespace, peers: Peers, model: Path, items: list[Item]
) -> dict[str, Side]:
    """Returns what runs the workload, by side."""
    threads, running = options.threads, options.max_running
    precision = {"weights": options.weights, "kv": options.kv}
    common = {"max_running": running, "threads": threads}
    # Bulk has no bound on the time between tokens; neither have the peers.
    chosen = {"device": options.device, "job_class": JobClass(options.job_class)}
    ours = partial(in_own_process, run_ours, model, items, **chosen)
    sides: dict[str, Side] = {OURS: partial(ours, **common, **precision)}
    if peers.llama:
        llama = partial(engine_llama.run_server, peers.llama, model, items)
        sides[LLAMA] = partial(llama, **common)
    if peers.static:
        sides[STATIC] = partial(
            in_own_process,
            run_static,
            model,
            items,
            batch_size=running,
            threads=threads,
            device=options.device,
        )
    if peers.vllm:
        vllm = partial(engine_vllm.run_vllm, peers.vllm, model, items)
        sides[VLLM] = partial(vllm, **common)
    return sides


def rate_sides(
    options: argparse.Namespace, peers: Peers, model: Path
) -> dict[str, Side]:
    """Returns what measures decode and prefill rates, by side."""
    sides: dict[str, Side] = {}
    if not options.no_rates and options.device == "cpu":
        sides[OURS] = partial(
            in_own_process,
            engine_rates.run_rates,
            model,
            read_text(model, 4096),
            weights=options.weights,
            kv=options.kv,
            threads=options.threads,
        )
        if peers.llama:
            run = engine_llama.run_rates
            sides[LLAMA] = partial(run, peers.llama, model, threads=options.threads)
    return sides


def run_in_turn(
    title: str, sides: dict[str, Side], repeat: int
) -> dict[str, list[Figures]]:
    """Runs all sides, one after the other, the fast ones `repeat` times."""
    runs: dict[str, list[Figures]] = {name: [] for name in sides}
    for turn in range(repeat):
        for name, side in sides.items():
            if turn and name in (STATIC, VLLM):
                continue  # minutes each
            runs[name].append(side())
            show(f"{title}, {name}, try {turn + 1}", runs[name][-1])
    return runs


def problems_of(runs: list[Figures]) -> list[str]:
    """Says where the rows that were computed are not the tokens that were scheduled."""
    return [
        f"{figures['gemm_rows']} rows went through the first linear layer, but "
        f"{figures['scheduled_tokens']} tokens were scheduled"
        for figures in runs
        if figures["gemm_rows"] != figures["scheduled_tokens"]
    ]


def show_comparisons(comparisons: list[Comparison], missing: tuple[str, ...]) -> None:
    """Prints the ratios beside their targets, and who is missing."""
    print(f"\n{'':<20}{'against':<12}{'ours':>8}{'theirs':>8}{'ratio':>8}{'target':>8}")
    for one in comparisons:
        target = "" if one.target is None else f"{one.target:.1f}"
        row = f"{one.ours:>8.1f}{one.theirs:>8.1f}{one.ratio:>8.2f}{target:>8}"
        print(f"{one.what:<20}{one.against:<12}{row}{'' if one.met else '  missed'}")
    for name in missing:
        print(f"{name}: {HOW}")


def main() -> int:
    """Runs the benchmark."""
    options = parse()
    quiet_logs()
    host = machine()
    peers = find_peers(options)
    model = resolve_model(options.model, None)
    items = read_workload(options.workload, model, options.limit)
    prompt_tokens = sum(len(item.token_ids) for item in items)
    print(
        f"{len(items)} requests, {prompt_tokens:,} prompt and "
        f"{output_tokens(items):,} output tokens, {options.threads} threads, "
        f"weights {options.weights}, KV {options.kv}"
    )
    sides = workload_sides(options, peers, model, items)
    mixed = run_in_turn("workload", sides, options.repeat)
    rates = run_in_turn("rates", rate_sides(options, peers, model), options.repeat)
    comparisons = compare_all(mixed, rates)
    show_comparisons(comparisons, peers.missing)
    problems = problems_of(mixed[OURS])
    if options.require_targets:
        problems += [
            f"{one.what}: {one.ratio:.2f} times {one.against}, wanted {one.target}"
            for one in comparisons
            if not one.met
        ]
    report: dict[str, object] = {
        "benchmark": "engine",
        "machine": host,
        "workload": options.workload.name,
        "requests": len(items),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens(items),
        "threads": options.threads,
        "device": options.device,
        "weights": options.weights,
        "kv": options.kv,
        "job_class": options.job_class,
        "mixed": mixed,
        "rates": rates,
        "comparisons": [msgspec.to_builtins(one) for one in comparisons],
        "not_installed": dict.fromkeys(peers.missing, HOW),
        "problems": problems,
    }
    status = finish(report, save=options.report)
    if options.report:
        from report import write_page

        print(f"wrote {write_page()}", file=sys.stderr)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
