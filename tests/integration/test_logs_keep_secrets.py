"""A pool of real processes at level info: no prompt, key or password in any log."""

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import httpx
import pytest
import redis
from support.pools import MODEL, UpProcess, up
from support.waiting import wait_until_sync

from tokenmill import Message, Prompt, Sampling, SyncClient
from tokenmill.shared.errors import JobFailed, TokenmillError
from tokenmill.shared.keys import JobId, Keys, lane_of, new_unique
from tokenmill.shared.script_sources import load_script

MARKER = "quokka-4711"
"""Stands for what a prompt says."""
SECRET = "sk-live-0123456789abcdef"
"""Stands for a key that someone pastes into a prompt or an option."""
HOOK_SECRET = "whsec_MDEyMzQ1Njc4OWFiY2RlZg=="
HOOK_TOKEN = "hook-token-5512"
"""Stands for what people put into the path or query of a webhook's address."""
WRONG_KEY = "tm-wrong-key-7781"
WRONG_PASSWORD = "wrong-password-9913"


class _Hooks(BaseHTTPRequestHandler):
    """Refuses what comes to /refused, and takes the rest."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(404 if self.path.startswith("/refused") else 204)
        self.end_headers()

    def log_message(self, *parts: object) -> None:
        """Says nothing."""


@contextmanager
def hooks() -> Iterator[str]:
    """A receiver of webhooks, by its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hooks) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def submit_hooks(mill: SyncClient, base: str) -> list[str]:
    """Webhooks that arrive, that are given up, and that are refused."""
    sent = []
    for path in ("taken", "refused"):
        url = f"{base}/{path}/{HOOK_TOKEN}?token={HOOK_TOKEN}"
        sent.append(mill.submit(Prompt(MARKER, model=MODEL, webhook=url)).id)
    for wrong in (f"http://me:{HOOK_TOKEN}@example.com/", f"ftp://x/{HOOK_TOKEN}"):
        with pytest.raises(TokenmillError) as caught:
            mill.submit(Prompt(MARKER, model=MODEL, webhook=wrong))
        assert HOOK_TOKEN not in str(caught.value)
    return sent


def call_gateway(base: str, key: str) -> None:
    """A call that is served, one with a wrong key, and one that is refused."""
    body = {"model": MODEL, "prompt": f"{MARKER} {SECRET}", "max_tokens": 4}
    for sent, auth, status in (
        (body, key, 200),
        (body, WRONG_KEY, 401),
        (body | {"stop": SECRET * 50}, key, 400),
        (body | {f"{SECRET}": MARKER}, key, 400),
    ):
        headers = {"Authorization": f"Bearer {auth}"}
        answer = httpx.post(
            f"{base}/v1/completions", json=sent, headers=headers, timeout=60
        )
        assert answer.status_code == status, answer.text


def make_key(pool: UpProcess) -> str:
    """A key of the gateway, as the command prints it."""
    command = [sys.executable, "-m", "tokenmill", "keys", "create", "--json"]
    done = subprocess.run(
        [*command, "--tenant", "acme", "--scope", "inference", "--url", pool.url],
        env=pool.env,
        capture_output=True,
        text=True,
        check=True,
    )
    return str(json.loads(done.stdout)["key"])


def refused_start(pool: UpProcess) -> str:
    """What a janitor says that has a wrong password."""
    parts = urlsplit(pool.url)
    url = f"redis://:{WRONG_PASSWORD}@{parts.hostname}:{parts.port}/0"
    done = subprocess.run(
        [sys.executable, "-m", "tokenmill", "janitor"],
        env={**pool.env, "TOKENMILL_URL": url},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    return done.stdout + done.stderr


def submit_all(mill: SyncClient) -> list[str]:
    """One of each kind: good, cancelled, refused by the client, refused behind it."""
    text = f"{MARKER} {SECRET} please"
    ids = [
        mill.submit(Prompt(text, model=MODEL, idempotency_key=SECRET)),
        mill.submit(Prompt(messages=(Message("user", text),), model=MODEL)),
        mill.submit(Prompt(text, model=MODEL, sampling=Sampling(stop=(SECRET,)))),
    ]
    for job in ids:
        job.result(60)
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
    settings = {
        "TOKENMILL_WEBHOOKS_SECRET": HOOK_SECRET,
        "TOKENMILL_WEBHOOKS_ALLOW_PRIVATE": "true",
        "TOKENMILL_GATEWAY_AUTH": "keys",
    }
    options = ("--gateway", "--gateway-port", "0")
    with hooks() as base, up(tmp_path, *options, janitor=True, **settings) as pool:
        password = urlsplit(pool.url).password
        assert password
        key = make_key(pool)
        call_gateway(pool.gateway, key)
        refusal = refused_start(pool)
        with SyncClient(pool.url) as mill:
            ids = submit_all(mill)
            told = submit_hooks(mill, base)
            wait_until_sync(
                lambda: (
                    {one.state for one in mill.webhooks() if one.id in told}
                    == {"delivered", "given_up"}
                ),
                what="both webhooks",
            )
            broken = [
                f'{{"text": 5, "sampling": {{"stop": "{SECRET} {MARKER}"}}}}',
                f'{{"text": "{MARKER} {SECRET}", "sampling": {{"{SECRET}": 1}}}}',
                f"{MARKER} {SECRET}",
            ]
            failed = [submit_raw(pool.url, payload) for payload in broken]
            for job_id in failed:
                with pytest.raises(JobFailed):
                    mill.job(job_id).result(60)

        def all_told() -> bool:
            logs = pool.logs()
            ends = ("webhook_delivered", "webhook_given_up")
            return all(name in logs for name in (*ids, *failed, *told, *ends))

        wait_until_sync(all_told, what="a log line for each job")
        assert pool.stop() == 0
        logs = pool.logs() + caplog.text + refusal
    secrets = (password, key, HOOK_SECRET, HOOK_TOKEN, WRONG_KEY, WRONG_PASSWORD)
    for hidden in (MARKER, SECRET, *secrets):
        at = logs.find(hidden)
        assert at < 0, logs[max(at - 300, 0) : at + 100]
