"""Time-outs in a task that is being cancelled, as in every clean-up after a signal."""

import asyncio
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
PROGRAM = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from tokenmill.shared.timeouts import repair_timeouts

async def clean_up():
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        try:
            async with asyncio.timeout(0):
                await asyncio.sleep(60)
        except TimeoutError:
            print("timed out")

async def cancelled_within():
    async with asyncio.timeout(60):
        await asyncio.sleep(60)

async def main():
    task = asyncio.create_task(clean_up())
    await asyncio.sleep(0)
    task.cancel()
    await task
    task = asyncio.create_task(cancelled_within())
    await asyncio.sleep(0)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        print("cancelled")

repair_timeouts()
asyncio.run(main())
"""


def test_a_time_out_in_a_cancelled_task_is_one_on_every_interpreter() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(SOURCE)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ran.stdout.split("\n")[:2] == ["timed out", "cancelled"]


def test_an_interpreter_without_the_fault_is_left_alone(monkeypatch) -> None:
    from tokenmill.shared import timeouts

    monkeypatch.setattr(timeouts, "AFFECTED", False)
    before = asyncio.Timeout.__aexit__
    timeouts.repair_timeouts()
    assert asyncio.Timeout.__aexit__ is before
