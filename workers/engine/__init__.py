"""The engine: continuous batching over a model runner. No Redis, no asyncio."""
