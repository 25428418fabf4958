"""Bounded mailboxes: loss is possible, unnoticed loss is not."""

import asyncio

from support.waiting import loop_turns

from tokenmill.producer.inbox import MAX_MESSAGES, EndInbox, Inbox


async def test_messages_come_in_order() -> None:
    inbox = Inbox()
    taking = asyncio.ensure_future(inbox.take(5))
    await loop_turns()
    inbox.deliver(b"c", b"1")
    inbox.deliver(b"c", b"2")
    assert await taking == [b"1", b"2"]


async def test_silence_sends_the_reader_to_the_log() -> None:
    assert await Inbox().take(0.01) is None
    assert await EndInbox().take(0.01) is None


async def test_a_slow_reader_is_sent_to_the_log_and_memory_stays_bounded() -> None:
    inbox = Inbox()
    for index in range(10 * MAX_MESSAGES):
        inbox.deliver(b"c", b"%d" % index)
    assert await inbox.take(1) is None
    inbox.deliver(b"c", b"next")
    assert await inbox.take(1) == [b"next"]


async def test_an_interruption_discards_what_may_have_gaps() -> None:
    inbox = Inbox()
    inbox.deliver(b"c", b"1")
    inbox.interrupted()
    inbox.deliver(b"c", b"3")
    assert await inbox.take(1) is None


async def test_a_cancelled_take_loses_nothing() -> None:
    inbox = Inbox()
    taking = asyncio.ensure_future(inbox.take(5))
    await loop_turns()
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    inbox.deliver(b"c", b"1")
    assert await inbox.take(1) == [b"1"]


async def test_only_ends_wake_those_who_wait_for_ends() -> None:
    inbox = EndInbox()
    inbox.deliver(b"a", b'{"text":"x"}')
    inbox.deliver(b"b", b'{"end":{"state":"succeeded"}}')
    inbox.deliver(b"c", b'{"end":{"state":"failed"}}')
    assert await inbox.take(1) == [b"b", b"c"]
    inbox.interrupted()
    assert await inbox.take(1) is None
