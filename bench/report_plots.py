"""The plots of docs/benchmarks.md, as SVG files that change only with the figures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness import Figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Runs = Mapping[str, Sequence[Figures]]
RATES = ("decode_1", "decode_8", "decode_16", "prefill")
COLORS = {
    "tokenmill": "#2f6db3",
    "llama.cpp": "#d08a2e",
    "vllm": "#7a9a4e",
    "hf-static": "#9a9a9a",
}


def _figure(width: float, height: float) -> "tuple[Figure, Axes]":
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise SystemExit(
            "the plots need matplotlib: pip install -e '.[bench]'"
        ) from error
    mpl.use("svg")
    # Without these, ids and a date would make every file differ from the last.
    mpl.rcParams["svg.hashsalt"] = "tokenmill"
    from matplotlib import pyplot as plt

    return plt.subplots(figsize=(width, height), layout="constrained")


def _save(figure: "Figure", path: Path) -> None:
    from matplotlib import pyplot as plt

    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    # Trailing blanks in path data would fail whitespace checks.
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(map(str.rstrip, lines)) + "\n", encoding="utf-8")


def plot_mixed(runs: Runs, path: Path) -> None:
    """Draws the best output tokens per second of each side as bars."""
    figure, axes = _figure(6.4, 0.6 + 0.45 * len(runs))
    names = list(runs)
    best = [max(one["output_tokens_per_s"] for one in runs[name]) for name in names]
    bars = axes.barh(names, best, color=[COLORS.get(name, "#555555") for name in names])
    axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("output tokens per second, mixed workload, 16 running")
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def plot_rates(runs: Runs, path: Path) -> None:
    """Draws decode by batch and prefill as groups of bars, one bar a side."""
    figure, axes = _figure(6.4, 3.2)
    width = 0.8 / len(runs)
    for place, (name, tried) in enumerate(runs.items()):
        best = [max(one[rate] for one in tried) for rate in RATES]
        at = [group + place * width for group in range(len(RATES))]
        color = COLORS.get(name, "#555555")
        bars = axes.bar(at, best, width, label=name, color=color)
        axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=8)
    middle = (len(runs) - 1) * width / 2
    titles = [rate.replace("decode_", "decode, batch ") for rate in RATES]
    axes.set_xticks([group + middle for group in range(len(RATES))], titles)
    axes.set_ylabel("tokens per second")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)
