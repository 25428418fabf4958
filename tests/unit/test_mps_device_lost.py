"""A device that is lost, as when another client of an MPS server has failed."""

import asyncio

import pytest
import torch
from support.engine_driver import request
from support.fake_runner import FakeRunner
from support.waiting import wait_until

from tokenmill.workers.echo import EchoEngine
from tokenmill.workers.engine.detokenizer import TokenTable
from tokenmill.workers.engine.device_errors import is_device_lost
from tokenmill.workers.engine.engine import Engine
from tokenmill.workers.engine.request import StepOutput
from tokenmill.workers.engine_thread import EngineThread, Fault, Report

ILLEGAL = "CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError(ILLEGAL), True),
        (RuntimeError("CUDA error: the MPS client was terminated"), True),
        (RuntimeError("CUDA error: out of memory"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), False),
        (RuntimeError("shapes do not match"), False),
        (ValueError(ILLEGAL), False),
    ],
)
def test_what_is_a_lost_device(error: Exception, lost: bool) -> None:
    assert is_device_lost(error) is lost


def test_a_lost_device_ends_the_step_and_convicts_nobody() -> None:
    runner = FakeRunner(num_blocks=200)
    engine = Engine(runner, TokenTable.for_bytes(), step_target_ms=0.0)
    for name in ("a", "b", "c"):
        engine.add(request(name, [5, 6]))
    engine.step()
    calls = []

    def lost(batch: object) -> torch.Tensor:
        calls.append(batch)
        raise RuntimeError(ILLEGAL)

    runner.run = lost
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.step()
    # Halves that are tried one by one would each raise, and one would be blamed.
    assert len(calls) == 1


class LostEngine(EchoEngine):
    """An engine whose device is gone at its first step."""

    def step(self) -> StepOutput:
        raise RuntimeError(ILLEGAL)


async def test_a_worker_does_not_try_a_lost_device_again() -> None:
    reports: list[Report] = []
    loop = asyncio.get_running_loop()
    thread = EngineThread(LostEngine(), reports.extend, loop)
    thread.start()
    try:
        thread.add([request("a", [5, 6])])
        await wait_until(lambda: reports)
    finally:
        thread.stop(5.0)
    (fault,) = reports
    assert isinstance(fault, Fault)
    assert fault.fatal
    assert fault.engine_ids == ("a",)
