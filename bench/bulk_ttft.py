"""Time to the first token of someone who waits, without bulk work and beside it."""

import asyncio
import json
import subprocess
import time

from bulk_pool import BulkPool
from bulk_rate import Prompts
from harness import percentile

from tokenmill import Client, Prompt
from tokenmill.shared.messages import Sampling

_PAUSE_S = 0.2
WARM = 2
"""Prompts that are asked before anything counts."""


async def _ttft_ms(client: Client, model: str, text: str) -> float:
    prompt = Prompt(
        text,
        model=model,
        sampling=Sampling(max_tokens=8, ignore_eos=True),
        control_tokens="as_text",
    )
    began = time.perf_counter()
    job = await client.submit(prompt)
    first = None
    async with job.stream() as deltas:
        async for delta in deltas:
            if first is None and delta.token_ids:
                first = time.perf_counter() - began
    if first is None:
        raise SystemExit("an interactive job ended without a token")
    return first * 1000


async def _measure(url: str, model: str, texts: list[str]) -> list[float]:
    async with Client(url) as client:
        times = []
        for text in texts:
            times.append(await _ttft_ms(client, model, text))
            await asyncio.sleep(_PAUSE_S)
        return times


def measure(
    pool: BulkPool, model: str, prompts: Prompts, asked: Prompts, output: int
) -> dict[str, object]:
    """Measures interactive jobs one after another, alone and while bulk runs.

    Args:
        pool: The pool.
        model: What it serves.
        prompts: Of the bulk run: so many that it outlasts the measurement.
        asked: Interactive prompts, each asked once: half of them alone.
        output: Output tokens of a bulk prompt.
    """
    texts = [text for text, _ in asked]
    count = (len(texts) - WARM) // 2
    asyncio.run(_measure(pool.url, model, texts[:WARM]))
    alone = asyncio.run(_measure(pool.url, model, texts[WARM : WARM + count]))
    source = pool.directory / "beside.jsonl"
    options = {"max_tokens": output, "ignore_eos": True, "control_tokens": "as_text"}
    rows = (
        {"id": n, "prompt": text, "options": options}
        for n, (text, _) in enumerate(prompts)
    )
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = pool.start(
        *("run", source, "-o", source.with_suffix(".out"), "--model", model),
        *("--tenant", "beside", "--json"),
        stdout=subprocess.PIPE,
    )
    assert command.stdout is not None
    while json.loads(command.stdout.readline())["progress"]["in_flight"] == 0:
        pass
    time.sleep(2.0)  # steps are full by then
    beside = asyncio.run(_measure(pool.url, model, texts[WARM + count :]))
    outlasted = command.poll() is None
    pool.start("cancel", source.with_suffix(".out"), stdout=subprocess.DEVNULL).wait()
    command.communicate()
    return {
        "interactive_jobs": count,
        "interactive_prompt_tokens": max(len(ids) for _, ids in asked),
        "bulk_outlasted_it": outlasted,
        "ttft_alone_p50_ms": percentile(alone, 0.5),
        "ttft_alone_p95_ms": percentile(alone, 0.95),
        "ttft_beside_p50_ms": percentile(beside, 0.5),
        "ttft_beside_p95_ms": percentile(beside, 0.95),
        "ttft_p50_ratio": percentile(beside, 0.5) / percentile(alone, 0.5),
        "ttft_p95_ratio": percentile(beside, 0.95) / percentile(alone, 0.95),
    }
