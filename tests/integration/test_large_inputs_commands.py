"""A file too large for Redis, from the command line to the worker and back."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from support.pools import MODEL, UpProcess, up
from support.s3_server import BUCKET, s3_server

from tokenmill import Prompt, Sampling, SyncClient
from tokenmill.shared.keys import JobId

TEXT = "All work and no play. " * 1000


@pytest.fixture(params=["directory", "s3"])
def pool(request, tmp_path: Path) -> Iterator[UpProcess]:
    limits = {
        "TOKENMILL_LIMITS_MAX_PAYLOAD_BYTES": "8192",
        "TOKENMILL_STORAGE_OFFLOAD_BYTES": "4096",
    }
    if request.param == "directory":
        url = f"file://{tmp_path}/store"
        with up(tmp_path, TOKENMILL_STORAGE_URL=url, **limits) as made:
            yield made
        return
    pytest.importorskip("s3fs")
    with s3_server() as env:
        env = {**env, **limits, "TOKENMILL_STORAGE_URL": f"s3://{BUCKET}/pool"}
        with up(tmp_path, **env) as made:
            yield made


def test_a_large_file_and_a_large_prompt_run(pool, tmp_path) -> None:
    big = tmp_path / "big.txt"
    big.write_text(TEXT)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tokenmill", "submit", "--file", str(big)),
            *("--model", MODEL, "--max-tokens", "20"),
        ],
        env={**pool.env, "TOKENMILL_URL": pool.url},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == TEXT[:20].strip()
    with SyncClient(pool.url) as mill:
        sampling = Sampling(max_tokens=20)
        job = mill.submit(Prompt(TEXT.upper(), model=MODEL, sampling=sampling))
        assert job.result(timeout=60).text == TEXT.upper()[:20]
    with redis.Redis.from_url(pool.url) as client:
        keys = JobId.parse(job.id).keys
        assert client.strlen(keys.input(job.id)) < 1024
        assert client.strlen(keys.ids(job.id)) == 4 * len(TEXT)
