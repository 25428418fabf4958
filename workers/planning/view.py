"""A plan as tables and lines for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..engine.model.sizes import Parameters
from ..tables import pairs, table
from .ask import Ask
from .candidate import Choice, Refused, gib, per_second
from .memory import MemoryTable
from .plan import Plan


def shown(ask: Ask, counts: Parameters, plan: Plan) -> Iterator[RenderableType]:
    """Yields what `tokenmill plan` prints.

    Args:
        ask: What was asked.
        counts: The model's parameters.
        plan: The answer.
    """
    yield pairs("Asked", _asked(ask, counts))
    chosen = plan.chosen
    if chosen is None:
        yield _heading("Plan: none")
    else:
        yield _heading(f"Plan: {_name(chosen)}")
    for reason in plan.reasons:
        yield Text(f"  {reason}")
    if chosen is not None:
        yield _memory(ask, chosen.memory, chosen.replicas * chosen.tp)
        yield pairs("Speed, predicted", _speed(ask, chosen))
    if plan.refused:
        yield _refused(plan.refused)
    for title, lines in (
        ("Warnings", plan.warnings),
        ("What would serve better, and when", plan.elsewhere),
        ("What is modelled", plan.assumptions),
    ):
        if lines:
            yield _heading(title)
        for line in lines:
            yield Text(f"  {line}")


def _heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _name(chosen: Choice) -> str:
    plural = "s" if chosen.replicas > 1 else ""
    return (
        f"weights {chosen.weights}, kv {chosen.kv}, tp {chosen.tp}, "
        f"{chosen.replicas} replica{plural}, {chosen.running} running, chunk "
        f"{chosen.prefill_chunk}, {chosen.kv_blocks:,} blocks, window "
        f"{chosen.max_wait_ms} ms"
    )


def _asked(ask: Ask, counts: Parameters) -> Iterator[tuple[str, str]]:
    shape, fleet = ask.shape, ask.fleet
    model = (
        f"{ask.model}: {shape.family}, {counts.total:,} parameters, {shape.num_layers} "
        f"layers, {shape.num_heads} query and {shape.num_kv_heads} KV heads, context "
        f"{shape.context:,}"
    )
    yield "model", model
    yield "tp degrees", ", ".join(map(str, ask.degrees))
    kind = "host" if fleet.card.is_host else fleet.card.name
    devices = (
        f"{fleet.count} x {kind}: {gib(fleet.card.memory_bytes)} GiB at "
        f"{fleet.card.bandwidth / 1e9:,.0f} GB/s each, {fleet.nodes} "
        f"host{'s' * (fleet.nodes > 1)}"
    )
    yield "devices", devices
    target = "no target" if ask.slo_ms is None else f"P99 within {ask.slo_ms:.0f} ms"
    rate = "" if ask.rate is None else f", {per_second(ask.rate)} requests/s"
    request = ask.request
    yield (
        "requests",
        f"{request.prompt} prompt and {request.output} output tokens, {target}{rate}",
    )


def _memory(ask: Ask, memory: MemoryTable, count: int) -> Table:
    unit = "process" if ask.fleet.card.is_host else "card"
    made = table(f"Memory of each {unit}, predicted", "part", "GiB", "share")
    rows = {
        "weights: linear layers": memory.linear,
        "weights: head": memory.head,
        "weights: embeddings, norms": memory.other,
        "KV pool": memory.kv,
        "activations of a step": memory.activations,
        "logits": memory.logits,
        "communication": memory.communication,
        (
            "Python and libraries" if ask.fleet.card.is_host else "CUDA context"
        ): memory.runtime,
        "margin beyond the step": memory.reserve,
        "free": memory.free,
        "in all": memory.device,
    }
    for name, size in rows.items():
        made.add_row(name, f"{size / 2**30:,.3f}", f"{size / memory.device:.1%}")
    made.caption = f"{count} of them"
    made.caption_justify = "left"
    return made


def _speed(ask: Ask, chosen: Choice) -> Iterator[tuple[str, str]]:
    yield "decode step", f"{chosen.step_ms:.3g} ms with {chosen.running} running"
    if chosen.tp > 1:
        yield "of it collectives", f"{chosen.collective_ms:.3g} ms"
    yield "first token", f"{chosen.first_token_ms:.0f} ms after a slot is free"
    yield "request alone", f"{chosen.alone_ms:.0f} ms"
    yield "request, all slots taken", f"{chosen.full_ms:.0f} ms"
    within = "within the target" if ask.slo_ms else "with waits as long as the work"
    yield "rate", f"{per_second(chosen.rate)} requests/s {within}"
    if chosen.p99_ms is not None:
        yield "P99 at the asked rate", f"{chosen.p99_ms:.0f} ms"


def _refused(refused: tuple[Refused, ...]) -> Table:
    made = table("Refused, the most exact first", "choice")
    made.add_column("because", overflow="fold")
    for one in refused:
        name = f"weights {one.weights}" + (f", tp {one.tp}" if one.tp else "")
        made.add_row(name, one.reason)
    return made


def facts(ask: Ask, counts: Parameters, plan: Plan) -> dict[str, Any]:
    """Returns the same as plain values, fit for JSON.

    Args:
        ask: What was asked.
        counts: The model's parameters.
        plan: The answer.
    """
    found: dict[str, Any] = {
        "model": ask.model,
        "parameters": counts.total,
        "shape": ask.shape,
        "degrees": ask.degrees,
        "devices": {
            "card": ask.fleet.card,
            "count": ask.fleet.count,
            "per_node": ask.fleet.per_node,
        },
        "asked": {
            "prompt": ask.request.prompt,
            "output": ask.request.output,
            "slo_ms": ask.slo_ms,
            "rate": ask.rate,
        },
        **msgspec.structs.asdict(plan),
    }
    if plan.chosen is not None:
        memory = plan.chosen.memory
        found["chosen"] = {
            **msgspec.structs.asdict(plan.chosen),
            "cards": plan.chosen.cards,
            "block_size": ask.block_size,
            "memory": {
                **msgspec.structs.asdict(memory),
                "weights": memory.weights,
                "used": memory.used,
                "free": memory.free,
            },
        }
    return found
