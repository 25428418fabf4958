"""Addresses of webhooks, their signatures, and what is said at submit."""

import base64
import hashlib
import hmac
import ipaddress
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill import Prompt
from tokenmill.scheduler.webhook_events import body_of
from tokenmill.shared.config import Config, WebhooksConfig
from tokenmill.shared.config_load import load_config
from tokenmill.shared.errors import ConfigError, InvalidRequest
from tokenmill.shared.messages import Delta, End, PoolCard, Usage, encode
from tokenmill.shared.pool_card import pool_card
from tokenmill.shared.script_sources import load_script
from tokenmill.shared.validate import validate_prompt
from tokenmill.shared.webhook_signing import secret_problem, sign, verify
from tokenmill.shared.webhook_target import is_public, shown_target, url_problem

PUBLIC = PoolCard(webhooks="public")


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/hook",
        "http://example.com",
        "https://example.com:8443/a/b?token=x%20y",
        "https://hooks_1.example.com./",
        "https://8.8.8.8/",
        "https://[2606:4700:4700::1111]/x",
        "http://example.com:80/",
        "HTTPS://EXAMPLE.COM/",
    ],
)
def test_good_addresses_pass(url):
    assert url_problem(url, allow_private=False) is None
    validate_prompt(Prompt("x", webhook=url), None, PUBLIC)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "0 characters"),
        ("https://example.com/" + "x" * 2048, "2068 characters"),
        ("https://example.com/a b", "printable ASCII"),
        ("https://example.com/\r\nx: y", "printable ASCII"),
        ("https://exämple.com/", "printable ASCII"),
        ("ftp://example.com/", "neither http nor https"),
        ("file:///etc/passwd", "neither http nor https"),
        ("gopher://127.0.0.1:6379/_x", "neither http nor https"),
        ("https://", "names no host"),
        ("https:///x", "names no host"),
        ("https://a..b/", "names no host"),
        ("https://-x/", "names no host"),
        ("https://[::1", "cannot be read"),
        ("https://x:port/", "cannot be read"),
        ("https://x:99999/", "cannot be read"),
        ("https://x:0/", "port is 0"),
        ("https://user:pw@example.com/", "user or password"),
        ("https://user@example.com/", "user or password"),
        ("https://example.com/#part", "fragment"),
        ("https://example.com:22/", "port 22"),
        ("https://example.com:25/", "port 25"),
        ("http://localhost/", "public internet"),
        ("http://localhost.:8080/", "public internet"),
        ("http://metadata.google.internal/", "public internet"),
        ("http://printer.local/", "public internet"),
        ("http://127.0.0.1/", "public internet"),
        ("http://169.254.169.254/latest", "public internet"),
        ("http://[::1]/", "public internet"),
        ("http://[::ffff:10.0.0.1]/", "public internet"),
        ("http://[fe80::1%25eth0]/", "public internet"),
        ("http://0.0.0.0/", "public internet"),
    ],
)
def test_bad_addresses_are_refused_by_name(url, words):
    problem = url_problem(url, allow_private=False)
    assert problem is not None
    assert words in problem
    for secret in ("pw", "x: y", "port/"):
        assert secret not in problem
    with pytest.raises(InvalidRequest, match="webhook: "):
        validate_prompt(Prompt("x", webhook=url), None, PUBLIC)


def test_private_addresses_and_any_port_pass_where_they_are_allowed():
    for url in ("http://localhost:22/", "http://10.0.0.1/", "http://[::1]:99/"):
        assert url_problem(url, allow_private=True) is None
    for url in ("ftp://localhost/", "http://a:b@localhost/", "http://x/#y"):
        assert url_problem(url, allow_private=True) is not None


def test_no_address_takes_long_to_refuse():
    begun = time.process_time()
    for part in ("a-", "a.", "_", "-", "1.", "[", "@", "%"):
        url_problem(f"https://{part * 1000}!", allow_private=False)
    assert time.process_time() - begun < 1


@given(st.text(max_size=60))
def test_no_text_breaks_the_check(text):
    for url in (text, f"https://{text}", f"https://x{text}/", f"https://x/{text}"):
        problem = url_problem(url, allow_private=False)
        assert problem is None or problem.isprintable()
        assert shown_target(url)


@pytest.mark.parametrize(
    "address",
    [
        *("0.0.0.0", "10.1.2.3", "100.64.0.1", "100.127.255.255", "127.0.0.1"),
        *("127.255.255.255", "169.254.169.254", "172.16.0.1", "172.31.255.255"),
        *("192.0.0.1", "192.0.2.1", "192.88.99.1", "192.168.1.1", "198.18.0.1"),
        *("198.19.255.255", "198.51.100.1", "203.0.113.1", "224.0.0.1"),
        *("239.255.255.255", "240.0.0.1", "255.255.255.255"),
        *("::", "::1", "::ffff:8.8.8.8", "::ffff:127.0.0.1", "::8.8.8.8"),
        *("64:ff9b::8.8.8.8", "64:ff9b:1::1", "100::1", "2001::1", "2001:db8::1"),
        *("2002:7f00:1::1", "3fff::1", "5f00::1", "fc00::1", "fd12::1"),
        *("fe80::1", "fec0::1", "ff02::1", "fe80::1%eth0", "2606:4700::1%1"),
    ],
)
def test_addresses_that_are_not_public(address):
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address",
    [
        *("1.1.1.1", "8.8.8.8", "100.63.255.255", "100.128.0.1", "172.32.0.1"),
        *("192.0.1.1", "198.17.0.1", "223.255.255.255", "93.184.215.14"),
        *("2606:4700:4700::1111", "2a00:1450:4001:81b::200e", "2400:cb00::1"),
    ],
)
def test_addresses_that_are_public(address):
    assert is_public(ipaddress.ip_address(address))


