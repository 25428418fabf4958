"""What machines of random calls of a Redis share: a loop, and clients of a server."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import redis
import redis.asyncio
from hypothesis.stateful import RuleBasedStateMachine


class LoopMachine(RuleBasedStateMachine):
    """Rules call asynchronous code by `do`, on a server that is empty at first."""

    url = ""
    """Of the server; set before the machine is run."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.client = redis.asyncio.Redis.from_url(self.url)
        self.reader = redis.Redis.from_url(self.url, decode_responses=True)
        self.reader.flushall()

    def teardown(self) -> None:
        self.do(self.client.aclose())
        self.loop.close()
        self.reader.close()

    def do(self, call: Coroutine[Any, Any, Any]) -> Any:
        """What a call returns, or raises."""
        return self.loop.run_until_complete(call)
