"""Where webhooks go: what is looked up, checked, connected to, and trusted."""

import io
import ipaddress
import ssl

import arq
import httpcore
import pytest
import structlog
from support.receiver import receiving
from support.webhook_cases import CONFIG, SECRET, attempt, deliverer, ended

from tokenmill.scheduler.webhook_service import DELIVERER, deliver
from tokenmill.scheduler.webhook_transport import Poster, TargetRefused
from tokenmill.shared.config import LogConfig, WebhooksConfig
from tokenmill.shared.logging import configure
from tokenmill.shared.webhook_target import url_problem
from tokenmill.shared.webhooks import deliveries

pytest_plugins = ("support.certificates", "support.webhook_fixtures")
pytestmark = pytest.mark.usefixtures("trusted")


def answering(*addresses):
    """A server of names that says each of these in turn, then the last for ever."""
    left = [[ipaddress.ip_address(one) for one in many] for many in addresses]

    async def resolve(host, port):
        return left.pop(0) if len(left) > 1 else left[0]

    return resolve


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.0.0.8", "169.254.169.254", "::1", "::ffff:127.0.0.1"]
)
async def test_a_name_that_stands_for_a_private_address_is_refused(shard, address):
    public = WebhooksConfig(secret=SECRET, timeout_s=2)
    async with receiving() as receiver:
        job_id = await ended(shard, receiver.url(host="hooks.example.com"))
        assert await attempt(shard.client, job_id, public, answering([address])) is None
        assert receiver.connections == 0
    (seen,) = await deliveries(shard.client)
    assert seen.state == "given_up"
    assert "no address of the public internet" in (seen.error or "")


async def test_what_was_checked_is_what_is_connected_to(shard, monkeypatch):
    """A name that stands for a public address first and then for a private one."""
    asked, connected = [], []

    async def resolve(host, port):
        asked.append(host)
        return [ipaddress.ip_address("8.8.8.8" if len(asked) == 1 else "127.0.0.1")]

    async def connect(self, host, port, *rest, **more):
        connected.append(host)
        raise httpcore.ConnectError("its network is unreachable")

    monkeypatch.setattr(httpcore.AnyIOBackend, "connect_tcp", connect)
    job_id = await ended(shard, "https://rebind.example.com/hook")
    public = WebhooksConfig(secret=SECRET, timeout_s=2)
    assert await attempt(shard.client, job_id, public, resolve)
    assert (asked, connected) == (["rebind.example.com"], ["8.8.8.8"])
    # Looked up again for the next attempt, and refused then.
    assert await attempt(shard.client, job_id, public, resolve) is None
    assert connected == ["8.8.8.8"]


async def test_the_name_and_not_the_address_stands_in_host(shard):
    async with receiving() as receiver:
        job_id = await ended(shard, receiver.url(host="hooks.example.com"))
        await attempt(shard.client, job_id, CONFIG, answering(["127.0.0.1"]))
    (got,) = receiver.requests
    assert got.headers["host"] == f"hooks.example.com:{receiver.port}"


async def test_a_certificate_is_checked_against_the_name(shard, certificates):
    """TLS by the name in the address, though the connection goes to a number."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.chain, certificates.key)
    async with receiving(ssl=context) as receiver:
        for host in ("hooks.example.com", "other.example.com"):
            job_id = await ended(shard, f"https://{host}:{receiver.port}/", tenant=host)
            await attempt(shard.client, job_id, CONFIG, answering(["127.0.0.1"]))
    (good,) = await deliveries(shard.client, tenant="hooks.example.com")
    (bad,) = await deliveries(shard.client, tenant="other.example.com")
    assert good.state == "delivered"
    assert bad.state == "pending"
    assert "certificate is not trusted" in (bad.error or "")
    assert len(receiver.requests) == 1


LONG_HOST = "https://" + "a" * 64 + ".example.com/hook?token=hidden"


async def test_a_host_that_cannot_be_a_name_is_refused_and_given_up(shard):
    assert "longer than 63" in (url_problem(LONG_HOST, allow_private=True) or "")
    async with Poster(timeout_s=5, allow_private=True) as poster:
        with pytest.raises(TargetRefused, match="cannot be a name"):
            await poster.post(LONG_HOST, {}, b"{}")

    async def resolve(host, port):
        raise UnicodeError("label empty or too long")

    job_id = await ended(shard, "https://odd.example.com/")
    assert await attempt(shard.client, job_id, CONFIG, resolve) is None
    (seen,) = await deliveries(shard.client)
    assert (seen.state, seen.error) == ("given_up", "its host cannot be a name")


async def test_a_failure_of_ours_shows_no_secret_in_a_log_for_people(shard):
    """The form for terminals: its longest one shows local variables."""

    async def resolve(host, port):
        raise ZeroDivisionError("ours")

    job_id = await ended(shard, "https://odd.example.com/?token=hidden", text="private")
    stream = io.StringIO()
    configure(LogConfig(format="console"), "janitor", stream)
    try:
        one, poster = deliverer(shard.client, CONFIG, resolve)
        async with poster:
            with pytest.raises(arq.Retry):
                await deliver({DELIVERER: one}, job_id)
    finally:
        structlog.reset_defaults()
        structlog.contextvars.clear_contextvars()
    told = stream.getvalue()
    assert "webhook_broken" in told
    assert "ZeroDivisionError: ours" in told
    for hidden in (SECRET, "token=hidden", "private"):
        assert hidden not in told
