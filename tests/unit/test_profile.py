"""`--profile`: nothing when off, the same tokens when on, and regressions found."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from support.tiny_models import save_tiny_model
from typer.testing import CliRunner

from tokenmill.__main__ import build_app
from tokenmill.shared.config import Config, ModelConfig, WorkerConfig
from tokenmill.shared.errors import ConfigError, InvalidRequest
from tokenmill.shared.messages import Sampling
from tokenmill.shared.pool.plan import PoolOptions, plan_children
from tokenmill.workers.engine.engine import Engine
from tokenmill.workers.engine.kernels import backends
from tokenmill.workers.engine.model.runner import TransformersRunner
from tokenmill.workers.engine.profiling.recorder import DETAIL_EVERY, Recorder
from tokenmill.workers.engine.profiling.timed import TimedBackend, time_kernels
from tokenmill.workers.engine.request import EngineRequest
from tokenmill.workers.loading import load
from tokenmill.workers.profile_compare import changes, differences
from tokenmill.workers.profile_reading import Profile, read_profile
from tokenmill.workers.profiling import profile_file


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def kernels_put_back() -> Iterator[None]:
    before = backends.backend()
    yield
    backends.surround(lambda _: before)


def make(model: Path, profile: Path | None) -> Any:
    worker = WorkerConfig(num_blocks=200, threads=1, device="cpu")
    settings = ModelConfig(name="tiny", path=str(model))
    return load("model", settings, worker, profile=profile).engine


def outputs(engine: Any) -> dict[str, list[int]]:
    for number in range(4):
        sampling = Sampling(max_tokens=30, ignore_eos=True, temperature=0.8)
        prompt = tuple(range(30, 50 + number))
        engine.add(
            EngineRequest(
                id=str(number), token_ids=prompt, sampling=sampling, seed=number
            )
        )
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for delta in engine.step().deltas:
            found.setdefault(delta.request_id, []).extend(delta.token_ids)
    return found


def test_off_it_leaves_engine_runner_and_kernels_as_they_are(model: Path) -> None:
    engine = make(model, None)
    assert type(engine) is Engine
    assert type(engine._runner) is TransformersRunner
    assert "step" not in vars(engine)
    assert not isinstance(backends.backend(), TimedBackend)


def test_on_it_gives_the_same_tokens_and_times_that_add_up(
    model: Path, tmp_path: Path
) -> None:
    plain = outputs(make(model, None))
    path = tmp_path / "new" / "one.trace.json"
    engine = make(model, path)
    assert isinstance(backends.backend(), TimedBackend)
    assert outputs(engine) == plain
    engine._recorder.close()
    first, *lines = path.read_text().splitlines()
    events = [json.loads(line.removesuffix(",")) for line in lines]
    assert first == "["
    assert all({"name", "ph", "pid", "tid"} <= set(event) for event in events)
    assert events[0]["args"]["kernels"] == backends.backend().name
    spans: list[dict[str, Any]] = []
    detailed = 0
    for event in events[2:]:
        if event["cat"] != "step":
            spans.append(event)
            continue
        ends = [span["ts"] + span["dur"] for span in spans]
        assert event["ts"] <= min(span["ts"] for span in spans)
        assert max(ends) <= event["ts"] + event["dur"] + 0.001
        phases = [span for span in spans if span["cat"] == "phase"]
        names = [span["name"] for span in phases]
        assert names == ["plan", "model", "sampling", "deliver"]
        assert sum(span["dur"] for span in phases) <= event["dur"]
        kernels = {span["name"].split()[0] for span in spans if span["cat"] == "kernel"}
        if event["args"]["detail"]:
            detailed += 1
            wanted = {"linear", "attention", "kv_write", "rms_norm", "rotate"}
            assert wanted <= kernels
            (whole,) = [span["dur"] for span in phases if span["name"] == "model"]
            parts = [span["dur"] for span in spans if span["cat"] == "kernel"]
            assert sum(parts) <= whole
        else:
            assert not kernels
        spans.clear()
    found = read_profile(path)
    assert detailed == (found.steps + detailed) // DETAIL_EVERY > 1
    assert {timing.part for timing in found.timings} == {
        *("step", "phase", "model", "kernel")
    }
    rows = [t for t in found.timings if (t.part, t.kind) == ("model", "decode")]
    assert {t.name for t in rows} == {
        *("linear", "attention", "small operations", "(the rest)")
    }


def test_kernels_of_a_gpu_are_timed_in_detailed_steps_alone(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "gpu.trace.json", {"model": "m"})
    calls: list[str] = []
    ops = SimpleNamespace(
        linear=lambda *_: calls.append("linear"),
        kv_write=lambda *_: calls.append("kv_write"),
        paged_attention=lambda *_, **__: calls.append("attention"),
    )
    target = SimpleNamespace(is_accelerator=True, ops=ops)
    time_kernels(SimpleNamespace(target=target), recorder)  # type: ignore[arg-type]
    for _ in range(DETAIL_EVERY):
        recorder.begin()
        ops.linear(1)
        ops.paged_attention(1, scale=2)
        recorder.end(tokens=1, sequences=1)
    recorder.close()
    assert calls == ["linear", "attention"] * DETAIL_EVERY
    kernels = [t for t in read_profile(recorder.path).timings if t.part == "kernel"]
    assert {t.name: t.calls for t in kernels} == {"linear": 1, "attention": 1}


def test_a_full_disk_ends_the_profile_and_no_step(tmp_path: Path) -> None:
    full = tmp_path / "full.trace.json"
    full.symlink_to("/dev/full")
    recorder = Recorder(full, {"model": "m"})
    with structlog.testing.capture_logs() as logs:
        for _ in range(2 * DETAIL_EVERY):
            recorder.begin()
            with recorder.phase("plan"):
                pass
            recorder.end(tokens=1, sequences=1)
            assert not recorder.detail  # nor is any slower from now on
        recorder.close()
    (line,) = logs
    assert (line["event"], line["log_level"]) == ("profile_stopped", "warning")
    assert "No space left" in line["error"]


def test_a_disk_that_is_full_at_the_end_ends_nothing(tmp_path: Path) -> None:
    full = tmp_path / "full.trace.json"
    full.symlink_to("/dev/full")
    with structlog.testing.capture_logs() as logs:
        Recorder(full, {"model": "m"}).close()
    assert [line["event"] for line in logs] == ["profile_stopped"]


# --- reading and comparing ---------------------------------------------------------
def written(
    path: Path, *, factor: float = 1.0, steps: int = 400, tokens: int = 4
) -> Path:
    """A profile in which attention takes `factor` as long as usual."""
    draw = random.Random(1)
    lines = ['{"name":"tokenmill","ph":"M","args":{"model":"m","host":"h"}}']
    for step in range(steps):
        detail = step % DETAIL_EVERY == DETAIL_EVERY - 1
        noise = draw.uniform(0.9, 1.1)
        attention = 1000 * factor * noise
        parts = [("phase", "plan", 50.0), ("phase", "model", attention + 3000 * noise)]
        if detail:
            parts += [("kernel", "attention", attention)]
            parts += [("kernel", "linear 8x8", 3000 * noise)]
        parts.append(("step", "step", sum(p[2] for p in parts if p[0] == "phase")))
        for kind, name, took in parts:
            event = {"name": name, "cat": kind, "ph": "X", "ts": 0, "dur": took}
            if kind == "step":
                event["args"] = {"tokens": tokens, "sequences": 4, "detail": detail}
            lines.append(json.dumps(event))
    path.write_text("[\n" + ",\n".join(lines) + ",\n")
    return path


@pytest.fixture
def usual(tmp_path: Path) -> Profile:
    return read_profile(written(tmp_path / "usual.json"))


def verdicts(now: Profile, before: Profile) -> dict[str, str]:
    return {f"{c.now.part} {c.now.name}": c.verdict for c in changes(now, before, 0.1)}


def test_a_slower_kernel_is_found_and_nothing_else_accused(
    usual: Profile, tmp_path: Path
) -> None:
    slow = read_profile(written(tmp_path / "slow.json", factor=1.5))
    found = verdicts(slow, usual)
    assert found["kernel attention"] == found["model attention"] == "slower"
    assert found["step step"] == found["phase model"] == "slower"
    assert found["kernel linear 8x8"] == found["phase plan"] == "same"
    assert verdicts(usual, slow)["kernel attention"] == "faster"
    assert set(verdicts(usual, usual).values()) == {"same"}


def test_few_steps_convict_nobody_and_other_loads_are_named(
    usual: Profile, tmp_path: Path
) -> None:
    few = read_profile(written(tmp_path / "few.json", factor=1.5, steps=9))
    assert verdicts(few, usual)["kernel attention"] == "unsure"
    other = read_profile(written(tmp_path / "other.json", tokens=40))
    assert differences(usual, usual) == []
    assert other.mean_tokens == {"prefill": 40.0}
    changed = Profile(
        facts={"model": "m", "host": "elsewhere"},
        steps=1,
        mean_tokens={"decode": 9.0},
        timings=(),
    )
    assert differences(changed, usual) == [
        "host: elsewhere now, h before",
        "decode steps had 9.0 tokens now, 4.0 before",
    ]


def test_a_file_that_was_cut_off_is_read_up_to_its_last_step(tmp_path: Path) -> None:
    path = written(tmp_path / "cut.json", steps=20)
    whole = read_profile(path).steps
    path.write_bytes(path.read_bytes()[:-40])
    assert read_profile(path).steps == whole - 1


@pytest.mark.parametrize(
    "content", ["", "{}", "[\n", "[\nno json\n", '[\n{"name":"x"}\n', "\xff"]
)
def test_what_is_no_profile_is_said_so(tmp_path: Path, content: str) -> None:
    path = tmp_path / "odd.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(InvalidRequest, match=r"odd\.json"):
        read_profile(path)


def test_the_command_shows_compares_and_ends_with_one(tmp_path: Path) -> None:
    usual = str(written(tmp_path / "usual.json"))
    slow = str(written(tmp_path / "slow.json", factor=1.5))
    run, app = CliRunner().invoke, build_app()
    shown = run(app, ["profile", "show", usual])
    assert shown.exit_code == 0
    assert "Phases of a step" in shown.stdout
    assert run(app, ["profile", "show", usual, "--against", usual]).exit_code == 0
    worse = run(app, ["profile", "show", slow, "--against", usual])
    assert worse.exit_code == 1
    assert "SLOWER" in worse.stdout
    assert "slower: step (decode), model (decode)" in worse.stdout
    same = json.loads(run(app, ["profile", "show", usual, "--json"]).stdout)
    assert same["mean_tokens"] == {"decode": 4.0}


# --- where it goes -------------------------------------------------------------------
def test_a_profile_is_never_overwritten_and_a_directory_takes_many(
    tmp_path: Path,
) -> None:
    path = tmp_path / "one.json"
    assert profile_file(path) == path
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is there already"):
        profile_file(path)
    first, second = profile_file(tmp_path), profile_file(tmp_path)
    assert first != second
    assert first.parent == tmp_path
    assert profile_file(tmp_path / "fresh").parent == tmp_path / "fresh"


def test_an_engine_without_kernels_refuses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no kernels"):
        load("echo", ModelConfig(), WorkerConfig(), profile=tmp_path)


def test_up_hands_the_directory_to_its_workers(tmp_path: Path) -> None:
    options = PoolOptions(profile=tmp_path)
    children = plan_children(options, Config(), "redis://host", console=False)
    (worker,) = [one for one in children if one.name == "worker-0"]
    assert worker.command[worker.command.index("--profile") + 1] == str(tmp_path)
    assert all("--profile" not in one.command for one in children if one != worker)
