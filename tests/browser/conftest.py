"""A pool, a gateway with keys and one without, and a Chromium to look at them with."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from playwright.sync_api import Browser, Playwright, expect, sync_playwright
from support.browser_pages import (
    ARGUMENTS,
    STEP_MS,
    Visit,
    chromium,
    open_page,
    write_history,
)
from support.gateway_thread import RunningGateway, serving
from support.pools import UpProcess, up
from support.waiting import PATIENCE_S

from tokenmill import SyncClient


@pytest.fixture(scope="package")
def playwright() -> Iterator[Playwright]:
    chromium()
    expect.set_options(timeout=1000 * PATIENCE_S)
    with sync_playwright() as running:
        yield running


@pytest.fixture(scope="package")
def browser(playwright: Playwright) -> Iterator[Browser]:
    launched = playwright.chromium.launch(
        executable_path=chromium(), args=list(ARGUMENTS)
    )
    yield launched
    launched.close()


@pytest.fixture(scope="package")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    chromium()
    directory = tmp_path_factory.mktemp("pool")
    with up(directory, engine=f"echo:{STEP_MS}") as running:
        write_history(running.url)
        yield running


@pytest.fixture(scope="package")
def mill(pool: UpProcess) -> Iterator[SyncClient]:
    with SyncClient(pool.url) as client:
        yield client


@pytest.fixture(scope="package")
def gateway(pool: UpProcess) -> Iterator[RunningGateway]:
    """One that asks nobody for a key."""
    with serving(pool.url, pool.directory / "open") as running:
        yield running


@pytest.fixture(scope="package")
def guarded(pool: UpProcess) -> Iterator[RunningGateway]:
    """One that asks everybody."""
    with serving(pool.url, pool.directory / "guarded", auth="keys") as running:
        yield running


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    """Opens pages, and holds against each that it complained of nothing.

    Every page must leave its console without errors, and may ask no other origin for
    anything. `expected` is a pattern of console errors that the test provokes.
    """
    with ExitStack() as stack:
        yield lambda base, path="/dashboard/", **options: open_page(
            stack, browser, base, path, **options
        )
