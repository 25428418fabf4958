"""Finding a pool, and not trusting what others could have written."""

import os

import pytest

from tokenmill.shared.config import Config, PoolConfig
from tokenmill.shared.connection import (
    ConnectionFile,
    find_pool,
    state_dir,
    write_connection,
)
from tokenmill.shared.errors import RedisUnavailable

DEAD_PID = 2**22 - 3


@pytest.fixture
def environ(tmp_path, monkeypatch) -> dict[str, str]:
    monkeypatch.chdir(tmp_path)
    return {"TOKENMILL_POOL_STATE_DIR": str(tmp_path)}


def test_an_explicit_url_goes_first(environ) -> None:
    environ["TOKENMILL_URL"] = "redis://b"
    assert find_pool("redis://a", environ) == "redis://a"
    assert find_pool(None, environ) == "redis://b"


def test_the_setting_goes_before_the_file(environ, tmp_path) -> None:
    write_connection(tmp_path, ConnectionFile(url="redis://file", pid=os.getpid()))
    assert find_pool(None, environ) == "redis://file"
    environ["TOKENMILL_REDIS_URL"] = "redis://setting"
    assert find_pool(None, environ) == "redis://setting"


def test_the_file_is_private(tmp_path) -> None:
    path = write_connection(tmp_path, ConnectionFile(url="redis://x", pid=1))
    assert path.stat().st_mode & 0o777 == 0o600


def test_without_a_pool_the_error_says_how_to_start_one(environ) -> None:
    with pytest.raises(RedisUnavailable, match="tokenmill up"):
        find_pool(None, environ)


def test_the_file_of_a_dead_pool_is_ignored(environ, tmp_path) -> None:
    write_connection(tmp_path, ConnectionFile(url="redis://old", pid=DEAD_PID))
    with pytest.raises(RedisUnavailable, match="no pool found"):
        find_pool(None, environ)


def test_a_file_that_others_can_write_is_not_trusted(environ, tmp_path) -> None:
    path = write_connection(tmp_path, ConnectionFile(url="redis://x", pid=os.getpid()))
    path.chmod(0o666)
    with pytest.raises(RedisUnavailable, match="can be read or written by others"):
        find_pool(None, environ)


def test_garbage_in_the_file_is_said(environ, tmp_path) -> None:
    path = write_connection(tmp_path, ConnectionFile(url="redis://x", pid=os.getpid()))
    path.write_bytes(b"{nonsense")
    with pytest.raises(RedisUnavailable, match="not a connection file"):
        find_pool(None, environ)


def test_the_state_directory_follows_setting_and_xdg(tmp_path) -> None:
    config = Config(pool=PoolConfig(state_dir=str(tmp_path)))
    assert state_dir(config) == tmp_path
    xdg = state_dir(Config(), {"XDG_STATE_HOME": "/somewhere"})
    assert str(xdg) == "/somewhere/tokenmill"
