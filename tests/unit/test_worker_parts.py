"""Small parts of the worker: resuming, echoing, the engine's thread, the clock."""

import asyncio
import threading
from collections.abc import Sequence

import msgspec
import pytest
import redis.exceptions
import structlog
import torch
from safetensors.torch import save_file
from support.tiny_models import save_tiny_model
from support.waiting import wait_until
from tokenizers import Tokenizer, decoders, models

from tokenmill.shared.clock import RedisClock
from tokenmill.shared.config import ModelConfig, WorkerConfig
from tokenmill.shared.errors import (
    ConfigError,
    InvalidRequest,
    ModelLoadError,
    ProtocolError,
    RedisUnsuitable,
)
from tokenmill.shared.messages import (
    Delta,
    End,
    FinishReason,
    JobClass,
    JobRequest,
    Sampling,
    encode,
)
from tokenmill.shared.outage import Backoff
from tokenmill.shared.scripts import Started
from tokenmill.shared.tokens import (
    collect_tokenizer,
    ids_to_bytes,
    pack_tokenizer,
)
from tokenmill.workers import loading, runner_loading
from tokenmill.workers.echo import EchoEngine
from tokenmill.workers.engine.adapters.source import AdapterStats
from tokenmill.workers.engine.request import (
    Capacity,
    Emitted,
    EngineRequest,
    StepOutput,
)
from tokenmill.workers.engine_thread import EngineThread, Fault, Refused, Report
from tokenmill.workers.extras import model_stack
from tokenmill.workers.loading import load
from tokenmill.workers.outage import is_refusal
from tokenmill.workers.registration import counters
from tokenmill.workers.resume import completed, engine_request, read_request
from tokenmill.workers.service import _say_ready


def started(*log: Delta, payload: bytes = b"{}", **fields: object) -> Started:
    return Started(
        **{
            "status": "started",
            "job_id": "m.0.x",
            "epoch": 3,
            "payload": payload,
            "token_ids": ids_to_bytes([1, 2, 3]),
            "log": tuple(encode(delta) for delta in log),
            "job_class": "bulk",
            "seed": 7,
            **fields,
        }
    )


def request(text: str = "abc", **sampling: object) -> EngineRequest:
    return EngineRequest(
        id="r",
        token_ids=tuple(text.encode()),
        sampling=Sampling(**sampling),
        seed=0,
    )


# --- resuming ----------------------------------------------------------------------
def test_the_engine_gets_exact_ids_seed_and_epoch() -> None:
    built = engine_request(started(), JobRequest())
    assert built.id == "m.0.x@3"
    assert built.token_ids == (1, 2, 3)
    assert built.seed == 7
    assert built.emitted == ()


def test_only_jobs_of_one_tenant_share_cached_prefixes() -> None:
    built = engine_request(started(tenant="acme"), JobRequest())
    assert built.cache_salt == "acme"


def test_counters_say_all_that_the_engine_counts() -> None:
    room = Capacity(
        total_blocks=100, free_blocks=60, max_running=8, num_running=2,
        prefill_backlog=3, cached_blocks=20, allocated_tokens=320, used_tokens=310,
        preemptions=1, prefix_tokens_asked=50, prefix_tokens_hit=40, out_of_memory=2,
    )  # fmt: skip
    stats = AdapterStats(loaded=2, leased=1, bytes=9, budget=9, loads=5, evictions=3)
    counted = msgspec.structs.asdict(counters(room, stats))
    assert counted.pop("pool_blocks") == 100
    adapters = ("adapters", "adapter_loads", "adapter_evictions")
    assert [counted.pop(name) for name in adapters] == [2, 5, 3]
    assert counted == {name: getattr(room, name) for name in counted}


def test_earlier_output_is_joined_by_choice() -> None:
    log = [
        Delta(choice=0, offset=0, token_ids=(5,), text="a"),
        Delta(choice=1, offset=0, token_ids=(6, 7), text="bc"),
        Delta(choice=0, offset=1, token_ids=(8,), text="d", finish_reason="stop"),
        Delta(end=End(state="succeeded")),
    ]
    built = engine_request(started(*log), JobRequest(sampling=Sampling(n=3)))
    assert built.emitted == (
        Emitted((5, 8), "ad", None, FinishReason.STOP),
        Emitted((6, 7), "bc"),
        Emitted(),
    )
    assert completed(built) is None


def test_what_follows_a_gap_is_made_again() -> None:
    log = [
        Delta(offset=0, token_ids=(5,), text="a"),
        Delta(offset=4, token_ids=(9,), text="z", finish_reason="stop"),
    ]
    (emitted,) = engine_request(started(*log), JobRequest()).emitted
    assert emitted == Emitted((5,), "a")


