"""What a bulk command shows while it runs and says at its end."""

import io
import json
import re

import msgspec
import pytest
from rich.console import Console

from tokenmill.producer.bulk import progress as progress_module
from tokenmill.producer.bulk.cli_report import lines_of, tell, told
from tokenmill.producer.bulk.flow import Progress, Report
from tokenmill.producer.bulk.progress import (
    Display,
    JsonLines,
    PlainLines,
    Terminal,
    display_for,
    line_of,
)
from tokenmill.producer.bulk.rates import Rates
from tokenmill.producer.bulk.working import Ended
from tokenmill.shared.bulk.messages import RunSpec, RunView
from tokenmill.shared.errors import (
    BulkItemsFailed,
    BulkRunCancelled,
    RedisUnavailable,
)

NOW = Progress(
    run="abcdefghij",
    elapsed_s=75.0,
    total=40,
    succeeded=10,
    failed=2,
    in_flight=28,
    eta_s=3661.0,
    tokens_per_s=123.4,
    view=RunView(
        run="abcdefghij",
        spec=RunSpec(kind="summarize"),
        state="open",
        windows=90,
        jobs=33,
    ),
)
REPORT = Report(
    run="abcdefghij",
    state="complete",
    total=40,
    succeeded=40,
    failed=0,
    refused=0,
    seconds=75.0,
    jobs=40,
)


def test_a_line_says_what_a_person_asks_for() -> None:
    said = line_of(NOW, "documents")
    assert "12/40 documents" in said
    for part in ("2 failed", "windows 33/90", "tokens/s 123", "left 1h01m"):
        assert part in said
    early = msgspec.structs.replace(NOW, total=None, eta_s=None, failed=0, view=None)
    assert "12/" not in line_of(early, "lines")
    assert "10/? lines" in line_of(early, "lines")
    assert "left" not in line_of(early, "lines")
    waiting = msgspec.structs.replace(NOW, note="Redis has not answered for 3 s")
    assert line_of(waiting, "lines").endswith("has not answered for 3 s")


def test_plain_lines_come_now_and_then_and_when_something_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = [0.0]
    display = PlainLines("lines", now=lambda: clock[0])
    waiting = msgspec.structs.replace(NOW, note="no janitor")
    for seconds, progress in (
        (0.0, NOW),
        (1.0, NOW),
        (2.0, waiting),
        (3.0, waiting),
        (11.9, NOW),
        (12.0, NOW),
    ):
        clock[0] = seconds
        display.show(progress)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3
    assert "no janitor" in said[1]


def test_json_lines_are_objects(capsys: pytest.CaptureFixture[str]) -> None:
    with JsonLines() as display:
        display.show(NOW)
    line = json.loads(capsys.readouterr().out)
    assert line["progress"]["succeeded"] == 10
    assert line["progress"]["view"]["windows"] == 90


def test_the_terminal_draws_bar_and_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr("rich.console.Console", lambda **_: console)
    with Terminal("documents") as display:
        display.show(msgspec.structs.replace(NOW, note="no janitor"))
    drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    assert "12/40 documents" in drawn
    for part in ("abcdefghij", "windows 33/90", "failed 2", "no janitor"):
        assert part in drawn


def test_the_display_suits_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(**options: bool) -> type[Display]:
        given = {"as_json": False, "quiet": False, **options}
        return type(display_for(**given, unit="lines"))

    assert chosen() is PlainLines
    assert chosen(as_json=True) is JsonLines
    assert chosen(quiet=True, as_json=True) is Display
    monkeypatch.setattr(progress_module.sys.stderr, "isatty", lambda: True)
    assert chosen() is Terminal


def test_rates_are_those_of_this_process() -> None:
    clock = [100.0]
    rates = Rates(now=lambda: clock[0])
    rates.begin(settled=50, tokens=1000)
    assert rates.eta_s(50, 100) is None
    clock[0] = 110.0
    assert rates.tokens_per_s(1500) == pytest.approx(50.0)
    assert rates.eta_s(60, 100) == pytest.approx(40.0)
    assert rates.eta_s(60, None) is None
    for second in range(111, 200):
        clock[0] = float(second)
        recent = rates.tokens_per_s(1500)
    assert recent == 0.0


def ended(**changes: object) -> Ended:
    return Ended(report=msgspec.structs.replace(REPORT, **changes), output="out.jsonl")


def test_the_end_decides_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    tell(ended(), as_json=False)
    assert "40 succeeded, 0 failed in 1m15s" in capsys.readouterr().err
    with pytest.raises(BulkItemsFailed, match=r"retry-failed out\.jsonl") as failed:
        tell(ended(succeeded=38, failed=2), as_json=False)
    assert failed.value.exit_code == 3
    with pytest.raises(BulkItemsFailed) as refused:
        tell(ended(succeeded=38, refused=2), as_json=True)
    assert "retry-failed" not in str(refused.value)
    assert json.loads(capsys.readouterr().out)["report"]["refused"] == 2
    with pytest.raises(BulkRunCancelled, match="same command again"):
        tell(ended(state="cancelled", total=None), as_json=False)


def test_an_outage_is_told_apart_from_failed_items() -> None:
    with (
        pytest.raises(RedisUnavailable, match="give the same command again") as away,
        told("out.jsonl"),
    ):
        raise RedisUnavailable("no answer")
    assert away.value.code != BulkItemsFailed.code
    assert away.value.exit_code == BulkItemsFailed.exit_code == 3


def test_the_report_names_what_is_unusual() -> None:
    plain = "\n".join(lines_of(ended()))
    assert "key sentences" not in plain
    odd = ended(windows=9, fell_back=2, forgotten=3)
    said = "\n".join(lines_of(msgspec.structs.replace(odd, others=4)))
    assert "9 windows, 40 jobs" in said
    assert "2 parts were summarized by key sentences" in said
    assert "3 items were given to Redis again" in said
    assert "4 files of other kinds" in said
