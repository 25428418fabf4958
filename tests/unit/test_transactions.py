"""A transaction gives its connection back also where its user is cancelled then."""

import asyncio

from tokenmill.shared.transactions import transaction


class Pipeline:
    """Takes a moment to be reset, as one that watches keys does."""

    def __init__(self) -> None:
        self.resetting = asyncio.Event()
        self.may_go_on = asyncio.Event()
        self.is_reset = asyncio.Event()

    async def reset(self) -> None:
        self.resetting.set()
        await self.may_go_on.wait()
        self.is_reset.set()


class Redis:
    """Has one pipeline."""

    def __init__(self, made: Pipeline) -> None:
        self._made = made

    def pipeline(self, *, transaction: bool) -> Pipeline:
        assert transaction
        return self._made


async def test_a_user_that_is_cancelled_while_it_ends_leaves_nothing() -> None:
    made = Pipeline()

    async def use() -> None:
        async with transaction(Redis(made)) as pipeline:
            assert pipeline is made

    user = asyncio.create_task(use())
    await made.resetting.wait()
    user.cancel()
    await asyncio.wait((user,))
    assert user.cancelled()
    made.may_go_on.set()
    await asyncio.wait_for(made.is_reset.wait(), 60)
