"""`tokenmill top` on terminals, narrow ones, and none."""

import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
from rich.console import Console
from support.pools import clean_environment
from support.scheduled_pool import Pool, new_job
from support.servers import SERVERS, RedisServer, running
from support.terminal import terminal

from tokenmill.producer.info import JobInfo
from tokenmill.producer.watch.bars import sparkline, stacked
from tokenmill.producer.watch.render import render
from tokenmill.producer.watch.view import RunRow, TopView
from tokenmill.shared.redis import connect
from tokenmill.shared.watch.snapshot import (
    GroupStatus,
    HistorySample,
    PoolSnapshot,
    QueueDepth,
    SchedulerStatus,
)

ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running(SERVERS[-1], "--appendonly", "yes") as found:
        yield found


@pytest.fixture
async def pool(server: RedisServer) -> AsyncIterator[Pool]:
    client = connect(server.url)
    pool = Pool(client)
    await pool.group(total_blocks=1000)
    await pool.enqueue(
        *(new_job(tenant="acme") for _ in range(3)), new_job(job_class="bulk")
    )
    yield pool
    await client.aclose()


def run(url: str, *arguments: str, columns: int = 120) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tokenmill", "top", "--url", url, *arguments],
        env={**clean_environment(), "COLUMNS": str(columns), "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout


async def test_it_is_live_survives_redis_and_q_leaves_the_terminal_as_it_was(
    pool: Pool, server: RedisServer
) -> None:
    with terminal("top", "--url", server.url, "--every", "0.2") as screen:
        screen.read_until("4 waiting")
        assert ENTER in screen.raw
        assert not screen.echoes()
        screen.read_until("acme")
        for shown in ("QUEUE", "WORKER", "LATENCY", "JOB", "acme", "w-1", "queued"):
            assert shown in screen.text
        assert "no active scheduler for tiny:0" in screen.text
        await pool.enqueue(new_job())
        screen.read_until("5 waiting")
        server.kill()
        screen.read_until("Redis does not answer")
        screen.read_until("5 waiting")  # what was seen last stays
        server.start()
        screen.read_until("5 waiting")
        screen.press("q")
        assert screen.wait() == 0
        assert screen.raw.rindex("\x1b[?25h") > screen.raw.rindex("\x1b[?25l")
        assert LEAVE in screen.raw
        assert screen.echoes()


async def test_interrupt_ends_it_and_puts_the_terminal_back(
    pool: Pool, server: RedisServer
) -> None:
    with terminal("top", "--url", server.url, columns=50, lines=12) as screen:
        screen.read_until("waiting")
        screen.process.send_signal(signal.SIGINT)  # as a terminal does for Ctrl-C
        assert screen.wait() == 130
        assert LEAVE in screen.raw
        assert screen.echoes()


async def test_off_a_terminal_it_prints_once_and_without_colour(
    pool: Pool, server: RedisServer
) -> None:
    out = run(server.url, columns=50)
    assert "\x1b" not in out
    assert "4 waiting" in out
    assert out.count("QUEUE") == 1
    assert max(map(len, out.splitlines())) <= 50
    assert "PROMPT" not in out
    found = json.loads(run(server.url, "--json", "--jobs", "2"))
    assert found["snapshot"]["waiting_jobs"] == 4
    assert len(found["jobs"]) == 2
    assert found["history"] == found["runs"] == []


def test_without_redis_it_ends_with_its_code() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tokenmill", "top", "--url", "redis://127.0.0.1:1/0"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("error: ")


# --- what is drawn --------------------------------------------------------------------
def drawn(view: TopView, *, width: int, height: int | None = None, utf8=True) -> str:
    console = Console(width=width, height=1000, color_system=None)
    with console.capture() as capture:
        console.print(render(view, width=width, height=height, utf8=utf8))
    return capture.get()


def big_view() -> TopView:
    return TopView(
        snapshot=PoolSnapshot(
            at_ms=1_000_000,
            queues=tuple(
                QueueDepth(
                    model="smollm2-135m",
                    partition=partition,
                    job_class="bulk",
                    bucket=bucket,
                    jobs=1000,
                    oldest_ms=5000,
                )
                for partition in range(2)
                for bucket in ("beyond", "8192", "128")
            ),
            groups=tuple(
                GroupStatus(
                    group=f"w-{n}-0123456789abcdef",
                    model="smollm2-135m",
                    partition=0,
                    state="ready",
                    running=3,
                    max_running=16,
                    pool_blocks=100,
                    used_blocks=50,
                    cached_blocks=25,
                    free_blocks=25,
                    prefix_hit_rate=0.25,
                )
                for n in range(30)
            ),
            schedulers=(SchedulerStatus(model="m", partition=0, active=None),),
            left_out=("groups",),
        ),
        history=tuple(HistorySample(at_ms=n, tokens_per_s=n) for n in range(360)),
        runs=(
            RunRow(
                run="abc",
                name="peps",
                state="open",
                settled=3,
                total=None,
                failed=1,
                tokens=9,
            ),
        ),
    )


@pytest.mark.parametrize("width", [40, 71, 72, 100, 200])
def test_it_fits_every_width(width: int) -> None:
    lines = drawn(big_view(), width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert any("… 18 more" in line for line in lines)


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_no_cell_is_cut_off_where_columns_can_be_left_out(width: int) -> None:
    job = JobInfo(
        id="smollm2-135m-instruct:0:01k5zq8x6v3m4n7p9r2s",
        model="smollm2-135m-instruct",
        state="succeeded",
        job_class="interactive",
        tenant="a-department",
        prompt_tokens=12_345,
    )
    view = msgspec.structs.replace(big_view(), jobs=(job,))
    text = drawn(view, width=width)
    assert "JOB" in text
    assert job.id[-12:] in text
    assert "succeeded" in text
    assert "50%" in text
    # What is cut off ends in an ellipsis; a shortened id begins with one.
    cut = [w for line in text.splitlines() for w in line.split() if w.endswith("…")]
    assert cut == ["…"]  # "… 18 more"


def test_buckets_stand_in_order_and_partitions_together() -> None:
    text = drawn(big_view(), width=120)
    (header,) = [line for line in text.splitlines() if line.startswith("QUEUE")]
    assert header.split() == [
        "QUEUE",
        "CLASS",
        "128",
        "8192",
        "beyond",
        "JOBS",
        "OLDEST",
    ]
    (row,) = [
        line for line in text.splitlines() if line.startswith("smollm2-135m  bulk")
    ]
    assert row.split()[2:] == ["2000", "2000", "2000", "6000", "5.0s"]
    assert "3/?" in text
    assert "25%" in text
    plain = drawn(big_view(), width=120, utf8=False)
    assert "#####" in plain
    assert "█" not in plain


def test_bars_and_lines() -> None:
    assert stacked((5, 0, 5), 10).plain == "█████░░░░░"
    assert stacked((1, 1, 998), 10).plain == "█░░░░░░░░░"  # what is there is seen
    assert stacked((0, 0, 0), 4).plain == "░░░░"
    assert sparkline([], 10) == ""
    assert sparkline([0, 0], 10) == "▁▁"
    assert sparkline([0, 7, 3.5], 10) == "▁█▅"
    assert sparkline([9, 0, 0, 1, 1], 3) == "█▁▂"
    assert len(sparkline(range(360), 50)) <= 50