def test_a_complete_log_needs_no_engine() -> None:
    log = [Delta(offset=0, token_ids=(5,), text="a", finish_reason="length")]
    (choice,) = completed(engine_request(started(*log), JobRequest()))
    assert (choice.text, choice.finish_reason) == ("a", FinishReason.LENGTH)


@pytest.mark.parametrize("raw", [b"", b"abc"])
def test_damaged_token_ids_are_said(raw) -> None:
    with pytest.raises(ProtocolError, match="prompt token ids"):
        engine_request(started(token_ids=raw), JobRequest())


def test_a_later_version_of_a_request_is_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match="schema version 9"):
        read_request(started(payload=b'{"v": 9, "text": "x"}'))


def test_a_wrong_field_of_a_request_is_named() -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_request(started(payload=b'{"text": 5}'))
    assert caught.value.field == "text"


# --- echo --------------------------------------------------------------------------
def test_echo_answers_with_the_prompt_in_one_step() -> None:
    engine = EchoEngine()
    engine.add(request("abc", n=2))
    output = engine.step()
    assert [delta.text for delta in output.deltas] == ["abc", "abc"]
    assert output.finished[0].choices[0].finish_reason is FinishReason.STOP
    assert not engine.has_work


def test_echo_stops_at_max_tokens_and_goes_round_on_request() -> None:
    engine = EchoEngine()
    engine.add(request("abc", max_tokens=7, ignore_eos=True))
    (choice,) = engine.step().finished[0].choices
    assert (choice.text, choice.finish_reason) == ("abcabca", FinishReason.LENGTH)


def test_echo_holds_back_half_a_character_and_resumes_in_it() -> None:
    slept: list[float] = []
    engine = EchoEngine(step_s=0.5, sleep=slept.append)
    engine.add(request("ä!"))
    first = engine.step().deltas[0]
    assert (first.text, len(first.token_ids)) == ("", 1)
    resumed = EchoEngine()
    resumed.add(
        EngineRequest(
            id="r",
            token_ids=tuple("ä!".encode()),
            sampling=Sampling(),
            seed=0,
            emitted=(Emitted(first.token_ids, ""),),
        )
    )
    (delta,) = resumed.step().deltas
    assert (delta.offset, delta.text) == (1, "ä!")
    assert slept == [0.5]


def test_echo_runs_interactive_requests_before_bulk() -> None:
    engine = EchoEngine(max_running=1, step_s=0.5, sleep=lambda _: None)
    bulk = msgspec.structs.replace(request("bulk"), id="b", job_class=JobClass.BULK)
    engine.add(bulk)
    assert engine.step().deltas[0].request_id == "b"
    engine.add(msgspec.structs.replace(request("now"), id="i"))
    names = []
    while engine.has_work:
        names += [delta.request_id for delta in engine.step().deltas]
    assert names == ["i"] * 3 + ["b"] * 3


def test_echo_is_named_on_the_command_line() -> None:
    assert EchoEngine.from_name("echo:20", 4).capacity().step_fit_ms == (20.0, 0.0)
    with pytest.raises(ConfigError, match="expected echo or echo:<ms"):
        EchoEngine.from_name("echo:fast", 4)
    with pytest.raises(ConfigError, match="expected model, echo"):
        load("tape", ModelConfig(), WorkerConfig())


