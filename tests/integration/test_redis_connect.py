"""Connecting, judging the server, and errors by name; on both servers."""

import re

import pytest
import redis.asyncio
from redis import exceptions
from support.servers import free_port, running

from tokenmill.shared.errors import ConfigError, RedisUnavailable, RedisUnsuitable
from tokenmill.shared.redis import connect, redact_url, server_says, translate
from tokenmill.shared.script_runner import broke_on_data
from tokenmill.shared.script_sources import load_script
from tokenmill.shared.server_check import check_server


def findings(found):
    return {f.name: f for f in found}


async def test_a_connection_gives_bytes_and_survives_a_closed_socket(redis_server):
    client = connect(redis_server.url)
    try:
        await client.set("k", "v")
        await client.client_kill_filter(_type="normal", skipme=True)
        pool = client.connection_pool
        assert await client.get("k") == b"v"
        assert pool.connection_kwargs["socket_timeout"] == 5.0
        assert pool.connection_kwargs["socket_keepalive"] is True
        assert pool.connection_kwargs["protocol"] == 2
    finally:
        await client.aclose()


async def test_a_restarted_server_is_found_again():
    with running("8.2") as server:
        client = connect(server.url)
        assert await client.ping()
        server.kill()
        with pytest.raises(RedisUnavailable, match="did not answer"), translate():
            await client.ping()
        server.start()
        assert await client.ping()
        await client.aclose()


async def test_check_server_says_what_is_good_and_bad(redis_server):
    client = connect(redis_server.url)
    try:
        found = findings(await check_server(client))
        assert redis_server.version in found["version"].message
        assert found["version"].severity == "info"
        assert found["role"].severity == "info"
        assert found["maxmemory-policy"].severity == "info"
        assert found["persistence"].severity == "warning"
        assert "appendonly yes" in found["persistence"].cure

        await client.config_set("maxmemory-policy", "allkeys-lru")
        policy = findings(await check_server(client))["maxmemory-policy"]
        assert (policy.severity, "noeviction" in policy.cure) == ("warning", True)
        await client.config_set("maxmemory", "1gb")
        policy = findings(await check_server(client))["maxmemory-policy"]
        assert policy.severity == "error"

        await client.config_set("save", "60 1")
        saved = findings(await check_server(client))["persistence"]
        assert "snapshots alone" in saved.message
    finally:
        await client.config_set("maxmemory", 0)
        await client.config_set("maxmemory-policy", "noeviction")
        await client.config_set("save", "")
        await client.aclose()


async def test_a_server_with_an_append_only_file_says_what_a_crash_costs():
    with running("6.2", "--appendonly", "yes") as server:
        client = connect(server.url)
        kept = findings(await check_server(client))["persistence"]
        assert kept.severity == "info"
        assert "everysec" in kept.message
        assert "last second" in kept.message
        await client.aclose()


async def test_a_replica_is_named_as_read_only(redis_server):
    client = connect(redis_server.url)
    try:
        await client.replicaof("127.0.0.1", free_port())
        assert findings(await check_server(client))["role"].severity == "error"
        with pytest.raises(RedisUnsuitable, match="read-only replica"), translate():
            await client.set("k", "v")
    finally:
        await client.replicaof("NO", "ONE")
        await client.aclose()


@pytest.mark.parametrize("auth", ["", ":wrong-secret@"])
async def test_a_missing_or_wrong_password_is_said_without_showing_it(auth):
    with running("8.2", "--protected-mode", "no") as server:
        admin = redis.asyncio.Redis.from_url(server.url)
        await admin.config_set("requirepass", "right-secret")
        client = connect(server.url.replace("//", f"//{auth}"))
        with (
            pytest.raises(RedisUnsuitable, match="user or password") as caught,
            translate(),
        ):
            await client.ping()
        assert "secret" not in str(caught.value)
        (found,) = await check_server(client)
        assert (found.severity, found.name) == ("error", "access")
        await client.aclose()
        await admin.aclose()


