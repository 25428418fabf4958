"""Writes docs/benchmarks.md and its plots from the saved figures.

    python bench/report.py

Every benchmark that is run with --report leaves its figures in `bench/results`; the
page is made from what is there and never typed. Plots need matplotlib
(`pip install -e '.[bench]'`).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import BUSY_LOAD, RESULTS
from report_models import MODEL_SECTIONS
from report_plots import plot_mixed, plot_rates
from report_queue import QUEUE_SECTIONS

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
Result = dict[str, Any]
"""One benchmark's saved JSON object."""

INTRODUCTION = """\
# Benchmarks

This page is written by `python bench/report.py` from the figures in
[bench/results](../bench/results), which the scripts in [bench](../bench/README.md)
save when they are run with `--report`. Peers run in the same call, on the same
machine, one after the other: [how to install them](../bench/peers/README.md).
"""


COUNTED = """\
Tokens per second, the best of equally many tries on both sides. tokenmill's rates count
whole steps with sampling and text, those of llama-batched-bench the model alone."""


def number(value: object) -> str:
    """Writes a value for a cell: figures with three or more digits that count."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, float):
        digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
        return f"{value:,.{digits}f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a Markdown table."""
    lines = [header, ["---"] * len(header)]
    lines += [[number(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def conditions(result: Result) -> str:
    """Says when and where a result was measured."""
    host = result.get("machine")
    if not isinstance(host, dict):
        return ""
    load = host["load_average_at_start"]
    busy = " (busy: other work made times longer)" if load > BUSY_LOAD else ""
    return (
        f"Measured on {host['date']}, {host['processor']}, {host['cores']} cores; "
        f"load average at the start {load}{busy}.\n"
    )


def engine(result: Result) -> str:
    """The engine beside its peers."""
    columns = ("what", "against", "ours", "theirs", "ratio", "target")
    rows = [
        [*(one[column] for column in columns), met(one["ratio"], one["target"])]
        for one in result["comparisons"]
    ]
    workload = (
        f"`{result['workload']}`: {result['requests']} requests, "
        f"{result['prompt_tokens']:,} prompt and {result['output_tokens']:,} output "
        "tokens, submitted at once, at most 16 running."
    )
    sides = (
        f"tokenmill: weights {result['weights']}, KV {result['kv']}, "
        f"{result['job_class']} jobs; llama.cpp: its server with Q8_0 weights; "
        "hf-static: `generate` in static batches, float32; "
        "vllm: its CPU build, float32."
    )
    parts = [
        "## Tokens per second\n",
        conditions(result),
        f"{workload} {sides} {COUNTED}\n",
        table(("what", "against", "tokenmill", "peer", "ratio", "target", "met"), rows),
        tries(result),
    ]
    parts += [f"{name}: {text}.\n" for name, text in result["not_installed"].items()]
    parts.append("![Mixed workload](benchmarks/mixed.svg)\n")
    if result["rates"]:
        parts.append("![Decode and prefill](benchmarks/rates.svg)\n")
    return "\n".join(parts)


def met(ratio: float, target: float | None) -> bool | None:
    """Says whether a ratio reaches its target; None where there is none."""
    return None if target is None else ratio >= target


def tries(result: Result) -> str:
    """Every try of every side on the workload."""
    rows = []
    for name, runs in result["mixed"].items():
        rates = ", ".join(number(one["output_tokens_per_s"]) for one in runs)
        rows.append((name, rates, min(one["seconds"] for one in runs)))
    return table(("side", "output tokens/s, each try", "shortest, s"), rows)


def prefix(result: Result) -> str:
    """The prefix cache beside no cache."""
    rows = [
        (name, result[f"{key}_cache_s"], result[f"{key}_cache_output_tokens_per_s"])
        for name, key in (("with the cache", "with"), ("without", "without"))
    ]
    text = (
        f"{result['prompts']} prompts share {result['shared_tokens']} tokens and have "
        f"{result['own_tokens']} of their own; {result['output_tokens']} output tokens "
        f"each. {number(result['ratio'])} times as fast with the cache (target "
        f"{number(result['target'])}); {number(result['hit_rate_percent'])} % of the "
        f"tokens were found in it; outputs equal: "
        f"{number(bool(result['outputs_equal']))}.\n"
    )
    cells = table(("", "seconds", "output tokens/s"), rows)
    return "\n".join(("## Prefix cache\n", conditions(result), text, cells))


def pacing(result: Result) -> str:
    """Time between tokens while a long prompt comes in."""
    names = ("quiet_p50_ms", "quiet_p99_ms", "busy_p50_ms", "busy_p99_ms")
    columns = (*names, "p99_ratio", "prefill_ms")
    rows = [
        (title, *(result[key + column] for column in columns))
        for title, key in (("follows the step time", ""), ("whole", "whole_"))
    ]
    header = ("chunk", "P50 without", "P99 without", "P50 with", "P99 with")
    title = "## Time between tokens while a long prompt comes in\n"
    text = (
        f"{result['running']} sequences decode; a prompt of {result['long']} tokens "
        f"arrives {result['arrivals']} times. Milliseconds, without and with it; "
        f"target of the P99's ratio: at most {number(result['target'])}.\n"
    )
    cells = table((*header, "P99 ratio", "prefill of the prompt"), rows)
    return "\n".join((title, conditions(result), text, cells))


def memory(result: Result) -> str:
    """Bytes by precision, and the KV waste."""
    saved = result["saved_percent"]
    parts = ("linear_mib", "head_mib", "other_mib", "all_mib", "resident_growth_mib")
    weights = [
        (name, *(one[part] for part in parts), saved["linear_layers"].get(name))
        for name, one in result["weights"].items()
    ]
    columns = ("bytes_per_token", "tensors_mib", "resident_growth_mib")
    kv = [
        (name, *(one[column] for column in columns), saved["kv"].get(name))
        for name, one in result["kv"].items()
    ]
    waste = [(name.replace("_", " "), value) for name, value in result["waste"].items()]
    less, grown = "less than float16, %", "resident growth"
    header = ("weights", "linear layers", "head", "rest", "all", grown)
    return "\n".join(
        (
            "## Memory\n",
            conditions(result),
            MEMORY,
            table((*header, f"layers: {less}"), weights),
            f"KV of {result['kv_slots']:,} tokens:\n",
            table(("KV", "bytes a token", "MiB", grown, less), kv),
            "KV slots allocated and not used, over the steps of the mixed workload:\n",
            table(("", "value"), waste),
        )
    )


MEMORY = """\
Each in a fresh process; float16 is transformers' own model and static cache. MiB of
tensors, and by how much resident memory grew.
"""
SECTIONS = {"engine": engine, "prefix": prefix, "pacing": pacing, "memory": memory}


def plain(name: str, result: Result) -> str:
    """A result without a section of its own: its figures, and its lists as tables."""
    parts = [f"## {name.capitalize()}\n", conditions(result)]
    skipped = ("machine", "benchmark", "bench", "problems")
    single = [
        (key.replace("_", " "), value)
        for key, value in result.items()
        if key not in skipped and isinstance(value, str | int | float)
    ]
    if single:
        parts.append(table(("", "value"), single))
    for key, value in result.items():
        rows = rows_of(value)
        if key not in skipped and rows:
            parts.append(f"{key.replace('_', ' ').capitalize()}:\n")
            header = list(dict.fromkeys(column for row in rows for column in row))
            cells = [[row.get(column) for column in header] for row in rows]
            parts.append(table(header, cells))
    return "\n".join(part for part in parts if part)


def rows_of(value: object) -> list[Mapping[str, object]]:
    """Returns a list of flat objects, or objects by name, as rows of a table."""
    if isinstance(value, dict):
        value = [
            {"": name, **row} if isinstance(row, dict) else {"": name, "value": row}
            for name, row in value.items()
        ]
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        return []
    scalar = str | int | float | None
    return [{k: v for k, v in row.items() if isinstance(v, scalar)} for row in value]


def page(results: Mapping[str, Result]) -> str:
    """Returns the whole page: known sections in order, then the others."""
    parts = [INTRODUCTION]
    parts += [make(results[name]) for name, make in SECTIONS.items() if name in results]
    more = {**QUEUE_SECTIONS, **MODEL_SECTIONS}
    for name, (title, make_more) in more.items():
        if name in results:
            text = make_more(results[name], table)
            parts.append("\n".join((f"## {title}\n", conditions(results[name]), text)))
    known = {*SECTIONS, *more}
    parts += [
        plain(name, result) for name, result in results.items() if name not in known
    ]
    return "\n".join(parts)


def write_page() -> Path:
    """Writes the page and its plots from the saved results, and returns its path."""
    results: dict[str, Result] = {
        file.stem: json.loads(file.read_text(encoding="utf-8"))
        for file in sorted(RESULTS.glob("*.json"))
    }
    plots = PAGE.with_suffix("")
    plots.mkdir(exist_ok=True)
    if "engine" in results:
        plot_mixed(results["engine"]["mixed"], plots / "mixed.svg")
        if results["engine"]["rates"]:
            plot_rates(results["engine"]["rates"], plots / "rates.svg")
    PAGE.write_text(page(results), encoding="utf-8")
    return PAGE


if __name__ == "__main__":
    print(f"wrote {write_page()}")
