"""A gateway that asks for keys, over a queue that a test plays by hand.

A test module asks for it by `pytest_plugins = "support.keyed_gateway"`.
"""

import pytest

from tokenmill.shared.api_keys import KeyStore, Scope

from .served import gateway_config, served


@pytest.fixture
async def keys(empty_redis):
    """A header for each kind of key."""
    store = KeyStore(empty_redis)
    made = {
        "acme": ("acme", [Scope.READ]),
        "acme-user": ("acme", [Scope.READ, Scope.INFERENCE, Scope.BATCH]),
        "globex": ("globex", [Scope.READ]),
        "submitter": ("acme", [Scope.INFERENCE]),
        "admin": ("ops", [Scope.ADMIN]),
    }
    headers = {}
    for name, (tenant, scopes) in made.items():
        secret, _ = await store.create(tenant, scopes)
        headers[name] = {"Authorization": f"Bearer {secret}"}
    return headers


@pytest.fixture
async def gateway(newest_redis, keys, tmp_path):
    async with served(gateway_config(tmp_path, auth="keys"), newest_redis.url) as made:
        yield made
