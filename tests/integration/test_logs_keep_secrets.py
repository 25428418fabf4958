"""A pool of real processes at level info: no prompt, key or password in any log."""

import json
import logging
from urllib.parse import urlsplit

import pytest
import redis
from support.pools import MODEL, up
from support.waiting import wait_until_sync

from tokenmill import Message, Prompt, Sampling, SyncClient
from tokenmill.shared.errors import JobFailed, TokenmillError
from tokenmill.shared.keys import JobId, Keys, lane_of, new_unique
from tokenmill.shared.script_sources import load_script

MARKER = "quokka-4711"
"""Stands for what a prompt says."""
SECRET = "sk-live-0123456789abcdef"
"""Stands for a key that someone pastes into a prompt or an option."""


def submit_all(mill: SyncClient) -> list[str]:
    """One of each kind: good, cancelled, refused by the client, refused behind it."""
    text = f"{MARKER} {SECRET} please"
    ids = [
        mill.submit(Prompt(text, model=MODEL, idempotency_key=SECRET)),
        mill.submit(Prompt(messages=(Message("user", text),), model=MODEL)),
        mill.submit(Prompt(text, model=MODEL, sampling=Sampling(stop=(SECRET,)))),
    ]
    for job in ids:
        job.result(20)
    waiting = mill.submit(Prompt(text, model=MODEL, delay_s=60))
    assert waiting.cancel() == "cancelled"
    for wrong in (
        Prompt(text, model=MODEL, idempotency_key=f"{SECRET} x"),
        Prompt(text, model=MODEL, tenant=f"{SECRET}:"),
        Prompt(text, model=MODEL, sampling=Sampling(stop=(SECRET * 50,))),
        Prompt(f"other {MARKER}", model=MODEL, idempotency_key=SECRET),
    ):
        with pytest.raises(TokenmillError):
            mill.submit(wrong)
    return [job.id for job in (*ids, waiting)]


def submit_raw(url: str, payload: str) -> str:
    """A payload as a client without any check would send it."""
    keys, lane = Keys(MODEL, 0), lane_of("default")
    job_id = str(JobId(MODEL, 0, new_unique()))
    names = [keys.load, keys.lanes, keys.recent, keys.deadline, keys.delayed]
    names += [keys.bell, keys.limits, keys.rates, keys.job(job_id)]
    names += [keys.input(job_id), keys.queue("interactive", "128", lane)]
    facts = {"id": job_id, "hash": "h", "bucket": "128", "lane": lane}
    facts |= {"tokens": 5, "max_tokens": 5, "seed": "1"}
    with redis.Redis.from_url(url) as client:
        source, last = load_script("enqueue").source, keys.job(job_id)
        args = [1, json.dumps(facts), payload]
        reply = client.eval(source, len(names) + 1, *names, last, *args)
    assert reply[0] == b"queued"
    return job_id


def test_logs_hold_no_prompt_no_key_and_no_password(tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO)
    with up(tmp_path) as pool:
        password = urlsplit(pool.url).password
        assert password
        with SyncClient(pool.url) as mill:
            ids = submit_all(mill)
            broken = [
                f'{{"text": 5, "sampling": {{"stop": "{SECRET} {MARKER}"}}}}',
                f'{{"text": "{MARKER} {SECRET}", "sampling": {{"{SECRET}": 1}}}}',
                f"{MARKER} {SECRET}",
            ]
            failed = [submit_raw(pool.url, payload) for payload in broken]
            for job_id in failed:
                with pytest.raises(JobFailed):
                    mill.job(job_id).result(20)

        def all_told() -> bool:
            logs = pool.logs()
            return all(job_id in logs for job_id in (*ids, *failed))

        wait_until_sync(all_told, timeout_s=20, what="a log line for each job")
        assert pool.stop() == 0
        logs = pool.logs() + caplog.text
    for hidden in (MARKER, SECRET, password):
        at = logs.find(hidden)
        assert at < 0, logs[max(at - 300, 0) : at + 100]
