"""Advises one precision for a model, a device and a latency target. Pure: no I/O.

A precision is refused if it does not fit, if the floor of a step (`step_floor.py`) is
above the target, or if the device computes it badly. Of those that are left, the one
that costs the least quality is advised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Final

import msgspec

from .budget import MARGIN_BYTES, MARGIN_FRACTION, MIB
from .step_floor import Speed, Step, explain, floor_ms

WEIGHTS_LOSS: Final = {
    "float32": 0.0,
    "float16": 0.01,
    "bfloat16": 0.05,
    "int8": 0.18,
    "nf4": 3.0,
}
"""Perplexity over float32 in per cent: upper bounds that sort precisions.

What a model really loses is measured by `bench/quality.py`.
"""
KV_LOSS: Final = {"float32": 0.0, "int8": 0.1, "int4": 6.0}
"""The same for keys and values."""
UNSEEN_WORDS_LIMIT: Final = 0.08
"""Above this share of words that calibration never saw, INT8 alone is not trusted."""
OFFLOADED: Final = "int8"
"""Precision of weights that stay on the host: larger ones travel too long, and 4-bit
layers cannot travel."""
CLOSE: Final = 2.0
"""A target within so many times a step's floor is not said to be met."""
_NOTHING: Final = (
    "nothing fits and keeps the target: take more memory, fewer running sequences, "
    "shorter requests, a smaller model or a longer target"
)


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """What a model takes."""

    weights_bytes: Mapping[str, int]
    """In memory, by precision."""
    read_bytes: Mapping[str, int]
    """Of weights that each step reads, by precision: embeddings are looked up."""
    kv_bytes_per_token: Mapping[str, int]
    """By precision of the pool."""
    products_per_token: int = 0
    """Multiply-adds of linear layers and head; 0 is not known."""


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """Where a model is to run, and what is asked of it."""

    memory_bytes: int
    """What the device has for weights, KV and margin."""
    bandwidth: float
    """Bytes a second of the device's memory."""
    compute: Mapping[str, float] = {}
    """Multiply-adds a second by precision; without it a step's floor is of memory."""
    slo_ms: float | None = None
    """Most time between two tokens of a sequence; None: any will do."""
    running: int = 16
    """Sequences that run at once."""
    tokens: int = 512
    """Prompt and output of a typical request."""
    measured_step_ms: float | None = None
    """A decode step of `running` sequences as measured; None goes by the floor."""
    measured_weights: str = "int8"
    """Precision of weights in that measurement."""
    measured_kv: str = "int8"
    host_bytes: int = 0
    """Host memory for weights that are offloaded; 0 where the device is the host."""
    transfer_bandwidth: float = 0.0
    """Bytes a second from host to device."""
    unfit: Mapping[str, str] = {}
    """Precisions that the device computes badly, and why."""
    unseen_words_share: float | None = None
    """Of words in use that the calibration text lacks."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run a model, with its figures."""

    weights: str
    kv: str
    offload: bool
    """Weights that do not fit stay in host memory and come over at each step."""
    offloaded_bytes: int = 0
    """Of weights, in host memory."""
    loss_percent: float
    """Expected perplexity over float32."""
    need_bytes: int
    """Weights, KV of all running sequences and margin."""
    step_ms: float
    """A decode step: the floor, or scaled from what was measured."""


class Rejected(msgspec.Struct, frozen=True):
    """A choice of better quality, and the number that speaks against it."""

    choice: Choice
    reason: str


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """What is advised, and why not something more precise."""

    chosen: Choice | None
    reasons: tuple[str, ...]
    rejected: tuple[Rejected, ...]
    warnings: tuple[str, ...] = ()


def advise(model: Model, situation: Situation) -> Advice:
    """Advises the most precise way to run a model that fits and is fast enough.

    More memory, more bandwidth or a longer target never give a less precise advice,
    save that what fits goes before what is offloaded: leaving weights on the host comes
    last, since it costs far more time than any precision costs quality.

    Args:
        model: What it takes.
        situation: Where it is to run.
    """
    rejected: list[Rejected] = []
    for choice in _choices(model, situation):
        reason = _objection(choice, situation)
        if reason is None:
            return Advice(
                chosen=choice,
                reasons=_reasons(choice, model, situation),
                rejected=tuple(rejected),
                warnings=_warnings(choice, situation),
            )
        rejected.append(Rejected(choice, reason))
    return Advice(
        chosen=None,
        reasons=(_NOTHING,),
        rejected=tuple(rejected),
    )


def margin_bytes(memory_bytes: int) -> int:
    """Returns what is left alone of a device's memory, as when a pool is sized."""
    return max(MARGIN_BYTES, int(memory_bytes * MARGIN_FRACTION))


def _choices(model: Model, situation: Situation) -> Iterator[Choice]:
    """Yields all choices, those that cost the least quality first, offload last."""
    pairs = sorted(
        product(
            (name for name in WEIGHTS_LOSS if name in model.weights_bytes),
            (name for name in KV_LOSS if name in model.kv_bytes_per_token),
        ),
        key=lambda pair: WEIGHTS_LOSS[pair[0]] + KV_LOSS[pair[1]],
    )
    for weights, kv in pairs:
        yield _choice(model, situation, weights, kv, offload=False)
    if situation.host_bytes and situation.transfer_bandwidth:
        for weights, kv in pairs:
            if weights == OFFLOADED:
                yield _choice(model, situation, weights, kv, offload=True)


