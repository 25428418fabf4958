"""Inputs by reference, from the producer to the group that runs them."""

import hashlib
import os
from pathlib import Path

import msgspec
import pytest
from support.scheduled_pool import CARD, CONFIG, KEYS, Pool, new_job, scheduling
from support.waiting import wait_until

from tokenmill import Client, Message, Prompt, Sampling
from tokenmill.scheduler.old_inputs import remove_old
from tokenmill.shared.config import StorageConfig
from tokenmill.shared.errors import InvalidBatch, StorageUnavailable
from tokenmill.shared.input_refs import ref_of
from tokenmill.shared.keys import MODELS, POOL, SHARDS, STORE
from tokenmill.shared.messages import JobRequest, encode
from tokenmill.shared.pool_card import pool_card
from tokenmill.shared.tokens import ids_from_bytes

LONG = "many words " * 15
"""Fits the context of 200 tokens and is above what goes into Redis."""
SMALL = Sampling(max_tokens=5)
PLACE = "pool-0123456789ab"
"""The pool's own directory of the store."""


def configured(place: Path, **changes: object):
    storage = StorageConfig(
        **{"url": f"file://{place}", "offload_bytes": 150, "keep_s": 60.0, **changes}
    )
    return msgspec.structs.replace(CONFIG, storage=storage)


@pytest.fixture
async def pool(redis_client) -> Pool:
    made = Pool(redis_client)
    await made.group()
    await redis_client.set(STORE, PLACE)
    return made


async def submitted(pool: Pool, config, *prompts: Prompt) -> list[str]:
    card = pool_card(config)
    card = msgspec.structs.replace(card, storage_url=f"{card.storage_url}/{PLACE}")
    await pool.client.set(POOL, encode(card))
    url = pool.client.connection_pool.connection_kwargs
    async with Client(f"redis://{url['host']}:{url['port']}/0") as mill:
        return [job.id for job in await mill.submit_many(prompts)]


def prompt(text: str = LONG, **fields: object) -> Prompt:
    return Prompt(text, model="tiny", sampling=SMALL, **fields)


async def test_a_long_text_goes_by_the_store_and_runs(pool, tmp_path) -> None:
    config = configured(tmp_path)
    async with scheduling(pool.client, config):
        ids = await submitted(pool, config, prompt(), prompt("short"))
        started = {job.job_id: job for job in await pool.work(2)}
        await pool.finish(list(started.values()))
    long, short = (started[i] for i in ids)
    request = msgspec.json.decode(long.payload, type=JobRequest)
    assert (request.v, request.text) == (2, None)
    assert LONG.encode() not in long.payload
    name = f"default/{hashlib.sha256(LONG.encode()).hexdigest()}"
    assert request.text_ref.name == name
    assert (tmp_path / PLACE / name).read_text() == LONG
    assert bytes(ids_from_bytes(long.token_ids)).startswith(b"many words")
    assert b'"v":2' not in short.payload


async def test_a_long_conversation_goes_by_the_store(pool, tmp_path) -> None:
    config = configured(tmp_path)
    chat = Prompt(
        messages=(Message("user", "x" * 100), Message("assistant", "y" * 60)),
        model="tiny",
        sampling=SMALL,
    )
    async with scheduling(pool.client, config):
        await submitted(pool, config, chat)
        (job,) = await pool.work(1)
    request = msgspec.json.decode(job.payload, type=JobRequest)
    assert request.text_ref.holds == "messages"
    ids = bytes(i for i in ids_from_bytes(job.token_ids) if i < 256)
    assert b"x" * 100 in ids
    assert b"y" * 60 in ids


async def test_bad_objects_fail_their_jobs_alone(pool, tmp_path) -> None:
    config = configured(tmp_path, max_input_bytes=1000)
    whole = ref_of("t", LONG.encode(), "text")
    refs = {
        "no object": whole,
        "not an input of this job": msgspec.structs.replace(
            ref_of("u", LONG.encode(), "text")
        ),
        "1001 bytes; expected 1 to 1000": msgspec.structs.replace(whole, size=1001),
        "does not hold a JSON array": ref_of("t", b"no json", "messages"),
        "not hold text in UTF-8": ref_of("t", b"\xff\xfe", "text"),
    }
    (tmp_path / PLACE / "t").mkdir(parents=True)
    (tmp_path / PLACE / ".tokenmill-inputs").touch()
    for content in (b"no json", b"\xff\xfe"):
        sha = hashlib.sha256(content).hexdigest()
        (tmp_path / PLACE / "t" / sha).write_bytes(content)
    jobs = {
        words: new_job(payload=encode(JobRequest(v=2, text_ref=ref, sampling=SMALL)))
        for words, ref in refs.items()
    }
    beside = encode(JobRequest(v=2, text_ref=whole, text="x", sampling=SMALL))
    jobs["beside text or messages"] = new_job(payload=beside)
    unstamped = encode(JobRequest(text_ref=whole, sampling=SMALL))
    jobs["has version 2"] = new_job(payload=unstamped)
    good = new_job("good")
    async with scheduling(pool.client, config):
        await pool.enqueue(*jobs.values(), good)
        for words, job in jobs.items():
            result = await pool.result(str(job.id))
            assert words in result.error.message
            assert result.error.field.startswith(("text_ref", "v"))
        (started,) = await pool.work(1)
        assert started.job_id == str(good.id)


