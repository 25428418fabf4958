"""Adapters by name: what the registry keeps, and what jobs carry."""

import asyncio

import msgspec
import pytest
from support.leaks import leaked_keys

from tokenmill.shared.adapter_keys import adapters_key
from tokenmill.shared.adapters import (
    MOST_IN_MEMORY,
    RETIRED_MS,
    AdapterCard,
    in_memory,
    key_of,
    short_digest,
)
from tokenmill.shared.adapters_fit import MOST_CHECKED, fit_of, noted
from tokenmill.shared.adapters_registry import AdapterRegistry
from tokenmill.shared.adapters_resolve import AdapterResolver
from tokenmill.shared.decode import decode_prompt, decode_request
from tokenmill.shared.errors import InvalidRequest, ProtocolError, UnknownAdapter
from tokenmill.shared.messages import AdapterRef, JobRequest, PoolCard, Prompt, encode
from tokenmill.shared.new_job import new_job

OLD, NEW = "a" * 64, "b" * 64


def card(name: str = "tone", digest: str = OLD, **changes: object) -> AdapterCard:
    values: dict[str, object] = {
        "name": name,
        "model": "m",
        "path": "/adapters/tone",
        "digest": digest,
        "rank": 4,
        "alpha": 8.0,
        "bytes": 100,
        **changes,
    }
    return msgspec.convert(values, AdapterCard)


@pytest.fixture
def registry(empty_redis) -> AdapterRegistry:
    return AdapterRegistry(empty_redis, "m")


async def test_a_name_in_use_is_refused_unless_it_is_to_be_replaced(registry) -> None:
    first = await registry.add(card())
    assert first.added_ms > 0
    assert await registry.add(card()) == first, "the same once more changes nothing"
    again = await registry.add(card(base="w2"))
    assert again == msgspec.structs.replace(first, base="w2")
    assert await registry.cards() == [again]
    with pytest.raises(InvalidRequest, match=r"'tone' is in use.*--replace") as caught:
        await registry.add(card(digest=NEW))
    assert caught.value.field == "name"
    await registry.add(card(digest=NEW), replace=True)
    assert [one.digest for one in await registry.cards()] == [NEW]
    standing = await registry.standing(AdapterRef("tone", OLD))
    assert standing.current is not None
    assert standing.current.digest == NEW
    assert standing.retired is not None
    assert standing.retired.retired == "replaced"


@pytest.mark.parametrize(
    ("old", "new"), [("acme", "globex"), ("acme", None), (None, "acme")]
)
async def test_a_name_is_not_taken_from_who_uses_it(registry, old, new) -> None:
    await registry.add(card(tenant=old))
    theirs = card(digest=NEW, tenant=new)
    with pytest.raises(InvalidRequest, match=r"remove it first$") as caught:
        await registry.add(theirs)
    with pytest.raises(InvalidRequest, match=r"is for .*remove it first") as caught:
        await registry.add(theirs, replace=True)
    assert caught.value.field == "tenant"
    await registry.add(card(digest=NEW, tenant=old), replace=True)
    await registry.remove("tone")
    assert (await registry.add(theirs)).tenant == new


async def test_what_was_removed_is_not_listed_and_comes_back_whole(registry) -> None:
    await registry.add(card())
    await registry.remove("tone")
    assert await registry.cards() == []
    with pytest.raises(UnknownAdapter, match=r"'tone' is no adapter.*it has none"):
        await registry.remove("tone")
    standing = await registry.standing(AdapterRef("tone", OLD))
    assert standing.retired is not None
    assert standing.retired.retired == "removed"
    await registry.add(card())
    standing = await registry.standing(AdapterRef("tone", OLD))
    assert standing.retired is None, "it is there again"


async def test_with_a_name_goes_all_that_stood_under_it(registry) -> None:
    await registry.add(card())
    await registry.add(card("tone-2", OLD))
    await registry.add(card(digest=NEW), replace=True)
    await registry.add(card("tone-2", NEW), replace=True)
    await registry.remove("tone")

    async def retired(name: str, digest: str) -> str | None:
        found = (await registry.standing(AdapterRef(name, digest))).retired
        return None if found is None else found.retired

    assert [await retired("tone", one) for one in (OLD, NEW)] == ["removed"] * 2
    assert await retired("tone-2", OLD) == "replaced"


async def test_what_was_retired_long_ago_goes_with_the_next_change(
    registry, empty_redis
) -> None:
    await registry.add(card())
    await registry.remove("tone")
    key, field = adapters_key("m"), f"@{key_of(card().ref)}"
    old = msgspec.json.decode(await empty_redis.hget(key, field), type=AdapterCard)
    long_ago = (old.retired_ms or 0) - RETIRED_MS - 1
    aged = msgspec.structs.replace(old, retired_ms=long_ago)
    await empty_redis.hset(key, field, encode(aged))
    await registry.add(card("other", NEW))
    assert await empty_redis.hkeys(key) == [b"other"]
    assert await leaked_keys(empty_redis) == []


async def test_of_many_who_take_a_name_one_has_it(registry) -> None:
    digests = [f"{index:064x}" for index in range(8)]
    outcomes = await asyncio.gather(
        *(registry.add(card(digest=one)) for one in digests), return_exceptions=True
    )
    made = [one for one in outcomes if isinstance(one, AdapterCard)]
    assert len(made) == 1
    assert await registry.cards() == made


