"""Chromium for tests: where it is, pages that must not complain, screenshots."""

import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from playwright.sync_api import Browser, Page

from tokenmill.shared.keys import HISTORY
from tokenmill.shared.watch.snapshot import HistorySample

from .waiting import PATIENCE_S

ARTIFACTS = Path(os.environ.get("TOKENMILL_ARTIFACTS", "test-artifacts"))
NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
STEP_MS = 20
"""A token, which is a byte, of the echo engine."""


def chromium() -> str:
    """Where a Chromium is. Without one a test is skipped, or fails if one must be."""
    found = os.environ.get("TOKENMILL_CHROMIUM") or next(
        filter(None, map(shutil.which, NAMES)), None
    )
    if found is None:
        reason = f"no browser: set TOKENMILL_CHROMIUM, or install one of {NAMES}"
        if os.environ.get("TOKENMILL_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return found


Visit = Callable[..., Page]
"""Opens a page: base address, path, and the options of `open_page`."""


def write_history(url: str) -> None:
    """An hour of samples, as a janitor notes them."""
    now_ms = time.time_ns() // 1_000_000
    with redis.Redis.from_url(url) as client:
        for index in range(360):
            sample = HistorySample(
                at_ms=now_ms - (360 - index) * 10_000,
                tokens_per_s=100.0 + index % 60,
                jobs_per_s=2.0,
                waiting={"interactive": index % 7, "bulk": 90 - index // 4},
                running=index % 16,
                ttft_p50_ms=40.0 + index % 9,
                ttft_p95_ms=90.0 + index % 17,
                ttft_p99_ms=140.0,
                total_p50_ms=700.0,
                total_p95_ms=1900.0 + index,
                total_p99_ms=2600.0,
            )
            client.xadd(HISTORY, {"s": msgspec.json.encode(sample)})


def open_page(
    stack: ExitStack,
    browser: Browser,
    base: str,
    path: str,
    *,
    width: int = 1280,
    theme: Any = "light",
    expected: str | None = None,
    **options: Any,
) -> Page:
    is_phone = width < 500
    context = browser.new_context(
        viewport={"width": width, "height": 844 if is_phone else 900},
        is_mobile=is_phone,
        has_touch=is_phone,
        color_scheme=theme,
        **options,
    )
    stack.callback(context.close)
    page = context.new_page()
    page.set_default_timeout(1000 * PATIENCE_S)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(f"page error: {error}"))
    page.on(
        "console",
        lambda message: (
            complaints.append(message.text)
            if message.type in ("error", "warning")
            else None
        ),
    )
    page.on(
        "request",
        lambda request: (
            None
            if request.url.startswith(f"{base}/")
            else complaints.append(f"asked another origin: {request.url}")
        ),
    )

    def check() -> None:
        left = [c for c in complaints if not (expected and re.search(expected, c))]
        assert left == []

    stack.callback(check)
    page.goto(base + path)
    return page


def shoot(page: Page, name: str) -> None:
    """Writes a screenshot as an artefact."""
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=ARTIFACTS / f"{name}.png", full_page=True)
