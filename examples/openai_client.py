"""The official `openai` package against the gateway.

    tokenmill gateway &
    python openai_client.py http://127.0.0.1:8080 tm-…

Start a pool first: `tokenmill up`. A gateway for this host alone asks for no key until
the first one is made.
"""

import os
import sys

from openai import OpenAI

MODEL = os.environ.get("MODEL", "smollm2-135m")


def main() -> None:
    """Streams a chat, then takes a completion whole."""
    base = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
    key = sys.argv[2] if len(sys.argv) > 2 else "none"
    with OpenAI(base_url=f"{base}/v1", api_key=key) as client:
        stream = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Name three rivers."}],
            max_tokens=48,
            stream=True,
        )
        for chunk in stream:
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
        answer = client.completions.create(
            model=MODEL, prompt="The mill by the river", max_tokens=16
        )
        print(f"\n{answer.choices[0].text}")
        if answer.usage is not None:
            print(f"{answer.usage.completion_tokens} tokens")


if __name__ == "__main__":
    main()
