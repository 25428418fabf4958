"""Fixtures of tests that deliver webhooks.

A test module asks for them by `pytest_plugins = "support.webhook_fixtures"`.
"""

import ssl

import httpx
import pytest

TRUSTED = ssl.create_default_context()


@pytest.fixture
def trusted(request, monkeypatch):
    """Reading the system's certificates takes longer than all else here."""
    if "certificates" not in request.fixturenames:
        monkeypatch.setattr(httpx, "create_ssl_context", lambda: TRUSTED)