async def test_an_entry_that_is_no_card_is_named(registry, empty_redis) -> None:
    await empty_redis.hset(adapters_key("m"), "bad", b"no card")
    with pytest.raises(ProtocolError, match=r"tm:adapters:m.*HDEL"):
        await registry.cards()


async def test_an_adapter_of_one_tenant_is_unknown_to_others(
    registry, empty_redis
) -> None:
    await registry.add(card(tenant="acme"))
    await registry.add(card("open", NEW))
    names = AdapterResolver(empty_redis)
    mine = Prompt("x", model="m", tenant="acme", adapter="tone")
    assert await names.ref(mine) == AdapterRef("tone", OLD)
    other = msgspec.structs.replace(mine, tenant="globex")
    with pytest.raises(UnknownAdapter, match=r"'tone' is no adapter.*it has open$"):
        await names.ref(other)


def test_a_model_with_a_colon_is_a_model_and_an_adapter() -> None:
    prompt = decode_prompt(Prompt("x", model="m:tone"))
    assert (prompt.model, prompt.adapter) == ("m", "tone")
    same = decode_prompt({"text": "x", "model": "m:tone", "adapter": "tone"})
    assert same == prompt
    with pytest.raises(InvalidRequest, match=r"'other' differs"):
        decode_prompt(Prompt("x", model="m:tone", adapter="other"))


@pytest.mark.parametrize("name", ["", "a:b", "a b", "../up", "a@b", "x" * 65])
def test_what_cannot_be_a_name_is_refused(name: str) -> None:
    prompt = Prompt("x", model="m", adapter=name)
    with pytest.raises(InvalidRequest, match=r"cannot be an adapter's name"):
        new_job(prompt, None, PoolCard(), adapter=AdapterRef(name, OLD))


def test_a_job_carries_the_digest_and_version_3() -> None:
    prompt = Prompt("x", model="m", adapter="tone")
    made = new_job(prompt, None, PoolCard(), adapter=AdapterRef("tone", OLD))
    request = decode_request(made.payload)
    assert (made.v, request.v, request.adapter) == (3, 3, AdapterRef("tone", OLD))
    plain = new_job(Prompt("x", model="m"), None, PoolCard())
    assert (plain.v, b"adapter" in plain.payload) == (1, False)
    with pytest.raises(UnknownAdapter):
        new_job(prompt, None, PoolCard())  # never silently without


def test_by_reference_the_version_stays_that_of_the_adapter() -> None:
    pool = PoolCard(storage_url="file:///x", offload_bytes=10, max_input_bytes=10_000)
    prompt = Prompt("x" * 100, model="m", adapter="tone")
    made = new_job(prompt, None, pool, adapter=AdapterRef("tone", OLD))
    assert (made.v, decode_request(made.payload).text_ref is not None) == (3, True)


def test_a_key_holds_for_the_name_of_an_adapter_not_for_its_content() -> None:
    def fingerprint(name: str | None, digest: str = OLD) -> str:
        ref = None if name is None else AdapterRef(name, digest)
        prompt = Prompt("x", model="m", adapter=name)
        return new_job(prompt, None, PoolCard(), adapter=ref).payload_hash

    assert fingerprint("tone") == fingerprint("tone", NEW)
    assert len({fingerprint("tone"), fingerprint("other"), fingerprint(None)}) == 3


def test_older_versions_cannot_hide_an_adapter() -> None:
    request = JobRequest(v=2, text="x", adapter=AdapterRef("tone", OLD))
    with pytest.raises(InvalidRequest, match=r"has version 3, found 2"):
        decode_request(encode(request))


async def test_what_other_versions_say_is_kept_with_what_they_were_asked_about(
    registry,
) -> None:
    first = await registry.add(card(base="w1"))
    await registry.note([(first, {"w1": "", "w2": "too deep", "w3": ""})])
    (kept,) = await registry.cards()
    assert kept.checked == {"w2": "too deep", "w3": ""}
    assert await registry.add(card(base="w1")) == kept, "asked again, nobody forgets"
    await registry.note([(first, {"w2": ""})])
    fit = fit_of((await registry.cards())[0], {"v1": "w1", "v2": "w2", "v9": "w9"})
    assert (fit.able, fit.unable, fit.unasked) == (("v1", "v2"), {}, ("v9",))
    await registry.add(card(digest=NEW, base="w1"), replace=True)
    await registry.note([(first, {"w2": "too deep"})])  # of what was replaced
    assert (await registry.cards())[0].checked == {}


def test_a_card_keeps_what_was_said_last() -> None:
    said = {f"w{n}": "too deep" for n in range(MOST_CHECKED + 3)}
    kept = noted(card(base="w"), said).checked
    assert list(kept) == list(said)[3:]
    assert fit_of(card(base="w", checked=kept), {"v2": "w9"}).unable == {
        "v2": "too deep"
    }


def test_what_a_worker_says_of_its_memory_is_bounded() -> None:
    keys = [key_of(AdapterRef("tone", f"{n:064x}"[::-1])) for n in range(100)]
    found = in_memory(keys)
    assert len(found) == MOST_IN_MEMORY
    assert short_digest(keys[-1].partition("@")[2]) in found
