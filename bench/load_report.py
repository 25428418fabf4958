"""The Markdown report of a load test, with plots beside it."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypedDict

from harness import Figures
from report_plots import COLORS, _figure, _save

_COLUMNS = (
    ("requests", "requests"),
    ("failed", "failed"),
    ("qps", "QPS"),
    ("output_tokens_per_s", "tokens/s"),
    ("goodput_qps", "goodput QPS"),
)
_TIMES = ("ttft_ms", "per_token_ms", "gap_ms", "total_ms", "rtf")
_STYLES = {"p50": ":", "p95": "--", "p99": "-"}
_SIDES = {"client": COLORS["tokenmill"], "gateway": COLORS["llama.cpp"]}


class Row(TypedDict):
    """One step of one side."""

    side: str
    mode: str
    level: float
    batch_size: int | None
    figures: Figures
    memory_mib: dict[str, float]


def write_report(
    path: Path,
    rows: Sequence[Row],
    facts: dict[str, object],
    problems: Sequence[str] = (),
) -> None:
    """Writes the report, and its plots as SVG files of the same name.

    Args:
        path: The Markdown file.
        rows: What was measured.
        facts: Of the machine and the run, shown as a list.
        problems: What makes the figures untrustworthy.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["# Load test", "", *(f"- {k}: {v}" for k, v in facts.items()), ""]
    if problems:
        lines += ["## Problems", "", *(f"- {problem}" for problem in problems), ""]
    for mode in dict.fromkeys(row["mode"] for row in rows):
        chosen = [row for row in rows if row["mode"] == mode]
        what = "requests per second offered" if mode == "open" else "users at once"
        lines += [f"## {mode.capitalize()} loop, by {what}", "", *_table(chosen), ""]
        for name, figure in (("ttft_ms", "first token"), ("per_token_ms", "a token")):
            image = path.with_name(f"{path.stem}-{mode}-{name.removesuffix('_ms')}.svg")
            if not any(f"{name}_p50" in row["figures"] for row in chosen):
                image.unlink(missing_ok=True)  # an earlier run's
                lines += [f"Time of {figure}: not measured.", ""]
                continue
            _plot(chosen, name, f"ms to {figure}", what, image)
            lines += [f"![{figure}]({image.name})", ""]
        image = path.with_name(f"{path.stem}-{mode}-rate.svg")
        _plot_rate(chosen, what, image)
        lines += [f"![rates]({image.name})", ""]
    lines += ["## Memory", "", *_memory(rows), "", *_READING]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


_READING = (
    "## How to read it",
    "",
    "Times are milliseconds, as P50 / P95 / P99 over the requests that succeeded.",
    "They begin when a request was to be sent, not when it was. `ttft_ms`: to the",
    "first text; `per_token_ms`: mean time of an output token after it; `gap_ms`:",
    "between two deliveries to the user; `total_ms`: to the end. `rtf`: time to answer",
    "over the time to read the answer; below 1 nobody waits longer than they read.",
    "Goodput counts the requests that met the objective above. Rates of a closed loop",
    "are of the last three quarters of its time, while all users ask. Each prompt",
    "begins with words of its own, so that no prefix cache has it. `-` was not",
    "measured: times after the first text need answers in more than one piece.",
)


def _table(rows: Iterable[Row]) -> list[str]:
    head = ["load", "batch", "through", *(title for _, title in _COLUMNS), *_TIMES]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        found = row["figures"]
        cells = [f"{row['level']:g}", str(row["batch_size"] or "-"), row["side"]]
        cells += [f"{found[name]:g}" for name, _ in _COLUMNS]
        for name in _TIMES:
            digits = 2 if name == "rtf" else 0
            values = (found.get(f"{name}_{p}") for p in _STYLES)
            three = (f"{v:.{digits}f}" for v in values if v is not None)
            cells.append(" / ".join(three) or "-")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _memory(rows: Sequence[Row]) -> list[str]:
    kinds = sorted({kind for row in rows for kind in row["memory_mib"]})
    if not kinds:
        return ["Not measured: the pool is not this run's own."]
    lines = [
        f"| most MiB resident at | {' | '.join(kinds)} |",
        "|" + "---|" * (len(kinds) + 1),
    ]
    for row in rows:
        name = f"{row['mode']} {row['level']:g}, {row['side']}"
        cells = [f"{row['memory_mib'].get(kind, 0):.0f}" for kind in kinds]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _series(rows: Sequence[Row]) -> Iterable[tuple[str, int | None, list[Row]]]:
    """The rows of each side and batch size, by load."""
    for key in dict.fromkeys((row["side"], row["batch_size"]) for row in rows):
        chosen = [r for r in rows if (r["side"], r["batch_size"]) == key]
        yield *key, sorted(chosen, key=lambda row: row["level"])


def _plot(rows: Sequence[Row], name: str, title: str, what: str, path: Path) -> None:
    figure, axes = _figure(6.4, 3.4)
    measured = [row for row in rows if f"{name}_p50" in row["figures"]]
    for side, batch, chosen in _series(measured):
        levels = [row["level"] for row in chosen]
        for fraction, style in _STYLES.items():
            values = [row["figures"][f"{name}_{fraction}"] for row in chosen]
            label = f"{side}{f', batch {batch}' if batch else ''}, {fraction.upper()}"
            axes.plot(
                levels, values, style, color=_SIDES[side], marker="o", label=label
            )
    axes.set_xlabel(what)
    axes.set_ylabel(title)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def _plot_rate(rows: Sequence[Row], what: str, path: Path) -> None:
    figure, axes = _figure(6.4, 3.4)
    for side, batch, chosen in _series(rows):
        levels = [row["level"] for row in chosen]
        for name, style in (("qps", "-"), ("goodput_qps", "--")):
            values = [row["figures"][name] for row in chosen]
            shown = "goodput" if name.startswith("good") else "done"
            label = f"{side}{f', batch {batch}' if batch else ''}, {shown}"
            axes.plot(
                levels, values, style, color=_SIDES[side], marker="o", label=label
            )
    axes.set_xlabel(what)
    axes.set_ylabel("requests per second")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)