def _choice(
    model: Model, situation: Situation, weights: str, kv: str, *, offload: bool
) -> Choice:
    cached = model.kv_bytes_per_token[kv] * situation.running * situation.tokens
    fixed = cached + margin_bytes(situation.memory_bytes)
    resident, offloaded = model.weights_bytes[weights], 0
    step_ms = _step_ms(model, situation, weights, kv)
    if offload:
        offloaded = resident - min(resident, max(0, situation.memory_bytes - fixed))
        step_ms += 1000 * offloaded / situation.transfer_bandwidth
    return Choice(
        weights=weights,
        kv=kv,
        offload=offload,
        loss_percent=WEIGHTS_LOSS[weights] + KV_LOSS[kv],
        offloaded_bytes=offloaded,
        need_bytes=resident - offloaded + fixed,
        step_ms=step_ms,
    )


def _step_ms(model: Model, situation: Situation, weights: str, kv: str) -> float:
    """Returns the floor of a decode step, or what was measured, by bytes read."""
    read = _read_bytes(model, situation, weights, kv)
    if situation.measured_step_ms is not None:
        measured = _read_bytes(
            model, situation, situation.measured_weights, situation.measured_kv
        )
        return situation.measured_step_ms * read / measured
    return floor_ms(*_floor_of(model, situation, weights, kv), weights)


def _floor_of(
    model: Model, situation: Situation, weights: str, kv: str
) -> tuple[Step, Speed]:
    step = Step(
        read_bytes=_read_bytes(model, situation, weights, kv),
        products=model.products_per_token * situation.running,
    )
    return step, Speed(bandwidth=situation.bandwidth, compute=situation.compute)


def _read_bytes(model: Model, situation: Situation, weights: str, kv: str) -> int:
    context = situation.running * situation.tokens
    return model.read_bytes[weights] + model.kv_bytes_per_token[kv] * context


def _objection(choice: Choice, situation: Situation) -> str | None:
    """Returns what speaks against a choice, with its number; None if nothing does."""
    if choice.weights in situation.unfit:
        return situation.unfit[choice.weights]
    if choice.need_bytes > situation.memory_bytes:
        return (
            f"needs {choice.need_bytes // MIB} MiB with KV and margin, "
            f"{situation.memory_bytes // MIB} MiB are there"
        )
    if choice.offloaded_bytes > situation.host_bytes:
        return (
            f"leaves {choice.offloaded_bytes // MIB} MiB of weights to the host, which "
            f"has {situation.host_bytes // MIB} MiB"
        )
    if situation.slo_ms is not None and choice.step_ms > situation.slo_ms:
        kind = "at least" if situation.measured_step_ms is None else "about"
        return (
            f"a step takes {kind} {choice.step_ms:.3g} ms, the target is "
            f"{situation.slo_ms:.3g} ms"
        )
    return None


def _reasons(choice: Choice, model: Model, situation: Situation) -> tuple[str, ...]:
    margin = margin_bytes(situation.memory_bytes)
    fits = (
        f"needs {choice.need_bytes // MIB} of {situation.memory_bytes // MIB} MiB: "
        f"weights, KV of {situation.running} sequences of {situation.tokens} tokens, "
        f"and {margin // MIB} MiB of margin"
    )
    if situation.measured_step_ms is None:
        floor = _floor_of(model, situation, choice.weights, choice.kv)
        lasts = (
            f"a decode step takes at least {choice.step_ms:.3g} ms: "
            f"{explain(*floor, choice.weights)}"
        )
    else:
        lasts = (
            f"a decode step takes about {choice.step_ms:.3g} ms, scaled by bytes read "
            f"from the {situation.measured_step_ms:.3g} ms measured"
        )
    loses = (
        f"the most precise of those: perplexity about {choice.loss_percent:.2g} % over "
        "float32 at most"
    )
    return fits, lasts, loses


def _warnings(choice: Choice, situation: Situation) -> tuple[str, ...]:
    warnings = []
    share = situation.unseen_words_share
    if choice.weights == "int8" and share is not None and share > UNSEEN_WORDS_LIMIT:
        warnings.append(
            f"{share:.0%} of your words are not in the calibration text, more than "
            f"{UNSEEN_WORDS_LIMIT:.0%}: calibrate with text of your own, or keep more "
            "sensitive layers in float16"
        )
    target, measured = situation.slo_ms, situation.measured_step_ms
    if target and measured is None and target < CLOSE * choice.step_ms:
        warnings.append(
            f"the target of {target:.3g} ms is within {CLOSE:g} times the floor of a "
            "step, so it is not known to be met: take a measured step from tokenmill "
            "doctor and ask again with --step-ms"
        )
    if choice.offload:
        warnings.append(
            "weights are brought over at each step: expect a small fraction of the "
            "speed of a device that holds them"
        )
    return tuple(warnings)
