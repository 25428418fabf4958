"""Advice on a precision never gets worse when its circumstances get better."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.workers.engine.model.advice import (
    KV_LOSS,
    WEIGHTS_LOSS,
    Advice,
    Model,
    Situation,
    advise,
    margin_bytes,
)

MIB = 2**20
TIMES_BETTER = st.floats(1.0, 20.0)


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Models of any size; a smaller precision takes fewer bytes."""
    size = draw(st.integers(1, 100_000)) * MIB
    widths = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "int8": 1.0, "nf4": 0.52}
    token = draw(st.integers(1_000, 1_000_000))
    return Model(
        weights_bytes={name: int(size * width) for name, width in widths.items()},
        read_bytes={name: int(0.9 * size * width) for name, width in widths.items()},
        kv_bytes_per_token={"float32": 4 * token, "int8": token, "int4": token // 2},
    )


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """Devices and targets, some with room on the host."""
    return Situation(
        memory_bytes=draw(st.integers(600, 200_000)) * MIB,
        bandwidth=draw(st.floats(1e9, 5e12)),
        slo_ms=draw(st.none() | st.floats(0.1, 1000)),
        running=draw(st.integers(1, 64)),
        tokens=draw(st.integers(16, 8192)),
        measured_step_ms=draw(st.none() | st.floats(0.1, 1000)),
        host_bytes=draw(st.sampled_from([0, 500_000 * MIB])),
        transfer_bandwidth=25e9,
        unfit=draw(
            st.dictionaries(st.sampled_from(["float16", "nf4"]), st.just("slow"))
        ),
    )


def rank(advice: Advice) -> tuple[bool, bool, float]:
    """Sorts advice: some before none, what fits before what does not, then quality."""
    one = advice.chosen
    if one is None:
        return (True, True, 0.0)
    return (False, one.offload, one.loss_percent)


@given(models(), situations(), TIMES_BETTER)
def test_more_memory_never_gives_worse_advice(
    model: Model, situation: Situation, times: float
) -> None:
    more = msgspec.structs.replace(
        situation, memory_bytes=int(situation.memory_bytes * times)
    )
    assert rank(advise(model, more)) <= rank(advise(model, situation))


@given(models(), situations(), TIMES_BETTER)
def test_more_bandwidth_never_gives_worse_advice(
    model: Model, situation: Situation, times: float
) -> None:
    more = msgspec.structs.replace(situation, bandwidth=situation.bandwidth * times)
    assert rank(advise(model, more)) <= rank(advise(model, situation))


@given(models(), situations(), TIMES_BETTER)
def test_a_longer_target_never_gives_worse_advice(
    model: Model, situation: Situation, times: float
) -> None:
    target = None if situation.slo_ms is None else situation.slo_ms * times
    longer = msgspec.structs.replace(situation, slo_ms=target)
    assert rank(advise(model, longer)) <= rank(advise(model, situation))


@given(models(), situations())
def test_what_is_advised_keeps_every_bound(model: Model, situation: Situation) -> None:
    advice = advise(model, situation)
    choices = [one.choice for one in advice.rejected]
    if advice.chosen is not None:
        one = advice.chosen
        choices.append(one)
        cached = model.kv_bytes_per_token[one.kv] * situation.running * situation.tokens
        resident = model.weights_bytes[one.weights] - one.offloaded_bytes
        margin = margin_bytes(situation.memory_bytes)
        assert resident + cached + margin == one.need_bytes <= situation.memory_bytes
        assert situation.slo_ms is None or one.step_ms <= situation.slo_ms
        assert one.weights not in situation.unfit
    assert len(choices) == len({(c.weights, c.kv, c.offload) for c in choices})
    if advice.chosen is None:  # then every way was tried
        assert len(choices) >= len(WEIGHTS_LOSS) * len(KV_LOSS)
    assert all(one.reason for one in advice.rejected)
