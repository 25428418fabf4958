"""Which precision is advised, and which number speaks against the others."""

from __future__ import annotations

import msgspec
import pytest

from tokenmill.workers.engine.model.advice import (
    UNSEEN_WORDS_LIMIT,
    Advice,
    Model,
    Situation,
    advise,
)

GIB = 1024**3
GB = 10**9
SEVEN = Model(
    weights_bytes={
        "float32": 28 * GB,
        "float16": 14 * GB,
        "bfloat16": 14 * GB,
        "int8": 8 * GB,
        "nf4": 4 * GB,
    },
    read_bytes={
        "float32": 27 * GB,
        "float16": 13 * GB,
        "bfloat16": 13 * GB,
        "int8": 7 * GB,
        "nf4": 3 * GB,
    },
    kv_bytes_per_token={"float32": 1_000_000, "int8": 250_000, "int4": 125_000},
)
"""Seven billion parameters, in round numbers."""
CARD = Situation(memory_bytes=80 * GIB, bandwidth=600e9, running=4, tokens=1000)


def advised(**changes: object) -> Advice:
    """Advice on the model for a card with some things changed."""
    return advise(SEVEN, msgspec.structs.replace(CARD, **changes))


def named(advice: Advice) -> tuple[str, str, bool] | None:
    """What is advised."""
    one = advice.chosen
    return None if one is None else (one.weights, one.kv, one.offload)


@pytest.mark.parametrize(
    ("memory_gib", "slo_ms", "expected"),
    [
        (80, None, ("float32", "float32", False)),
        (80, 40, ("float16", "float32", False)),  # 27 + 4 GB at 600 GB/s: 52 ms
        (80, 25, ("float16", "int8", False)),  # 13 + 4 GB: 28 ms
        (80, 20, ("int8", "float32", False)),  # 13 + 1 GB: 23 ms
        (80, 15, ("int8", "int8", False)),
        (80, 12.6, ("nf4", "float32", False)),  # INT4 keys cost more than NF4 weights
        (80, 7, ("nf4", "int8", False)),
        (24, None, ("float16", "float32", False)),
        (12, None, ("int8", "int8", False)),
        (8, None, ("nf4", "int8", False)),
        (5, None, ("nf4", "int4", False)),
        (4, None, None),
        (80, 1, None),
    ],
)
def test_the_most_precise_that_fits_and_is_fast_enough(
    memory_gib: int, slo_ms: float | None, expected: tuple[str, str, bool] | None
) -> None:
    advice = advised(memory_bytes=memory_gib * GIB, slo_ms=slo_ms)
    assert named(advice) == expected


def test_each_rejection_has_its_number() -> None:
    advice = advised(memory_bytes=24 * GIB, slo_ms=20)
    reasons = {
        (one.choice.weights, one.choice.kv): one.reason for one in advice.rejected
    }
    assert named(advice) == ("int8", "float32", False)
    # 28 GB of weights, 4 GB of KV and a tenth of 24 GiB.
    need_mib = (32 * GB + 24 * GIB // 10) // 2**20
    assert f"needs {need_mib} MiB" in reasons["float32", "float32"]
    assert "24576 MiB are there" in reasons["float32", "float32"]
    assert "at least 28.3 ms, the target is 20 ms" in reasons["float16", "float32"]
    fits, lasts, loses = advice.reasons
    assert "KV of 4 sequences of 1000 tokens" in fits
    assert "at least 18.3 ms" in lasts
    assert "600 GB/s" in lasts
    assert "0.18 %" in loses


def test_what_was_measured_goes_before_the_floor() -> None:
    # INT8 reads 8 GB a step; 30 ms for it is more than twice its floor.
    measured = {"measured_step_ms": 30.0, "slo_ms": 60.0}
    advice = advised(**measured)
    assert named(advice) == ("float16", "int8", False)
    assert advice.chosen is not None
    assert advice.chosen.step_ms == pytest.approx(30 * 14 / 8)
    assert "scaled by bytes read" in advice.reasons[1]


def test_what_a_device_computes_badly_is_not_advised() -> None:
    slow = {"float16": "no float16 here", "bfloat16": "no bfloat16 here"}
    advice = advised(memory_bytes=24 * GIB, unfit=slow)
    assert named(advice) == ("int8", "float32", False)
    assert "no bfloat16 here" in {one.reason for one in advice.rejected}


def test_weights_stay_on_the_host_only_when_nothing_fits() -> None:
    host = {"host_bytes": 64 * GIB, "transfer_bandwidth": 25e9}
    assert named(advised(memory_bytes=8 * GIB, **host)) == ("nf4", "int8", False)
    advice = advised(memory_bytes=4 * GIB, **host)
    assert named(advice) == ("int8", "int8", True)  # 4 GB of float32 KV do not fit
    assert advice.chosen is not None
    assert advice.chosen.need_bytes <= 4 * GIB
    # What stays away comes over at each step, at the host's speed.
    assert advice.chosen.step_ms > 1000 * advice.chosen.offloaded_bytes / 25e9
    assert "brought over at each step" in advice.warnings[0]
    assert named(advised(memory_bytes=4 * GIB, slo_ms=50, **host)) is None
    little = {**host, "host_bytes": GIB}
    assert named(advised(memory_bytes=4 * GIB, **little)) is None


@pytest.mark.parametrize(
    ("share", "warned"),
    [(None, False), (UNSEEN_WORDS_LIMIT, False), (0.12, True)],
)
def test_int8_is_warned_of_when_calibration_knows_too_few_words(
    share: float | None, *, warned: bool
) -> None:
    advice = advised(memory_bytes=12 * GIB, unseen_words_share=share)
    assert bool(advice.warnings) == warned
    assert not warned or "12% of your words" in advice.warnings[0]
    assert not advised(unseen_words_share=0.5).warnings  # float32 needs none


def test_a_step_lasts_as_long_as_the_slower_of_reading_and_computing() -> None:
    slow = dict.fromkeys(SEVEN.read_bytes, 1e12)
    counted = msgspec.structs.replace(SEVEN, products_per_token=int(7e9))
    situation = Situation(
        memory_bytes=80 * GIB, bandwidth=600e9, running=16, tokens=1000, compute=slow
    )
    advice = advise(counted, situation)
    assert advice.chosen is not None
    assert advice.chosen.step_ms == pytest.approx(1000 * 16 * 7e9 / 1e12)
    assert "its multiply-adds at 1e+03 G/s (112 ms), more than" in advice.reasons[1]
    assert (
        named(advise(counted, msgspec.structs.replace(situation, slo_ms=100))) is None
    )
    alone = advise(counted, msgspec.structs.replace(situation, running=1))
    assert "the bytes it reads at 600 GB/s, more than" in alone.reasons[1]


def test_what_is_left_out_and_what_is_close_is_said() -> None:
    advice = advised(slo_ms=None)
    assert "compute is not counted" in advice.reasons[1]
    assert advice.chosen is not None
    floor = advice.chosen.step_ms
    (warning,) = advised(slo_ms=1.9 * floor).warnings
    assert "not known to be met" in warning
    assert not advised(slo_ms=2.1 * floor).warnings
