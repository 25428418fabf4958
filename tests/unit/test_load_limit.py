"""A model that hangs while it is loaded, politely and not."""

import asyncio
import subprocess
import sys

import pytest

from tokenmill.shared.errors import ModelLoadError
from tokenmill.workers.load_limit import loaded_within

HANGS = """
import re
from tokenmill.workers import load_limit
load_limit.MARGIN_S = 0.2
with load_limit.ending_after(0.1):
    re.match("(.|.)*y", "x" * 40)
"""


async def _model() -> str:
    return "model"


async def test_what_is_loaded_in_time_is_given() -> None:
    assert await loaded_within(_model(), 60) == "model"


async def test_what_is_not_says_what_to_change() -> None:
    with pytest.raises(ModelLoadError, match=r"within 0\.01 s.*load_timeout_s"):
        await loaded_within(asyncio.Event().wait(), 0.01)


async def test_a_time_out_of_the_loading_itself_stays_what_it_is() -> None:
    async def loading() -> None:
        raise TimeoutError("the store")

    with pytest.raises(TimeoutError, match="the store"):
        await loaded_within(loading(), 5)


def test_what_keeps_pythons_lock_ends_with_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert b"Timeout" in done.stderr
