"""Submit one prompt and await its result. Start a pool first: `tokenmill up`."""

import asyncio

from tokenmill import Client, Message, Prompt, Sampling


async def main() -> None:
    """Prints the answer, its length and what it took."""
    prompt = Prompt(
        messages=(Message("user", "Name three colours of the sky."),),
        sampling=Sampling(max_tokens=48),
    )
    async with Client() as mill:
        job = await mill.submit(prompt)
        result = await job.result(timeout=120)
    print(result.text)
    print(f"{result.usage.completion_tokens} tokens, {result.timings.total_ms} ms")


if __name__ == "__main__":
    asyncio.run(main())
