"""The engine benchmark's own logic: peers found, output parsed, ratios, gaps, waste."""

import argparse

import pytest
from support.bench_modules import bench_module
from support.fake_runner import FakeRunner

from tokenmill.workers.engine.detokenizer import TokenTable
from tokenmill.workers.engine.engine import Engine

compare = bench_module("engine_compare")
engine = bench_module("engine")
llama = bench_module("engine_llama")
ours = bench_module("engine_ours")
pacing = bench_module("pacing")
prefix = bench_module("prefix")
rates = bench_module("engine_rates")
vllm = bench_module("engine_vllm")
workload = bench_module("engine_workload")

BATCHED_BENCH = """
build: 1 (abc)
{"n_kv_max": 4096, "pp": 128, "tg": 64, "pl": 1, "speed_pp": 360.5, "speed_tg": 75.25}
{"n_kv_max": 4096, "pp": 128, "tg": 64, "pl": 16, "speed_pp": 371.0, "speed_tg": 210.0}
{"something": "else"}
llama_perf: 12 ms
"""


def test_rows_of_batched_bench_are_found_among_other_lines():
    rows = llama.parse_batched_bench(BATCHED_BENCH)
    assert [(row["pl"], row["speed_tg"]) for row in rows] == [(1, 75.25), (16, 210.0)]
    assert rows[0]["speed_pp"] == 360.5


def test_the_best_of_equally_many_tries_is_compared():
    mixed = {
        "tokenmill": [{"output_tokens_per_s": 160.0}, {"output_tokens_per_s": 200.0}],
        "llama.cpp": [{"output_tokens_per_s": 80.0}, {"output_tokens_per_s": 70.0}],
        "hf-static": [{"output_tokens_per_s": 16.0}],
    }
    found = {one.against: one for one in compare.compare_all(mixed, {})}
    assert set(found) == {"llama.cpp", "hf-static"}  # vLLM and the rates did not run
    assert found["llama.cpp"].ratio == pytest.approx(2.5)
    assert found["llama.cpp"].tries == 2
    assert found["llama.cpp"].met
    # One try of theirs is held against one of ours, not against our better one.
    assert found["hf-static"].ratio == pytest.approx(10.0)


def test_a_missed_target_is_said():
    tried = {"decode_1": 80.0, "decode_8": 300.0, "decode_16": 400.0, "prefill": 700.0}
    theirs = {"decode_1": 75.0, "decode_8": 165.0, "decode_16": 210.0, "prefill": 360.0}
    found = compare.compare_all({}, {"tokenmill": [tried], "llama.cpp": [theirs]})
    assert {one.what: one.met for one in found} == {
        "decode, batch 1": False,
        "decode, batch 8": True,
        "decode, batch 16": True,
        "prefill": True,
    }


def options(against: str, **given):
    rest = {"device": "cpu", "llama_cpp": None, "vllm_python": None} | given
    return argparse.Namespace(against=against, **rest)


def test_peers_that_are_missing_are_named(monkeypatch, tmp_path):
    monkeypatch.delenv(llama.VARIABLE, raising=False)
    monkeypatch.delenv(vllm.VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert engine.find_peers(options("auto")).missing == ("llama.cpp", "vllm")
    assert engine.find_peers(options("hf-static")).missing == ()
    assert not engine.find_peers(options("none")).static
    with pytest.raises(SystemExit, match="knows"):
        engine.find_peers(options("llama"))
    with pytest.raises(SystemExit, match="llama-server"):
        engine.find_peers(options("auto", llama_cpp=tmp_path))
    with pytest.raises(SystemExit, match="vllm"):
        engine.find_peers(options("auto", vllm_python=tmp_path / "python"))


def test_llama_cpp_is_found_in_a_build_directory(tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in llama.PROGRAMS:
        (programs / name).touch()
    assert engine.find_peers(options("auto", llama_cpp=tmp_path)).llama == programs


def test_the_source_of_llama_cpp_is_named_by_its_build(tmp_path, monkeypatch):
    source_of = bench_module("peers.make_q8_0").source_of
    monkeypatch.delenv("TOKENMILL_BENCH_LLAMA_CPP_SOURCE", raising=False)
    with pytest.raises(SystemExit, match="LLAMA_CPP_SOURCE"):
        source_of(tmp_path / "bin")
    (tmp_path / "CMakeCache.txt").write_text("CMAKE_HOME_DIRECTORY:INTERNAL=/src/x\n")
    assert str(source_of(tmp_path / "bin")) == "/src/x"


def test_computed_padding_is_a_problem():
    good, bad = {"gemm_rows": 7, "scheduled_tokens": 7}, {"gemm_rows": 9}
    assert engine.problems_of([good]) == []
    assert engine.problems_of([good, bad | good | bad]) == [
        "9 rows went through the first linear layer, but 7 tokens were scheduled"
    ]


def fake() -> FakeRunner:
    return FakeRunner(num_blocks=400, max_context=400)


def test_the_workload_runs_and_its_waste_is_counted():
    clock = ours.StepClock(fake())
    made = Engine(clock, TokenTable.for_bytes())
    for request in ours.requests_of(rates.prompts(list(range(90)), 3, 30, 5)):
        made.add(request)
    books = ours.KVBooks()
    tokens = ours.drain(made, books)
    assert {name: len(ids) for name, ids in tokens.items()} == dict.fromkeys(
        ("p0", "p1", "p2"), 5
    )
    assert clock.prefill_tokens == 90
    assert clock.decode_rows == 3 * 4
    # Blocks of 4 hold 30 to 34 tokens of each sequence: at most 36 slots.
    assert books.most_allocated == 3 * 36
    assert 0.0 < books.waste < 0.15


def test_decode_is_timed_over_full_steps_alone():
    clock = ours.StepClock(fake())
    items = rates.prompts(list(range(96)), 4, 24, 200)
    whole, inside = rates._decode(clock, TokenTable.for_bytes(), items, steps=6)
    assert 0.0 < inside <= whole
    assert clock.decode_rows == 24


def test_the_prefix_bench_shares_its_instruction():
    items = prefix.items_of(list(range(90)), prompts=4, shared=40, own=10, output=3)
    assert {item.token_ids[:40] for item in items} == {tuple(range(40))}
    assert len({item.token_ids[40:] for item in items}) == 4
    table = TokenTable.for_bytes()
    _, without, none = prefix._once(fake(), table, items, cache=False)
    _, cached, hits = prefix._once(fake(), table, items, cache=True)
    assert none == 0.0
    assert hits > 0.5
    assert cached == without


def test_gaps_are_those_of_the_running_sequences():
    made = pacing._engine(fake(), TokenTable.for_bytes(), 2, paced=True)
    text = [n % 90 for n in range(400)]
    shape = {"running": 2, "long": 100, "arrivals": 2, "quiet_steps": 5}
    figures = pacing._measure(made, text, **shape)
    assert figures["prefill_ms"] > 0.0
    assert figures["quiet_p50_ms"] <= figures["quiet_p99_ms"] <= figures["quiet_max_ms"]


def test_p99_of_busy_gaps_is_held_against_that_of_quiet_ones():
    figures = pacing.summary([10.0] * 99 + [20.0], [15.0] * 50 + [30.0] * 50)
    assert figures["quiet_p99_ms"] == 10.0
    assert figures["busy_p50_ms"] == 15.0
    assert figures["p99_ratio"] == 3.0
