"""The embedded server's address, over restarts of the pool."""

import socket

import pytest

from tokenmill.shared.pool.embedded import HOST, EmbeddedRedis


async def _address_of_a_run(state_dir) -> str:
    server = EmbeddedRedis(state_dir)
    await server.start()
    try:
        return server.url
    finally:
        await server.stop()
        server.release()


async def test_whoever_holds_the_address_finds_a_restarted_pool(tmp_path) -> None:
    first = await _address_of_a_run(tmp_path)
    assert await _address_of_a_run(tmp_path) == first


async def test_a_port_taken_meanwhile_is_given_up(tmp_path) -> None:
    first = await _address_of_a_run(tmp_path)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port = int(first.rpartition(":")[2].partition("/")[0])
        other.bind((HOST, port))
        other.listen()
        assert await _address_of_a_run(tmp_path) != first


@pytest.mark.parametrize("text", ["", "port x\nrequirepass a\n", "port 70000\n"])
async def test_settings_that_name_no_address_are_not_used(tmp_path, text) -> None:
    (tmp_path / "redis").mkdir()
    (tmp_path / "redis" / "redis.conf").write_text(text)
    assert "redis://:" in await _address_of_a_run(tmp_path)
