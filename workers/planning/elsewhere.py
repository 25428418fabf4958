"""Says when pipeline parallelism or another engine would serve better."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from .ask import Ask
from .candidate import Choice, Refused, gib, per_second

_COLLECTIVE_PART: Final = 0.3
"""Of a step spent on collectives, above which fewer of them are worth a pipeline."""
_FP8: Final = (8, 9)
"""From this compute capability on cards multiply 8-bit floats."""
_TESTED: Final = (8, 0)
"""The kernels are compiled and tested for capabilities from here on."""


def notes(
    ask: Ask,
    chosen: Choice | None,
    choices: Sequence[Choice],
    refused: Sequence[Refused] = (),
) -> tuple[str, ...]:
    """Returns what would serve better than this engine, and when.

    Args:
        ask: What is wanted.
        chosen: The advice.
        choices: All ways that fit and keep the target.
        refused: Those that do not.
    """
    return (
        *_pipelines(ask, chosen),
        *_across_hosts(ask, chosen, refused),
        *_engines(ask, chosen, choices),
    )


def _across_hosts(
    ask: Ask, chosen: Choice | None, refused: Sequence[Refused]
) -> Iterator[str]:
    """Says which more exact weights the hosts hold together and none alone."""
    fleet = ask.fleet
    if chosen is None or fleet.card.is_host or fleet.nodes == 1:
        return
    for one in refused:
        needed = (fleet.card.memory_bytes + one.short_bytes) * one.tp
        is_whole_host = one.tp * 2 > min(fleet.count, fleet.per_node)
        is_better = one.loss_percent < chosen.loss_percent
        if not (one.short_bytes and is_whole_host and is_better):
            continue
        if needed <= fleet.count * fleet.card.memory_bytes:
            yield (
                f"weights {one.weights} lack {gib(one.short_bytes)} GiB a card in one "
                f"host (tp {one.tp}) and fit {fleet.nodes} together: pipeline "
                "parallelism over hosts would hold them, which tokenmill does not do "
                "and vLLM and SGLang do"
            )


def _pipelines(ask: Ask, chosen: Choice | None) -> Iterator[str]:
    fleet, shape = ask.fleet, ask.shape
    if fleet.card.is_host or fleet.count == 1:
        return
    within = min(fleet.count, fleet.per_node)
    fitting = [degree for degree in ask.degrees if degree <= within]
    largest = max(fitting, default=1)
    is_split_no_further = chosen is None or chosen.tp == largest > 1
    if within not in ask.degrees and is_split_no_further:
        yield (
            f"{shape.num_heads} query heads and {shape.num_kv_heads} KV heads do not "
            f"divide by {within}, so a replica has {largest} cards at most: pipeline "
            f"parallelism would split the {shape.num_layers} layers over all {within}, "
            "which tokenmill does not do and vLLM and SGLang do"
        )
    if chosen is None:
        return
    part = chosen.collective_ms / chosen.step_ms
    if part > _COLLECTIVE_PART:
        yield (
            f"{part:.0%} of a decode step is waiting for collectives over a link of "
            f"{fleet.card.link / 1e9:.3g} GB/s: pipeline parallelism sends "
            f"{chosen.tp - 1} messages a step where tensor parallelism sums "
            f"{2 * shape.num_layers + 1} times, and would raise throughput (not the "
            "time of one request); tokenmill has none, vLLM and SGLang do"
        )
    if chosen.tp > shape.num_kv_heads > 0:
        times = chosen.tp // shape.num_kv_heads
        yield (
            f"each of the {shape.num_kv_heads} KV heads is kept {times} times: beyond "
            f"tp {shape.num_kv_heads} cards hold no more sequences, which replicas or "
            "pipeline stages would"
        )


def _engines(
    ask: Ask, chosen: Choice | None, choices: Sequence[Choice]
) -> Iterator[str]:
    card = ask.fleet.card
    best = max((one.rate for one in choices), default=0.0)
    is_short = ask.rate is not None and best < ask.rate
    if card.capability is not None and card.capability >= _FP8:
        why = (
            f"these cards sustain {per_second(best)} requests/s of the "
            f"{per_second(ask.rate)} asked"
            if is_short and ask.rate is not None
            else "where the highest rate of one model is all that counts"
        )
        yield (
            f"{why}: vLLM, SGLang and TensorRT-LLM have 8-bit float kernels tuned for "
            f"{card.name}; tokenmill computes INT8 with 16-bit rows or half precision, "
            "and gives the same tokens alone and in company"
        )
    elif is_short:
        yield (
            "an engine with kernels tuned for this card (vLLM, SGLang, TensorRT-LLM; "
            "llama.cpp on a CPU) may sustain more: measure it beside bench/load.py"
        )
    if chosen is None and ask.fleet.nodes > 1:
        yield (
            "tensor parallelism stays within one host here; a model that needs several "
            "takes an engine with pipeline stages, such as vLLM with Ray"
        )


def warnings_for(ask: Ask, chosen: Choice) -> tuple[str, ...]:
    """Returns what may make the advice wrong."""
    return tuple(_warnings(ask, chosen))


def _warnings(ask: Ask, chosen: Choice) -> Iterator[str]:
    card = ask.fleet.card
    if card.capability is not None and card.capability < _TESTED:
        major, minor = card.capability
        yield (
            f"{card.name} has compute capability {major}.{minor}: the GPU kernels are "
            "compiled and tested from 8.0 on, and may not run there"
        )
    if not card.is_host and chosen.weights not in ("int8",):
        yield (
            f"on a GPU the last bits of {chosen.weights} products depend on the batch, "
            "so a request's tokens may; int8 keeps them the same"
        )
    if not card.is_host and chosen.weights == "int8":
        yield (
            "INT8 meets 16-bit rows, two products for each: weights='int8-a8' prefills "
            "faster and loses more quality"
        )
    if ask.slo_ms is not None and chosen.full_ms > 0.8 * ask.slo_ms:
        yield (
            f"a request with all slots taken needs {chosen.full_ms / ask.slo_ms:.0%} "
            "of the target: the figures are a model's, so measure with bench/load.py "
            "before you promise it"
        )
    if ask.fleet.nodes > 1:
        yield (
            f"{ask.fleet.nodes} hosts: start the same settings on each, with the "
            "replicas that its cards hold"
        )