def test_only_scheme_host_and_port_are_shown():
    shown = shown_target("https://u:pw@example.com:8443/secret/path?key=1")
    assert shown == "https://example.com:8443"
    assert shown_target("http://[::1]/x") == "http://[::1]"
    assert "pw" not in shown_target("https://u:pw")


def test_signatures_are_those_of_the_standard():
    raw = b"0123456789abcdefghijklmn"
    secret = "whsec_" + base64.b64encode(raw).decode()
    headers = sign([secret], "msg_1", 1700000000, b'{"a":1}')
    mac = hmac.new(raw, b'msg_1.1700000000.{"a":1}', hashlib.sha256).digest()
    assert headers == {
        "webhook-id": "msg_1",
        "webhook-timestamp": "1700000000",
        "webhook-signature": "v1," + base64.b64encode(mac).decode(),
    }
    assert verify(secret, headers, b'{"a":1}', now_s=1700000299)
    assert not verify(secret, headers, b'{"a":1}', now_s=1700000301)
    assert not verify(secret, headers, b'{"a":1}', now_s=1699999699)
    other = {**headers, "webhook-id": "msg_2"}
    assert not verify(secret, other, b'{"a":1}', now_s=1700000000)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"webhook-timestamp": "now"},
        {"webhook-id": "a", "webhook-timestamp": "1", "webhook-signature": ""},
        {"webhook-id": "a", "webhook-timestamp": "1", "webhook-signature": "v1,ü"},
    ],
)
def test_headers_that_prove_nothing_are_refused(headers):
    assert not verify("a secret of sixteen", headers, b"", now_s=1.0)


@pytest.mark.parametrize("secret", ["", "short", "whsec_", "whsec_c2hvcnQ=", "whsec_%"])
def test_a_weak_secret_is_refused_and_not_shown(secret):
    assert secret_problem(secret) is not None
    with pytest.raises(ConfigError) as caught:
        load_config(environ={"TOKENMILL_WEBHOOKS_SECRET": secret})
    assert caught.value.key == "webhooks.secret"
    assert "short" not in str(caught.value)
    assert "c2hvcnQ" not in str(caught.value)


def test_a_secret_is_never_shown(tmp_path):
    secret = "sixteen characters at least"
    shown = load_config(environ={"TOKENMILL_WEBHOOKS_SECRET": secret}).rows()
    assert ("webhooks.secret", "***", "TOKENMILL_WEBHOOKS_SECRET") in shown
    assert secret not in str(shown)
    file = tmp_path / "t.toml"
    file.write_text("[webhooks]\nsecret = 1234567890123456789\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file, environ={})
    assert "1234567890" not in str(caught.value)


def test_a_pool_says_which_webhooks_it_delivers():
    assert pool_card(Config()).webhooks == "none"
    secret = "sixteen characters at least"
    hooks = WebhooksConfig(secret=secret)
    card = pool_card(Config(webhooks=hooks))
    assert card.webhooks == "public"
    assert secret.encode() not in encode(card)
    hooks = WebhooksConfig(secret=secret, allow_private=True)
    assert pool_card(Config(webhooks=hooks)).webhooks == "any"


def test_a_pool_without_a_secret_takes_no_webhook():
    prompt = Prompt("x", webhook="https://example.com/")
    with pytest.raises(InvalidRequest, match=r"webhooks\.secret") as caught:
        validate_prompt(prompt, None, PoolCard())
    assert caught.value.field == "webhook"
    private = Prompt("x", webhook="http://127.0.0.1:9/")
    validate_prompt(private, None, PoolCard(webhooks="any"))


def test_the_scripts_find_the_usage_where_end_markers_have_it():
    """`usage.lua` looks for these very bytes."""
    usage = Usage(prompt_tokens=7, completion_tokens=6)
    marker = encode(Delta(end=End(state="failed", usage=usage)))
    assert b'"usage":{"prompt_tokens":7,"completion_tokens":6}' in marker
    pattern = '"usage":{"prompt_tokens":(%d+),"completion_tokens":(%d+)}'
    assert pattern in load_script("finish").source


def test_a_body_names_type_moment_and_data():
    body = body_of("job.failed", 1700000000123, b'{"id":"a"}', {"output": []})
    assert body == (
        b'{"type":"job.failed","timestamp":"2023-11-14T22:13:20.123Z",'
        b'"data":{"id":"a","output":[]}}'
    )
