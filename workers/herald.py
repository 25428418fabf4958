"""Sends the tokenizer ahead, so that schedulers load it while the weights are read."""

import asyncio
from concurrent.futures import Future

import redis.asyncio
import structlog

from ..shared import keys as names
from ..shared.keys import Keys
from ..shared.outage import REDIS_ERRORS


class Herald:
    """Publishes the tokenizer of a model that is still being loaded.

    Args:
        client: Redis; used on the event loop that makes this object.
        keys: Names of the worker's shard.
    """

    def __init__(self, client: "redis.asyncio.Redis", keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._loop = asyncio.get_running_loop()
        self._sent: Future[None] | None = None

    def announce(self, fingerprint: str, bundle: bytes) -> None:
        """Publishes without waiting; may be called from any thread.

        Args:
            fingerprint: Of the bundle.
            bundle: The tokenizer, packed.
        """
        work = self._publish(fingerprint, bundle)
        try:
            self._sent = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()  # the loop is closed: the process is ending

    def close(self) -> None:
        """Gives up what has not been sent."""
        if self._sent is not None:
            self._sent.cancel()

    async def _publish(self, fingerprint: str, bundle: bytes) -> None:
        try:
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.set(names.tokenizer_key(fingerprint), bundle)
                pipe.hset(names.WARM, mapping={self._keys.model: fingerprint})
                pipe.sadd(names.SHARDS, self._keys.shard)
                await pipe.execute()
        except REDIS_ERRORS as error:
            # The card brings it again once the model is loaded.
            structlog.get_logger().info(
                "tokenizer_not_sent_ahead", error=str(error) or repr(error)
            )
