"""Follow an answer as it is written. Start a pool first: `tokenmill up`."""

import asyncio

from tokenmill import Client, Prompt, Sampling


async def main() -> None:
    """Prints the answer piece by piece, then how it ended."""
    prompt = Prompt("Once upon a time", sampling=Sampling(max_tokens=64))
    async with Client() as mill:
        job = await mill.submit(prompt)
        async with job.stream(cancel_on_leave=True) as tokens:
            async for delta in tokens:
                print(delta.text, end="", flush=True)
        print(f"\n[{tokens.end.state}]" if tokens.end else "")


if __name__ == "__main__":
    asyncio.run(main())
