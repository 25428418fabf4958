"""The settings that a plan comes to, as TOML that `tokenmill up --config` reads."""

from __future__ import annotations

import json
from collections.abc import Iterator

from .ask import Ask
from .candidate import Choice

_BATCH_STEPS = 4
"""Prefill chunks that may be dispatched ahead."""


def settings_toml(ask: Ask, chosen: Choice, *, name: str, path: str | None) -> str:
    """Returns a file of settings.

    Args:
        ask: What was asked.
        chosen: The advice.
        name: Public name of the model.
        path: Directory or hub id; None resolves the name.
    """
    lines = [*_lines(ask, chosen, name=name, path=path)]
    return "\n".join([*lines, ""])


def _lines(ask: Ask, chosen: Choice, *, name: str, path: str | None) -> Iterator[str]:
    fleet = ask.fleet
    target = "" if ask.slo_ms is None else f", P99 {ask.slo_ms:.0f} ms"
    yield (
        f"# From tokenmill plan: {fleet.count} x {fleet.card.name}, "
        f"{ask.request.prompt} + {ask.request.output} tokens{target}."
    )
    replicas = chosen.replicas
    if fleet.nodes > 1:
        replicas = min(replicas, max(1, fleet.per_node // chosen.tp))
        yield f"# For each of {fleet.nodes} hosts: {replicas} of {chosen.replicas}."
    yield ""
    yield "[scheduler]"
    yield f"max_wait_ms = {chosen.max_wait_ms}"
    yield ""
    yield "[worker]"
    yield f"device = {_text('cpu' if fleet.card.is_host else 'cuda')}"
    yield f"block_size = {ask.block_size}"
    yield f"kv_memory_mb = {chosen.kv_memory_mb}"
    yield f"max_running = {chosen.running}"
    yield f"prefill_chunk = {chosen.prefill_chunk}"
    yield f"batch_tokens = {max(4096, _BATCH_STEPS * chosen.prefill_chunk)}"
    yield ""
    yield "[[models]]"
    yield f"name = {_text(name)}"
    if path is not None:
        yield f"path = {_text(path)}"
    yield f"weights = {_text(chosen.weights)}"
    yield f"kv = {_text(chosen.kv)}"
    yield f"tp = {chosen.tp}"
    yield f"replicas = {replicas}"
    if not fleet.card.is_host:
        used = range(chosen.tp * replicas)
        yield f"devices = [{', '.join(map(str, used))}]"


def _text(value: str) -> str:
    """Returns a TOML string: JSON's escapes are a part of TOML's."""
    return json.dumps(value, ensure_ascii=False)