async def test_jobs_wait_for_a_store_that_is_away_and_others_do_not(
    pool, tmp_path
) -> None:
    place = tmp_path / "mount"
    config = configured(place)
    async with scheduling(pool.client, config):
        (long,) = await submitted(pool, config, prompt())
        (first,) = await pool.work(1)
        assert first.job_id == long
        place.rename(tmp_path / "gone")
        place.mkdir()  # what was mounted here is not
        body = encode(
            JobRequest(
                v=2,
                text_ref=ref_of("default", LONG.encode(), "text"),
                sampling=SMALL,
            )
        )
        waiting = new_job(payload=body, tenant="default", max_tokens=5)
        await pool.enqueue(waiting, new_job("short"))
        (short,) = await pool.work(1)
        assert short.token_ids
        assert await pool.state(str(waiting.id)) == "queued"
        place.rmdir()
        (tmp_path / "gone").rename(place)
        (later,) = await pool.work(1)
        assert later.job_id == str(waiting.id)


async def test_a_producer_is_told_what_it_cannot_send(pool, tmp_path) -> None:
    config = configured(tmp_path, max_input_bytes=200)
    with pytest.raises(InvalidBatch, match=r"220 bytes.*storage\.max_input_bytes"):
        await submitted(pool, config, prompt("x" * 220))
    (tmp_path / PLACE).mkdir(exist_ok=True)
    (tmp_path / PLACE / "default").write_text("in the way")
    with pytest.raises(StorageUnavailable):
        await submitted(pool, configured(tmp_path), prompt())
    assert await pool.scripts.load() == {}


async def test_inputs_go_when_they_are_old_and_no_record_names_them(
    pool, tmp_path
) -> None:
    config = configured(tmp_path)
    (job,) = await submitted(pool, config, prompt())
    (other,) = await submitted(pool, config, prompt(LONG + "2"))
    paths = sorted((tmp_path / PLACE / "default").iterdir())
    assert len(paths) == 2
    (tmp_path / PLACE / "default" / "a-note").write_text("not an input")

    async def swept() -> int:
        return await remove_old(pool.client, config)

    await pool.client.delete(KEYS.input(job), KEYS.job(job))
    assert await swept() == 0  # young: its job may be about to be enqueued
    for path in tmp_path.rglob("*"):
        if path.is_file():
            os.utime(path, (1, 1))
    assert await swept() == 1
    (left,) = [p for p in paths if p.exists()]
    assert left.read_text() == LONG + "2"
    assert (tmp_path / PLACE / "default" / "a-note").exists()
    assert await pool.state(other) == "queued"


async def test_inputs_of_a_shard_that_a_flush_unregistered_stay(pool, tmp_path) -> None:
    config = configured(tmp_path)
    await submitted(pool, config, prompt())
    (path,) = (tmp_path / PLACE / "default").iterdir()
    os.utime(path, (1, 1))
    await pool.client.delete(SHARDS)
    assert await remove_old(pool.client, config) == 0
    assert path.exists()


async def test_a_job_dispatched_again_needs_no_object(pool, tmp_path) -> None:
    config = configured(tmp_path)
    async with scheduling(pool.client, config):
        (job,) = await submitted(pool, config, prompt())
        (started,) = await pool.work(1)
        for path in (tmp_path / PLACE / "default").iterdir():
            path.unlink()
        await pool.scripts.release(group="w-1", jobs=[(job, started.epoch)])
        (again,) = await pool.work(1)
    assert (again.job_id, again.token_ids) == (job, started.token_ids)
    assert again.epoch > started.epoch


async def test_without_a_store_such_jobs_wait_and_are_named(pool, capfd) -> None:
    body = encode(JobRequest(v=2, text_ref=ref_of("t", b"x", "text")))
    job = new_job(payload=body)
    async with scheduling(pool.client, CONFIG):
        await pool.enqueue(job)
        await wait_until(lambda: "storage_unavailable" in capfd.readouterr().out)
        assert await pool.state(str(job.id)) == "queued"
    assert await pool.client.hexists(MODELS, CARD.model)
