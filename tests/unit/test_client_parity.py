"""What one client can do, the other can: asynchronous and blocking, by one name."""

import inspect

import pytest

from tokenmill.producer.client import Client
from tokenmill.producer.job import Job
from tokenmill.producer.stream import TokenStream
from tokenmill.producer.sync import SyncClient, SyncJob, SyncStream

PAIRS = [(Client, SyncClient), (Job, SyncJob), (TokenStream, SyncStream)]
OTHER_NAMES = {"aclose": "close"}
BENEATH = {"session", "shard", "settle", "job_id", "inner"}
"""For what is built on the clients: each belongs to one event loop."""
TOLD = "tell"
"""Lines of progress, which the commands print: a callback would run on the loop."""


def public(kind: type) -> set[str]:
    names = {name for name in dir(kind) if not name.startswith("_")}
    slots = set(getattr(kind, "__slots__", ()))
    return {n for n in names | slots if not n.startswith("_")} - BENEATH


def parameters(kind: type, name: str) -> dict[str, tuple[object, object]]:
    found = inspect.signature(getattr(kind, name)).parameters
    return {n: (one.kind, one.default) for n, one in found.items() if n != TOLD}


@pytest.mark.parametrize(("plain", "blocking"), PAIRS)
def test_both_have_the_same_calls(plain: type, blocking: type) -> None:
    expected = {OTHER_NAMES.get(name, name) for name in public(plain)}
    assert public(blocking) == expected


@pytest.mark.parametrize(("plain", "blocking"), PAIRS)
def test_the_same_call_takes_the_same(plain: type, blocking: type) -> None:
    for name in public(plain):
        if inspect.isfunction(getattr(plain, name)):
            other = OTHER_NAMES.get(name, name)
            assert parameters(blocking, other) == parameters(plain, name), name