async def test_a_user_without_permission_is_told_which(redis_server):
    admin = redis.asyncio.Redis.from_url(redis_server.url)
    await admin.execute_command("ACL SETUSER low on >pw ~none:* +ping +info")
    client = connect(redis_server.url.replace("//", "//low:pw@"))
    try:
        with pytest.raises(RedisUnsuitable, match="permission"), translate():
            await client.set("k", "v")
    finally:
        await admin.execute_command("ACL DELUSER low")
        await client.aclose()
        await admin.aclose()


async def test_nobody_listening_is_unavailable_and_hides_the_password():
    client = connect(f"redis://:secret@127.0.0.1:{free_port()}/0")
    with pytest.raises(RedisUnavailable) as caught, translate():
        await client.ping()
    assert "secret" not in str(caught.value)
    (found,) = await check_server(client)
    assert (found.severity, found.name) == ("error", "access")
    await client.aclose()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:s3cret@h:1/0", "redis://:***@h:1/0"),
        ("rediss://me:s3cret@h", "rediss://me:***@h"),
        ("redis://me:s3:cr@et@h", "redis://me:***@h"),
        (
            "unix:///run/r.sock?password=s3cret&db=1",
            "unix:///run/r.sock?password=***&db=1",
        ),
        ("redis://me:s3/c?r#et@h:1/0", "redis://me:***@h:1/0"),
        ("redis://us/er:s3cret@h", "redis://us/er:***@h"),
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("not a url", "not a url"),
    ],
)
def test_passwords_never_show(url, shown):
    assert redact_url(url) == shown


def test_a_url_with_a_raw_password_is_refused_without_a_part_of_it():
    with pytest.raises(ConfigError, match="percent-encoded") as caught:
        connect("redis://:hunter/2:three@localhost:1/0")
    assert not [part for part in ("hunter", "three") if part in str(caught.value)]


@pytest.mark.parametrize(
    "url", ["http://host", "localhost:6379", "", "redis://h:port/0"]
)
def test_what_is_no_redis_url_is_a_config_error(url):
    with pytest.raises(ConfigError, match=r"redis\.url"):
        connect(url)


@pytest.mark.parametrize(
    ("error", "kind", "word"),
    [
        (
            exceptions.OutOfMemoryError("OOM command not allowed"),
            RedisUnsuitable,
            "mem",
        ),
        (exceptions.ReadOnlyError("READONLY"), RedisUnsuitable, "replica"),
        (exceptions.ResponseError("MISCONF cannot persist"), RedisUnsuitable, "disk"),
        (exceptions.BusyLoadingError("LOADING"), RedisUnavailable, "loading"),
        (exceptions.TimeoutError("slow"), RedisUnavailable, "answer"),
        (exceptions.ResponseError("ERR odd"), RedisUnsuitable, "odd"),
        (exceptions.MaxConnectionsError("busy"), RedisUnavailable, "answer"),
        (ConnectionResetError("peer"), RedisUnavailable, "reached"),
        (TimeoutError("slow"), RedisUnavailable, "reached"),
    ],
)
def test_errors_of_the_library_become_ours(error, kind, word):
    with pytest.raises(kind, match=word) as caught, translate():
        raise error
    assert caught.value.__cause__ is error


def test_other_errors_pass_unchanged():
    with pytest.raises(KeyError), translate():
        raise KeyError("mine")


def test_a_server_that_runs_a_long_script_is_waited_for():
    error = exceptions.ResponseError("BUSY Redis is busy running a script.")
    with pytest.raises(RedisUnavailable, match="long script"), translate():
        raise error


def test_what_scripts_take_for_a_refusal_of_the_server_is_one_here_too():
    (line,) = re.findall("REFUSALS = {.*}", load_script("emit").source)
    words = re.findall("[A-Z]{3,}", line.removeprefix("REFUSALS"))
    assert len(words) >= 5
    for word in words:
        said = f"ERR user_script:12: {word} no. script: f_1"
        assert server_says(said) == word
        assert not broke_on_data(exceptions.ResponseError(said))
