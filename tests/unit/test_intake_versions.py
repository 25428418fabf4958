"""Jobs whose version becomes another one while they are taken in."""

from types import SimpleNamespace
from typing import Any

from tokenmill.scheduler.clock import ArrivalRate, RedisClock
from tokenmill.scheduler.entries import Entry
from tokenmill.scheduler.intake import Intake
from tokenmill.scheduler.large_inputs import TooNew
from tokenmill.scheduler.preparing import Prepared, RawJob
from tokenmill.scheduler.targets import Targets
from tokenmill.scheduler.waiting import WaitingRoom
from tokenmill.shared.config import Config
from tokenmill.shared.keys import Keys
from tokenmill.shared.messages import JobClass, ModelCard
from tokenmill.shared.routes import Route

KEYS = Keys("m", 0)
JOB = "m.0.0123456789abcdef"


def card(version: str) -> ModelCard:
    return ModelCard(
        model="m",
        max_context=100,
        vocab_size=300,
        tokenizer=f"of {version}",
        has_chat_template=False,
        weights_version=version,
    )


async def test_what_was_encoded_for_a_version_of_before_is_not_let_in() -> None:
    """As a large input that is fetched: nobody would look at it again."""
    room, encoded = WaitingRoom(), "of v1"
    room.targets = Targets(Route(shares={"v2": 100.0}), [("v2", "v2")])

    async def prepare(raw: Any, *_: object) -> list[Prepared]:
        return [
            Prepared(
                tokens=1,
                token_ids=b"\0\0\0\0",
                max_tokens=1,
                choices=1,
                text_bytes=0,
                tokenizer=encoded,
            )
        ]

    async def learn(*_: int) -> None:
        pass

    stubs: dict[str, Any] = {
        "cards": SimpleNamespace(
            is_mixed=True,
            by_version={"v1": card("v1"), "v2": card("v2")},
            for_route=card,
            learn=learn,
        ),
        "tokenizers": SimpleNamespace(prepare=prepare),
        "reader": SimpleNamespace(job_class=JobClass.INTERACTIVE),
        **dict.fromkeys(("client", "groups", "refuser"), None),
    }
    intake = Intake(
        keys=KEYS,
        room=room,
        clock=RedisClock(),
        arrivals=ArrivalRate(),
        buckets=(128,),
        max_bytes=1000,
        changed=SimpleNamespace(set=lambda: None),
        config=Config(),
        too_new=TooNew(KEYS.shard),
        **stubs,
    )
    entry = Entry(
        job_id=JOB,
        stream="s",
        entry_id="1-0",
        job_class=JobClass.INTERACTIVE,
        priority=0,
        tenant="t",
        deadline_ms=None,
        num_bytes=1,
        enqueued_ms=0,
        resumed=False,
    )
    await intake._take_fetched(entry, RawJob(b"{}", None), card("v1"))
    assert (JOB in room, len(intake._again)) == (False, 1)
    encoded = "of v2"
    await intake._take_fetched(entry, RawJob(b"{}", None), card("v2"))
    assert JOB in room
