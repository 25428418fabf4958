"""The official OpenAI clients, as a user would make them for a gateway."""

import openai


def sync_client(base: str, key: str = "unused", **options: object) -> openai.OpenAI:
    """A client of the gateway at `base`; it retries nothing unless told to."""
    settings = {"max_retries": 0, "timeout": 30, **options}
    return openai.OpenAI(base_url=f"{base}/v1", api_key=key, **settings)


def async_client(
    base: str, key: str = "unused", **options: object
) -> openai.AsyncOpenAI:
    """The same for an event loop."""
    settings = {"max_retries": 0, "timeout": 30, **options}
    return openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=key, **settings)