# --- the engine's thread -----------------------------------------------------------
class Scripted(EchoEngine):
    """An engine whose steps and cancels can be made to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.fail_steps = 0
        self.broken = False
        self.threads: set[int] = set()

    def step(self) -> StepOutput:
        self.threads.add(threading.get_ident())
        if self.fail_steps:
            self.fail_steps -= 1
            raise RuntimeError("no")
        return super().step()

    def check_integrity(self) -> None:
        if self.broken:
            raise AssertionError("a block is missing")


class Driver:
    def __init__(self, engine: Scripted) -> None:
        self.reports: list[Report] = []
        self.thread = EngineThread(engine, self._take, asyncio.get_running_loop())
        self.thread.start()

    def _take(self, reports: Sequence[Report]) -> None:
        self.reports += reports


@pytest.fixture
async def drive():
    drivers: list[Driver] = []

    def start(engine: Scripted) -> Driver:
        drivers.append(Driver(engine))
        return drivers[-1]

    yield start
    for driver in drivers:
        assert driver.thread.stop(60)


async def test_steps_run_in_one_other_thread(drive) -> None:
    engine = Scripted()
    driver = drive(engine)
    driver.thread.add([request()])
    await wait_until(lambda: driver.reports)
    assert driver.reports[0].finished[0].request_id == "r"
    assert engine.threads
    assert threading.get_ident() not in engine.threads


async def test_a_refused_request_is_reported_alone(drive) -> None:
    driver = drive(Scripted())
    bad = EngineRequest(id="bad", token_ids=(), sampling=Sampling(), seed=0)
    driver.thread.add([bad, request()])
    await wait_until(lambda: len(driver.reports) == 2)
    refused, output = driver.reports
    assert isinstance(refused, Refused)
    assert refused.error.code == "invalid_request"
    assert refused.error.field == "prompt"
    assert output.finished[0].request_id == "r"


async def test_a_failed_step_empties_the_engine_and_goes_on(drive) -> None:
    engine = Scripted()
    engine.fail_steps = 1
    driver = drive(engine)
    driver.thread.add([request()])
    await wait_until(lambda: driver.reports)
    (fault,) = driver.reports
    assert isinstance(fault, Fault)
    assert (fault.engine_ids, fault.fatal) == (("r",), False)
    driver.thread.add([request()])
    await wait_until(lambda: len(driver.reports) == 2)
    assert driver.reports[1].finished


async def test_accounts_that_do_not_add_up_are_fatal(drive) -> None:
    engine = Scripted()
    engine.fail_steps, engine.broken = 1, True
    driver = drive(engine)
    driver.thread.add([request()])
    await wait_until(lambda: driver.reports)
    assert driver.reports[0].fatal


async def test_a_paused_engine_takes_cancels_but_makes_no_steps(drive) -> None:
    engine = Scripted()
    driver = drive(engine)
    driver.thread.pause(True)
    driver.thread.add([request()])
    await wait_until(lambda: driver.thread.capacity.num_running == 1)
    assert not engine.threads
    driver.thread.cancel(["r"])
    await wait_until(lambda: driver.thread.capacity.num_running == 0)
    driver.thread.pause(False)
    driver.thread.add([request()])
    await wait_until(lambda: driver.reports)


# --- clock and back-off ------------------------------------------------------------
def test_the_clock_follows_redis_not_this_host() -> None:
    now_s = 100.0
    clock = RedisClock(lambda: now_s)
    clock.observe(5_000)
    now_s = 101.5
    assert clock.now_ms() == 6_500


def test_waits_grow_to_a_bound_and_start_again() -> None:
    backoff = Backoff(first_s=1.0, longest_s=4.0)
    waits = [backoff.next_s() for _ in range(50)]
    assert all(0.5 <= wait <= 4.0 for wait in waits)
    assert max(waits) > 2.0
    assert waits[0] <= 1.0
    backoff.reset()
    assert backoff.next_s() <= 1.0


def test_a_full_server_passes_a_wrong_type_does_not() -> None:
    assert not is_refusal(redis.exceptions.ConnectionError("gone"))
    assert not is_refusal(redis.exceptions.OutOfMemoryError("full"))
    assert not is_refusal(redis.exceptions.ResponseError("MISCONF no disk"))
    assert not is_refusal(redis.exceptions.ResponseError("BUSY script"))
    assert is_refusal(redis.exceptions.ResponseError("WRONGTYPE"))
    wrapped = RedisUnsuitable("refused")
    wrapped.__cause__ = redis.exceptions.ResponseError("WRONGTYPE")
    assert is_refusal(wrapped)


def test_a_missing_model_stack_names_the_extra() -> None:
    with pytest.raises(ModelLoadError, match=r"tokenmill\[worker\]"), model_stack():
        import no_such_package_of_ours  # noqa: F401


def test_the_ready_line_names_device_and_kernels():
    loaded = load("echo", ModelConfig(name="echo"), WorkerConfig())
    loaded = msgspec.structs.replace(loaded, kernels="c++/avx2", device="cuda:0")
    with structlog.testing.capture_logs() as lines:
        _say_ready(loaded)
    named = [(line["device"], line["kernels"]) for line in lines]
    assert named == [("cuda:0", "c++/avx2")]


def test_a_model_names_the_device_that_it_is_on(tmp_path) -> None:
    path = save_tiny_model("llama", tmp_path)
    model = ModelConfig(name="tiny", path=str(path))
    worker = WorkerConfig(num_blocks=16, threads=1, device="cpu")
    assert load("model", model, worker).device == "cpu"


def test_the_tokenizer_is_told_before_the_weights_are_read(
    tmp_path, monkeypatch
) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    seen: list[object] = []

    def weights(*_: object) -> None:
        seen.append("weights")
        raise ModelLoadError("stop here")

    monkeypatch.setattr(runner_loading, "load_model_runner", weights)
    with pytest.raises(ModelLoadError, match="stop here"):
        load(
            loading.REAL,
            ModelConfig(name="m", path=str(tmp_path)),
            WorkerConfig(),
            on_tokenizer=lambda *told: seen.append(told),
        )
    fingerprint, bundle = pack_tokenizer(collect_tokenizer(tmp_path))
    assert seen == [(fingerprint, bundle), "weights"]
