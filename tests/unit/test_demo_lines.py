"""What the demo shows of its pool's output, and when it goes on."""

import asyncio
from types import SimpleNamespace

from support.waiting import loop_turns

from tokenmill.producer.demo.pool_process import _Lines


async def test_the_demo_waits_for_ready_lines_and_hides_the_hint() -> None:
    output = asyncio.StreamReader()
    shown: list[str] = []
    lines = _Lines(SimpleNamespace(stdout=output), shown.append)
    reader = asyncio.create_task(lines.pass_on())
    settled = asyncio.create_task(lines.settle())
    output.feed_data(b'scheduler running\nready; try: tokenmill submit "Hello"\n')
    await loop_turns(5)
    assert not settled.done()
    output.feed_data(b"worker-0 | ready: model m\n")
    await settled
    assert shown == ["scheduler running", "worker-0 | ready: model m"]
    output.feed_eof()
    await reader
