"""Errors of commands: one line, a documented exit code, JSON on request."""

import json

import pytest
import typer
from support.waiting import loop_turns
from typer.testing import CliRunner

from tokenmill.shared.cli_support import EXIT_UNEXPECTED, handle_errors
from tokenmill.shared.errors import (
    ConfigError,
    InvalidRequest,
    JobCancelled,
    JobFailed,
    QueueFull,
    TokenmillError,
)
from tokenmill.shared.pool.cli import register


def run(command, *, as_json: bool = False):
    with pytest.raises(SystemExit) as caught:
        handle_errors(command)(as_json=as_json)
    return caught.value.code


def raising(error: BaseException):
    def command(as_json: bool = False) -> None:
        raise error

    return command


def test_our_errors_have_their_own_codes(capsys) -> None:
    assert run(raising(InvalidRequest("temperature", "value -1"))) == 4
    assert capsys.readouterr().err == "error: temperature: value -1\n"
    assert run(raising(QueueFull("full", 2.0))) == 6


def test_errors_are_json_on_request(capsys) -> None:
    error = ConfigError("worker.lease_ms", "value 1", "a.toml")
    assert run(raising(error), as_json=True) == 2
    body = json.loads(capsys.readouterr().err)["error"]
    assert body["code"] == "invalid_config"
    assert body["field"] == "worker.lease_ms"
    assert "a.toml" in body["message"]


@pytest.mark.parametrize(
    ("recorded", "code", "exit_code"),
    [
        ("prompt_too_long", "prompt_too_long", 4),
        ("control_tokens_in_text", "control_tokens_in_text", 4),
        ("kv_pool_exhausted", "kv_pool_exhausted", 15),
        ("internal_error", "internal_error", 9),
        ("of_a_later_version", "of_a_later_version", 9),
    ],
)
def test_a_failed_job_has_the_code_of_its_recorded_error(
    capsys, recorded, code, exit_code
) -> None:
    class Nameless(TokenmillError):
        """An error within one process has the code of all: it stands for no kind."""

    error = JobFailed("m.0.x", recorded, "text: too long", "text")
    assert run(raising(error), as_json=True) == exit_code
    body = json.loads(capsys.readouterr().err)["error"]
    assert (body["code"], body["field"]) == (code, "text")


def test_a_cancelled_job_has_a_code_of_its_own(capsys) -> None:
    error = JobCancelled("m.0.x", "engine_error", "cancelled on request")
    assert run(raising(error), as_json=True) == 10
    assert json.loads(capsys.readouterr().err)["error"]["code"] == "job_cancelled"


def test_an_interrupt_is_130_and_silent(capsys) -> None:
    assert run(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""


def test_the_unexpected_is_70_with_a_traceback_only_on_request(
    capsys, monkeypatch
) -> None:
    monkeypatch.delenv("TOKENMILL_DEBUG", raising=False)
    assert run(raising(RuntimeError("odd"))) == EXIT_UNEXPECTED
    shown = capsys.readouterr().err
    assert "RuntimeError: odd" in shown
    assert "Traceback" not in shown
    monkeypatch.setenv("TOKENMILL_DEBUG", "1")
    run(raising(RuntimeError("odd")))
    assert "Traceback" in capsys.readouterr().err


def test_coroutines_are_run() -> None:
    async def command() -> str:
        await loop_turns()
        return "done"

    assert handle_errors(command)() == "done"


def test_config_show_prints_value_and_origin(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKENMILL_WORKER_EMIT_MS", "12")
    app = typer.Typer()
    register(app)
    result = CliRunner().invoke(app, ["config", "show", "--json"])
    assert result.exit_code == 0
    rows = {row["key"]: row for row in json.loads(result.stdout)}
    assert rows["worker.emit_ms"] == {
        "key": "worker.emit_ms",
        "value": 12,
        "origin": "TOKENMILL_WORKER_EMIT_MS",
    }
    assert rows["log.level"]["origin"] == "default"
    plain = CliRunner().invoke(app, ["config", "show"])
    assert "TOKENMILL_WORKER_EMIT_MS" in plain.stdout
