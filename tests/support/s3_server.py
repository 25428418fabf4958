"""A server on this host that speaks S3, with one empty bucket."""

import atexit
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager

from .servers import free_port

BUCKET = "inputs"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test-key",
    "AWS_SECRET_ACCESS_KEY": "test-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@functools.cache
def _endpoint() -> str:
    """Starts the server, one for this process: what it holds is global there, and
    file systems that were opened keep its address."""
    from moto.server import ThreadedMotoServer

    port = free_port()
    server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
    server.start()
    atexit.register(server.stop)
    return f"http://127.0.0.1:{port}"


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Yields the environment in which the server is found; it is set here as well."""
    env = {**CREDENTIALS, "AWS_ENDPOINT_URL": _endpoint()}
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        import s3fs

        files = s3fs.S3FileSystem(skip_instance_cache=True)
        files.makedirs(BUCKET, exist_ok=True)
        yield env
        files.invalidate_cache()
        files.rm(BUCKET, recursive=True)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
