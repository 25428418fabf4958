"""Shows people what `tokenmill inspect` found: tables, one per question."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from .engine.model.sizes import precision_of
from .tables import pairs, table, write_out

if TYPE_CHECKING:
    from .engine.model.advice import Advice, Choice

_MIB: Final = 1024 * 1024
_SHOWN_LAYERS: Final = 8


def show(facts: Mapping[str, Any], advice: Advice | None) -> None:
    """Prints a model's budget, and the advice if there is one.

    Args:
        facts: From `describe`.
        advice: From `advise_for`.
    """
    write_out(_parts(facts, advice))


def _parts(facts: Mapping[str, Any], advice: Advice | None) -> Iterator[RenderableType]:
    yield from (_model(facts), _weights(facts), _kv(facts), _memory(facts))
    if advice is not None:
        yield from _advice(advice)


def _model(facts: Mapping[str, Any]) -> Table:
    return pairs("Model", _model_lines(facts))


def _model_lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "files", facts["path"]
    yield "family", f"{facts['family']}, stored as {', '.join(facts['stored_as'])}"
    yield "parameters", f"{facts['parameters']:,}"
    heads = f"{facts['kv_heads']} KV heads of {facts['head_dim']}"
    yield "layers", f"{facts['layers']}, each with {heads}"
    yield "vocabulary", f"{facts['vocabulary']:,} tokens"
    yield "context", f"{facts['max_context']:,} tokens"
    yield from _calibration_lines(facts["calibration"])


def _calibration_lines(calibration: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    facts = dict(calibration)
    layers = facts.pop("sensitive_layers", None)
    for key, value in facts.items():
        name = key.replace("_", " ")
        is_share = name.endswith("share") and isinstance(value, float)
        text = f"{value:.1%}" if is_share else str(value)
        yield name if "calibration" in name else f"calibration {name}", text
    if not calibration:
        yield "calibration", "none for this model"
    if layers:
        shown = ", ".join(map(str, list(layers)[:_SHOWN_LAYERS]))
        more = len(layers) - _SHOWN_LAYERS
        yield "sensitive layers", f"{shown}, and {more} more" if more > 0 else shown


def _weights(facts: Mapping[str, Any]) -> Table:
    made = table(
        "Weights in memory, MiB", "precision", "linear", "head", "other", "all"
    )
    chosen = precision_of(facts["weights"])
    for name, total in facts["weights_bytes"].items():
        parts = facts["weights_by_part"][name]
        shares = [
            f"{_mib(size)} ({size / max(1, total):.0%})" for size in parts.values()
        ]
        if not parts["head"]:
            shares[1] = "is the embedding"
        mark = f"{name} *" if name == chosen else name
        made.add_row(mark, *shares, _mib(total))
    return made


def _kv(facts: Mapping[str, Any]) -> Table:
    typical = facts["typical_tokens"]
    made = table(
        f"KV pool in blocks of {facts['block_size']} tokens",
        "precision",
        "B/token",
        "MiB",
        "blocks",
        "tokens",
        f"x {facts['max_context']:,} tokens",
        f"x {typical:,} tokens",
    )
    for kind, size in facts["kv_bytes_per_token"].items():
        pool = facts["kv"].get(kind)
        if pool is None:
            made.add_row(f"({kind})", f"{size:,}")  # to compare with
            continue
        mark = f"{kind} *" if kind == facts["kv_kind"] else kind
        counts = ("blocks", "tokens", "sequences_of_max_context")
        made.add_row(
            mark,
            f"{size:,}",
            _mib(pool["bytes"]),
            *(f"{pool[key]:,}" for key in counts),
            f"{pool['sequences_of_typical_tokens']:,}",
        )
    made.caption = "* as configured; x: sequences of that length that fit at once"
    made.caption_justify = "left"
    return made


def _memory(facts: Mapping[str, Any]) -> Table:
    return pairs("Memory for the pool", _memory_lines(facts["memory"]))


def _memory_lines(memory: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    source = memory["free_according_to"]
    yield "free now", f"{_mib(memory['free_bytes'])} MiB ({source})"
    yield "- margin", f"{_mib(memory['margin_bytes'])} MiB: a tenth, 512 MiB at least"
    yield "- weights", f"{_mib(memory['weights_bytes'])} MiB, still to be loaded"
    limit = memory["kv_limit_bytes"]
    bound = "no bound" if limit is None else f"worker.kv_memory_mb is {_mib(limit)}"
    yield "= pool", f"{_mib(memory['pool_room_bytes'])} MiB at most ({bound})"


def _advice(advice: Advice) -> Iterator[RenderableType]:
    name = "none" if advice.chosen is None else _name(advice.chosen)
    yield Text(f"\nAdvice: {name}", style="bold")
    for reason in advice.reasons:
        yield Text(f"  {reason}")
    for warning in advice.warnings:
        yield Text(f"  warning: {warning}")
    if advice.rejected:
        made = table("Rejected, the most precise first", "choice")
        made.add_column("because", overflow="fold")
        for row in _rejected(advice):
            made.add_row(*row)
        yield made


def _rejected(advice: Advice) -> Iterator[tuple[str, str]]:
    """Yields rows; weights with one reason, whatever the KV, are one row."""
    reasons: dict[str, list[str]] = {}
    for one in advice.rejected:
        reasons.setdefault(one.choice.weights, []).append(one.reason)
    shown: set[str] = set()
    for one in advice.rejected:
        weights = one.choice.weights
        if len(reasons[weights]) == 1 or len(set(reasons[weights])) > 1:
            yield _name(one.choice), one.reason
        elif weights not in shown:
            shown.add(weights)
            yield f"weights {weights}", one.reason


def _name(choice: Choice) -> str:
    offload = ", rest of the weights on the host" if choice.offload else ""
    return f"weights {choice.weights}, kv {choice.kv}{offload}"


def _mib(size: int) -> str:
    return f"{size / _MIB:,.0f}" if size >= 10 * _MIB else f"{size / _MIB:,.2f}"
