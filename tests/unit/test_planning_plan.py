"""The advice: what is chosen for which devices and wishes, and what is refused."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import pytest
from support.model_configs import SMOLLM

from tokenmill.shared.errors import ConfigError, ModelLoadError, PromptTooLong
from tokenmill.workers.engine.parallel.shard import degrees
from tokenmill.workers.planning.ask import Ask, parse_target
from tokenmill.workers.planning.cards import (
    CARDS,
    GIB,
    Card,
    Fleet,
    known_card,
    parse_fleet,
    unknown_card,
)
from tokenmill.workers.planning.pace import Replica
from tokenmill.workers.planning.plan import Plan, make_plan
from tokenmill.workers.planning.queueing import wait_quantile, waits
from tokenmill.workers.planning.service import Request, Service
from tokenmill.workers.planning.shape import read_shape

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}
LLAMA_70B = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
HOST = Card(
    name="cpu",
    memory_bytes=8 * GIB,
    bandwidth=15e9,
    tflops={"float32": 0.09, "int8": 0.2},
    link=2e9,
    link_latency_s=200e-6,
    is_host=True,
    unfit={"nf4": "slow", "float16": "slow", "bfloat16": "no instructions"},
)


def ask(content: dict[str, object], gpus: str, **wishes: Any) -> Ask:
    """What is asked of some cards of the table, or of two-core hosts."""
    count, name = parse_fleet(gpus)
    card = HOST if name == "cpu" else CARDS[name]
    shape = read_shape(content, "config.json")
    heads = {
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
    }
    return Ask(
        model="it",
        shape=shape,
        fleet=Fleet(
            card=card,
            count=count,
            per_node=wishes.pop("per_node", 1 if name == "cpu" else 8),
        ),
        request=Request(
            prompt=wishes.pop("prompt", 256), output=wishes.pop("output", 128)
        ),
        degrees=degrees(heads),
        **wishes,
    )


def plan(content: dict[str, object], gpus: str, **wishes: Any) -> Plan:
    """The advice."""
    return make_plan(ask(content, gpus, **wishes))


def text_of(found: Plan) -> str:
    """All that is said."""
    return "\n".join([*found.reasons, *found.warnings, *found.elsewhere])


def test_a_card_is_known_however_it_is_spelt() -> None:
    for spelt in ("A100-80G", "a100-80gb", "NVIDIA A100 80GB", "A100_80G"):
        assert known_card(spelt) is CARDS["A100-80G"]
    assert known_card("RTX 4090") is known_card("GeForce RTX-4090")
    assert known_card("A100") is None  # of which size?


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80G"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIE-80G"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("H100-80G", "H100"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100-16G"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("L4-24GB", "L4"),
    ],
)
def test_names_of_nvidia_smi_and_of_sellers_are_known(told: str, name: str) -> None:
    assert known_card(told) is CARDS[name]


@pytest.mark.parametrize("told", ["H100-94G", "NVIDIA A100-PCIE-40GB", "A10G", "24G"])
def test_another_size_or_make_is_not_taken_for_a_known_one(told: str) -> None:
    assert known_card(told) is None


def test_an_unknown_card_lists_those_that_are_known() -> None:
    told = str(unknown_card("A100"))
    assert "did you mean A100-40G or A100-80G" in told
    assert "H200" in told
    assert "--card-memory-gb" in told
    assert "did you mean" not in str(unknown_card("Gaudi3"))


@pytest.mark.parametrize(
    "text", ["", "0xL4", "  ", "8x", "-3xL4", "8xL4,4xT4", "1000000xL4"]
)
def test_a_fleet_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"1 to 999,999 and one kind .*8xA100-80G"):
        parse_fleet(text)


def test_a_fleet_is_a_number_and_a_card() -> None:
    assert parse_fleet("8xA100-80G") == (8, "A100-80G")
    assert parse_fleet(" 4 x L4 ") == (4, "L4")
    assert parse_fleet("8\N{MULTIPLICATION SIGN}H100") == (8, "H100")
    assert parse_fleet("0999999xL4") == (999_999, "L4")
    assert parse_fleet("cpu") == (1, "cpu")
    assert parse_fleet("2xRTX 4090") == (2, "RTX 4090")


def test_replicas_stay_within_their_host() -> None:
    fleet = Fleet(card=CARDS["L4"], count=12, per_node=8)
    assert fleet.nodes == 2
    assert fleet.replicas(1) == 12
    assert fleet.replicas(4) == 3
    assert fleet.replicas(8) == 1  # four cards of the second host stay free
    assert fleet.replicas(3) == 3


@pytest.mark.parametrize(
    ("text", "expected"), [("800ms", 800), ("1.5s", 1500), ("800", 800), ("2 S", 2000)]
)
def test_a_target_is_a_time(text: str, expected: float) -> None:
    assert parse_target(text) == expected


@pytest.mark.parametrize("text", ["", "fast", "-1s", "0ms", "nan", "inf"])
def test_a_target_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="800ms or"):
        parse_target(text)


def test_erlang_s_formula_gives_known_values() -> None:
    assert waits(1, 0.7) == pytest.approx(0.7)
    assert waits(2, 1.0) == pytest.approx(1 / 3)
    assert waits(10, 8.0) == pytest.approx(0.4092, abs=1e-4)
    assert waits(3, 3.0) == 1.0
    # M/M/1: P(W > t) = rho * exp(-(1 - rho) t / s).
    wait = wait_quantile(0.99, 1, 0.5, 2.0, 1.0)
    assert 0.5 * math.exp(-0.5 * wait / 2.0) == pytest.approx(0.01)
    assert wait_quantile(0.99, 1, 0.005, 2.0, 1.0) == 0.0
    assert wait_quantile(0.99, 2, 2.5, 2.0, 1.0) == math.inf


def service(running: int = 16, replicas: int = 2, gpus: str = "L4") -> Service:
    replica = Replica(
        shape=read_shape(SMOLLM, "config.json"),
        card=CARDS[gpus],
        weights="int8",
        kv="int8",
        tp=1,
    )
    return Service(
        replica,
        Request(prompt=256, output=128),
        running=running,
        chunk=512,
        replicas=replicas,
    )


def test_company_makes_a_request_slower_and_all_together_faster() -> None:
    lives = [service().life_s(running) for running in (1, 2, 4, 8, 16)]
    assert lives == sorted(lives)
    rates = [service(running).most for running in (1, 2, 4, 8, 16)]
    assert rates == sorted(rates)
    assert service(replicas=4).most == pytest.approx(2 * service(replicas=2).most)


def test_the_99th_percentile_rises_with_the_rate_to_no_end() -> None:
    one = service()
    times = [one.p99_s(part * one.most) for part in (0.05, 0.3, 0.6, 0.9, 0.99)]
    assert times == sorted(times)
    assert times[0] >= one.life_s(1)
    assert one.p99_s(one.most) == math.inf
    target = 1.2 * one.full_s
    found = one.sustained(target)
    assert one.p99_s(found) <= target
    assert one.p99_s(1.05 * found) > target


def test_a_step_is_as_long_as_the_slower_of_reading_and_computing() -> None:
    replica = service().replica
    few, many = replica.step(1, 256), replica.step(0, 0, 2048, 128)
    assert few.memory > few.compute
    assert many.compute > many.memory
    assert few.collective == 0
    split = msgspec.structs.replace(replica, tp=3).step(1, 256)
    assert split.memory < few.memory
    assert split.collective > 60 * CARDS["L4"].link_latency_s


def test_a_small_model_on_one_card() -> None:
    found = plan(SMOLLM, "1xL4", slo_ms=800)
    chosen = found.chosen
    assert chosen is not None
    assert (chosen.tp, chosen.replicas) == (1, 1)
    assert chosen.alone_ms <= 800
    assert chosen.memory.free >= 0
    assert chosen.kv_blocks * 8 >= chosen.running * 384
    assert 1 <= chosen.max_wait_ms <= 40
    assert {one.weights for one in found.refused} <= {
        *("float32", "float16", "bfloat16", "int8", "nf4")
    }
    assert len(found.reasons) >= 7


@pytest.mark.parametrize(
    ("config", "gpus", "running", "most"),
    [
        (SMOLLM, "1xH100", 64, r"sampling on the host, 0\.\d+ ms for each sequence"),
        (SMOLLM, "1xH100", 1, "Python between steps"),
        (LLAMA_8B, "1xA100-80G", 1, "reading weights"),
    ],
)
def test_what_most_of_a_step_is_says_why_more_would_not_help(
    config: dict[str, Any], gpus: str, running: int, most: str
) -> None:
    found = plan(config, gpus, running=running)
    assert found.chosen is not None
    parts = found.chosen.step_parts
    assert found.chosen.step_ms == pytest.approx(1000 * parts.total)
    told = next(one for one in found.reasons if one.startswith("a decode step takes"))
    assert re.search(most, told)


def test_slots_that_are_seldom_taken_do_not_lower_the_rate() -> None:
    wish = {"slo_ms": 5000, "weights": "int8"}
    found = plan(LLAMA_8B, "1xL4", **wish).chosen
    # Four at once keep the target even when all run, and then others queue.
    few = plan(LLAMA_8B, "1xL4", running=4, **wish).chosen
    assert found is not None
    assert few is not None
    assert few.full_ms < 5000 < found.full_ms
    assert found.rate > 3 * few.rate
    for more in (24, 64):
        other = plan(LLAMA_8B, "1xL4", running=more, **wish).chosen
        assert other is not None
        assert other.rate <= 1.03 * found.rate


def test_a_pool_holds_long_requests_where_there_is_room() -> None:
    long = {**LLAMA_8B, "max_position_embeddings": 131_072}
    found = plan(long, "8xA100-80G", slo_ms=800)
    chosen = found.chosen
    assert chosen is not None
    assert chosen.kv_blocks * 8 == chosen.running * 131_072
    small = plan(long, "1xL4", slo_ms=5000).chosen
    assert small is not None
    assert 0 <= small.memory.free < 2**20  # all that the margin leaves
    assert f"of {chosen.kv_blocks * 8 // chosen.running:,} each" in text_of(found)
    host = plan(SMOLLM, "cpu", slo_ms=20_000).chosen
    assert host is not None
    assert host.kv_blocks * 8 >= 8192  # one sequence of its context


def test_old_cards_are_not_advised_bfloat16() -> None:
    reasons = {one.weights: one.reason for one in plan(LLAMA_8B, "2xT4").refused}
    assert "capability 8.0" in reasons["bfloat16"]


def test_a_model_larger_than_a_card_is_split_no_further_than_it_must() -> None:
    found = plan(LLAMA_70B, "8xA100-80G", slo_ms=30_000, weights="bfloat16")
    chosen = found.chosen
    assert chosen is not None
    assert chosen.tp in (2, 4)
    assert chosen.tp * chosen.replicas <= 8
    short = [one for one in found.refused if one.short_bytes]
    assert short
    assert all(one.tp < chosen.tp for one in short)
    assert chosen.memory.weights == pytest.approx(141.1e9 / chosen.tp, rel=0.02)


def test_a_short_target_takes_more_ranks_than_memory_does() -> None:
    slow = plan(LLAMA_70B, "8xH100", slo_ms=60_000, weights="int8").chosen
    fast = plan(LLAMA_70B, "8xH100", slo_ms=4_000, weights="int8").chosen
    assert slow is not None
    assert fast is not None
    assert fast.tp > slow.tp
    assert fast.rate < slow.rate


def test_a_longer_target_never_sustains_less() -> None:
    rates = []
    for slo_ms in (1500.0, 3000.0, 6000.0, 20_000.0):
        chosen = plan(LLAMA_8B, "2xA100-80G", slo_ms=slo_ms, weights="int8").chosen
        rates.append(chosen.rate if chosen else 0.0)
    assert rates == sorted(rates)
    assert rates[-1] > 0


def test_sixteen_bit_checkpoints_are_not_widened_nor_changed() -> None:
    found = plan(LLAMA_8B, "1xA100-80G")
    reasons = {one.weights: one.reason for one in found.refused}
    assert "twice the memory, for nothing" in reasons["float32"]
    assert "may round or overflow" in reasons["float16"]
    assert plan(LLAMA_8B, "1xA100-80G", weights="float32").chosen is not None


def test_a_rate_takes_as_few_cards_as_sustain_it() -> None:
    most = plan(SMOLLM, "8xL4", slo_ms=1500)
    assert most.chosen is not None
    rate = most.chosen.rate / 4
    found = plan(SMOLLM, "8xL4", slo_ms=1500, rate=rate)
    chosen = found.chosen
    assert chosen is not None
    assert chosen.replicas < 8
    assert chosen.rate >= rate
    assert chosen.p99_ms is not None
    assert chosen.p99_ms <= 1500
    assert "stay free" in text_of(found)


def test_a_rate_that_is_too_high_says_how_many_cards_would_do() -> None:
    found = plan(SMOLLM, "1xL4", slo_ms=1500, rate=10_000)
    assert found.chosen is None
    assert "10,000 requests/s are asked" in text_of(found)
    assert "e+0" not in text_of(found)
    assert "such cards would do" in text_of(found)
    assert any("sustains" in one.reason for one in found.refused)


def test_a_target_that_nothing_keeps_is_told_with_the_time_that_it_takes() -> None:
    found = plan(LLAMA_8B, "1xL4", slo_ms=100)
    assert found.chosen is None
    times = [
        one.reason for one in found.refused if "the target is 100 ms" in one.reason
    ]
    assert times
    assert all("a request alone takes about" in one for one in times)
    assert "the quickest, weights nf4, tp 1, takes about" in text_of(found)


def test_too_little_memory_says_what_is_short_and_what_would_fit() -> None:
    with pytest.raises(ModelLoadError) as raised:
        plan(LLAMA_70B, "1xL4")
    told = str(raised.value)
    assert "it does not fit 1 L4: even with weights nf4" in told
    assert "GiB short" in told
    assert "what would fit with weights nf4: " in told
    assert "xL4" in told.partition("what would fit")[2]


def test_too_little_memory_on_a_host_asks_for_a_larger_one() -> None:
    with pytest.raises(ModelLoadError, match=r"a host with \d+.* GiB"):
        plan(LLAMA_70B, "cpu")


def test_a_request_beyond_the_context_is_refused() -> None:
    with pytest.raises(PromptTooLong, match="holds 8192; ask for 808 fewer"):
        plan(SMOLLM, "1xL4", prompt=8000, output=1000)


def test_a_host_takes_one_rank_and_no_precision_that_it_computes_badly() -> None:
    found = plan(SMOLLM, "2xcpu", slo_ms=20_000)
    chosen = found.chosen
    assert chosen is not None
    assert (chosen.tp, chosen.replicas) == (1, 2)
    assert chosen.weights in ("float32", "int8")
    assert "no instructions" in {one.reason for one in found.refused}
    assert "ranks of one host would share its cores" in text_of(found)


def test_heads_that_do_not_divide_call_for_a_pipeline() -> None:
    found = plan(SMOLLM, "8xL4", slo_ms=40, prompt=16, output=16)
    if found.chosen is not None and found.chosen.tp == 1:
        found = plan(SMOLLM, "8xL4", tp=3)
    assert "do not divide by 8" in text_of(found)
    assert "pipeline parallelism" in text_of(found)


def test_weights_that_several_hosts_hold_together_call_for_a_pipeline() -> None:
    large = {
        **LLAMA_70B,
        "hidden_size": 16_384,
        "intermediate_size": 53_248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
    }
    found = plan(large, "16xH100")
    assert found.chosen is not None
    assert found.chosen.weights == "int8"
    assert "weights bfloat16 lack" in text_of(found)
    assert "fit 2 together: pipeline parallelism" in text_of(found)
    assert "pipeline" not in text_of(plan(large, "8xH100"))


def test_a_slow_link_calls_for_a_pipeline() -> None:
    slow = msgspec.structs.replace(CARDS["L4"], link=2e9)
    base = ask(LLAMA_70B, "8xL4", weights="int8", tp=8)
    fleet = msgspec.structs.replace(base.fleet, card=slow)
    found = make_plan(msgspec.structs.replace(base, fleet=fleet))
    assert "waiting for collectives over a link of 2 GB/s" in text_of(found)
    quick = plan(LLAMA_70B, "8xH100", weights="bfloat16", tp=8)
    assert "over a link" not in text_of(quick)


def test_repeated_kv_heads_are_told() -> None:
    few = {**LLAMA_8B, "num_key_value_heads": 2}
    found = plan(few, "8xL4", tp=8)
    assert "each of the 2 KV heads is kept 4 times" in text_of(found)


def test_an_old_card_and_a_new_one_come_with_a_word_of_warning() -> None:
    assert "compute capability 7.5" in text_of(plan(SMOLLM, "1xT4"))
    assert "TensorRT-LLM" in text_of(plan(LLAMA_8B, "1xH100"))
    assert "TensorRT-LLM" not in text_of(plan(LLAMA_8B, "1xA100-80G"))


def test_several_hosts_keep_ranks_together() -> None:
    found = plan(LLAMA_70B, "16xA100-80G", weights="bfloat16")
    chosen = found.chosen
    assert chosen is not None
    assert chosen.tp <= 8
    assert chosen.cards <= 16
    assert "2 hosts" in text_of(found)


def test_memory_parts_add_up_to_the_card() -> None:
    chosen = plan(LLAMA_8B, "4xA10", tp=2, weights="int8").chosen
    assert chosen is not None
    memory = chosen.memory
    parts = (
        *(memory.linear, memory.head, memory.other, memory.kv, memory.activations),
        *(memory.logits, memory.communication, memory.runtime, memory.reserve),
        memory.free,
    )
    assert sum(parts) == memory.device == CARDS["A10"].memory_bytes
    assert memory.communication > 0


def test_more_memory_or_bandwidth_never_serves_less() -> None:
    base = ask(LLAMA_8B, "1xA10", slo_ms=20_000, weights="int8")
    chosen = make_plan(base).chosen
    assert chosen is not None
    for field in ("memory_bytes", "bandwidth"):
        card = base.fleet.card
        better = msgspec.structs.replace(card, **{field: 2 * getattr(card, field)})
        fleet = msgspec.structs.replace(base.fleet, card=better)
        more = make_plan(msgspec.structs.replace(base, fleet=fleet)).chosen
        assert more is not None
        assert more.rate >= 0.95 * chosen.rate, field
