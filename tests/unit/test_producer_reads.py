"""Reads of many callers go together, and each caller has what is its own."""

import asyncio

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from support.waiting import loop_turns

from tokenmill.producer.reading import Reads
from tokenmill.shared.errors import ProtocolError


class Pipeline:
    def __init__(self, server):
        self._server = server
        self._commands = []

    def execute_command(self, *command):
        self._commands.append(command)

    async def execute(self, *, raise_on_error):
        assert not raise_on_error
        self._server.sent.append(self._commands)
        await self._server.answers.wait()
        if self._server.error is not None:
            raise self._server.error
        return [self._server.reply(command) for command in self._commands]


class Server:
    """Answers once it is let; a reply is the key that was asked for."""

    def __init__(self):
        self.sent = []
        self.answers = asyncio.Event()
        self.error = None
        self.bad = {}

    def pipeline(self, *, transaction):
        assert not transaction
        return Pipeline(self)

    def reply(self, command):
        return self.bad.get(command[1], command[1])


async def asked(reads, *keys):
    tasks = [asyncio.create_task(reads.all(("GET", key), ("TTL", key))) for key in keys]
    await loop_turns(5)
    return tasks


async def test_what_comes_while_others_are_on_their_way_goes_together():
    server = Server()
    reads = Reads(server)
    tasks = [(await asked(reads, key))[0] for key in map(str, range(5))]
    tasks += await asked(reads, *map(str, range(5, 1000)))

    on_their_way = len(server.sent)
    server.answers.set()
    found = await asyncio.gather(*tasks)

    assert found == [[key, key] for key in map(str, range(1000))]
    assert on_their_way == 2
    # The first two went at once; 1996 commands are four round trips of 600 at most.
    assert len(server.sent) <= 2 + 4
    assert max(map(len, server.sent)) <= 600


async def test_one_bad_reply_fails_its_caller_alone():
    server = Server()
    server.answers.set()
    server.bad = {
        "list": ResponseError("WRONGTYPE Operation against a key"),
        "secret": ResponseError("NOPERM no permissions"),
    }
    tasks = await asked(Reads(server), "a", "b", "c", "list", "secret", "d")

    *good, late = (tasks[n] for n in (0, 1, 2, 5))
    assert [await task for task in good] == [["a", "a"], ["b", "b"], ["c", "c"]]
    assert await late == ["d", "d"]
    with pytest.raises(ProtocolError, match="the key list"):
        await tasks[3]
    with pytest.raises(ResponseError, match="NOPERM"):
        await tasks[4]


async def test_a_lost_connection_fails_those_on_it_and_no_later_one():
    server = Server()
    reads = Reads(server)
    tasks = await asked(reads, "a", "b")
    server.error = RedisConnectionError("gone")
    server.answers.set()

    for task in tasks:
        with pytest.raises(RedisConnectionError, match="gone"):
            await task
    server.error = None
    assert await reads.all(("GET", "c")) == ["c"]


async def test_a_caller_that_leaves_takes_nobody_along():
    server = Server()
    reads = Reads(server)
    tasks = [(await asked(reads, key))[0] for key in "abcd"]

    for number in (0, 2):  # one that was sent, one that waits
        tasks[number].cancel()
    await loop_turns()
    server.answers.set()

    assert await tasks[1] == ["b", "b"]
    assert await tasks[3] == ["d", "d"]
    await reads.close()
    assert [batch[0][1] for batch in server.sent] == ["a", "b", "d"]


async def test_each_caller_raises_its_own_error():
    server = Server()
    server.error = RedisConnectionError("gone")
    server.answers.set()
    tasks = await asked(Reads(server), "a", "b", "c")
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert {str(error) for error in ended} == {"gone"}
    assert len({id(error) for error in ended}) == 3


async def test_a_close_waits_for_what_goes_after_what_is_on_its_way():
    server = Server()
    reads = Reads(server)
    tasks = [(await asked(reads, key))[0] for key in "abcd"]
    closing = asyncio.create_task(reads.close())
    await loop_turns()
    server.answers.set()
    await closing
    assert len(server.sent) == 3
    assert not reads._tasks
    assert await asyncio.gather(*tasks) == [[key, key] for key in "abcd"]
