"""A pool with a janitor, for a module that has
`pytest_plugins = "support.bulk_fixture"`.
"""

from collections.abc import Iterator

import pytest

from .bulk_late import Late
from .bulk_pool import BulkPool
from .pools import up


@pytest.fixture(scope="session")
def bulk_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BulkPool]:
    """A pool of real processes whose engine answers with the prompt."""
    with up(tmp_path_factory.mktemp("pool"), janitor=True) as process:
        made = BulkPool(process)
        yield made
        made.redis.close()


@pytest.fixture
def late(bulk_pool: BulkPool) -> Iterator[Late]:
    """A model that nobody serves yet."""
    made = Late(bulk_pool)
    try:
        yield made
    finally:
        made.end()
