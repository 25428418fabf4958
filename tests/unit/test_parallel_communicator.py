"""What ranks say to each other: sums in one order, plans of any size, and losses."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.ranks import Ranks

from tokenmill.shared.errors import GroupLost
from tokenmill.workers.engine.parallel.communicator import (
    FRAME_BYTES,
    ONE_ROUND_BYTES,
    connect_group,
)
from tokenmill.workers.engine.parallel.shard import Shard


@pytest.fixture(scope="module", params=[2, 4])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranks]:
    place = tmp_path_factory.mktemp("ranks") / "rendezvous"
    with Ranks(request.param, place) as made:
        yield made


def values(rank: int, rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of sizes so different that another order of summation gives other bits."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(rows, 96, generator=generator) * 10.0 ** (3 - 2 * rank)
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 7, 400])
def test_sums_are_made_in_the_order_of_ranks(
    ranks: Ranks, rows: int, dtype: torch.dtype
) -> None:
    expected = values(0, rows, dtype).float()
    for rank in range(1, ranks.size):
        expected = expected + values(rank, rows, dtype).float()
    large = rows * 96 * 4 > ONE_ROUND_BYTES
    assert large == (rows == 400)  # both ways to exchange are taken
    for total in ranks.each(lambda end: end.all_reduce(values(end.rank, rows, dtype))):
        assert torch.equal(total, expected.to(dtype))


def test_a_row_has_the_same_bits_in_tensors_of_any_size(ranks: Ranks) -> None:
    few, many = (
        ranks.each(lambda end, rows=rows: end.all_reduce(values(end.rank, 400)[:rows]))
        for rows in (3, 400)
    )
    assert torch.equal(few[0], many[0][:3])


def test_a_sum_is_in_place(ranks: Ranks) -> None:
    def summed(end) -> bool:
        x = torch.ones(5, 3)
        end.all_reduce(x)
        return bool((x == ranks.size).all())

    assert all(ranks.each(summed))


def test_columns_of_different_widths_come_together_on_rank_0(ranks: Ranks) -> None:
    widths = tuple(range(3, 3 + ranks.size))
    found = ranks.each(
        lambda end: end.gather(
            torch.full((2, widths[end.rank]), float(end.rank)), widths
        )
    )
    assert found[1:] == [None] * (ranks.size - 1)
    row = [float(rank) for rank, width in enumerate(widths) for _ in range(width)]
    assert found[0].tolist() == [row, row]


@pytest.mark.parametrize("size", [0, 1, FRAME_BYTES - 8, FRAME_BYTES, 5 * FRAME_BYTES])
def test_bytes_of_any_length_reach_all(ranks: Ranks, size: int) -> None:
    data = bytes(index % 251 for index in range(size))
    heard = ranks.each(lambda end: end.broadcast_bytes(None if end.rank else data))
    assert heard == [data] * ranks.size


def test_ranks_learn_each_others_numbers(ranks: Ranks) -> None:
    large = 2**62
    found = ranks.each(lambda end: end.numbers(large - end.rank))
    assert found == [tuple(large - rank for rank in range(ranks.size))] * ranks.size


def test_a_rank_that_leaves_is_noticed_at_once(tmp_path: Path) -> None:
    """Long before any time-out, both in a step and while one waits for a plan."""
    with Ranks(3, tmp_path / "rendezvous", timeout_s=60.0) as ranks:
        waiting = ranks.start(1, lambda end: end.broadcast_bytes())
        summing = ranks.start(2, lambda end: end.all_reduce(torch.ones(4)))
        began = time.monotonic()
        ranks.ends[0].close()
        for future in (waiting, summing):
            with pytest.raises(GroupLost, match="another rank is dead"):
                future.result(timeout=30)
        assert time.monotonic() - began < 30
        with pytest.raises(GroupLost, match="has left its group"):
            ranks.ends[2].all_reduce(torch.ones(4))


def test_a_rank_that_hangs_is_noticed_within_the_time_out(tmp_path: Path) -> None:
    with Ranks(2, tmp_path / "rendezvous", timeout_s=0.5) as ranks:
        began = time.monotonic()
        with pytest.raises(GroupLost, match=r"did not answer within 0\.5 s"):
            ranks.ends[0].all_reduce(torch.ones(4))  # and rank 1 says nothing
        assert time.monotonic() - began < 30


def test_a_plan_may_be_waited_for_longer_than_a_sum(tmp_path: Path) -> None:
    with Ranks(2, tmp_path / "rendezvous", timeout_s=0.2) as ranks:
        waiting = ranks.start(1, lambda end: end.broadcast_bytes())
        with pytest.raises(TimeoutError):
            waiting.result(timeout=1.0)
        ranks.ends[0].broadcast_bytes(b"go on")
        assert waiting.result(timeout=30) == b"go on"


def test_a_group_that_does_not_come_together_says_so(tmp_path: Path) -> None:
    with pytest.raises(GroupLost, match="rank 1 did not find the other 1"):
        connect_group(Shard(1, 2), tmp_path / "alone", connect_timeout_s=0.3)


def test_a_killed_process_is_noticed_at_once(tmp_path: Path) -> None:
    """A real process, killed while rank 0 waits for it in a sum."""
    place = tmp_path / "rendezvous"
    code = (
        "import os, signal, sys\n"
        "from tokenmill.workers.engine.parallel.communicator import connect_group\n"
        "from tokenmill.workers.engine.parallel.shard import Shard\n"
        f"end = connect_group(Shard(1, 2), {str(place)!r}, connect_timeout_s=240)\n"
        "assert end.broadcast_bytes() == b'die'\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as other:
        patience = {"timeout_s": 60.0, "connect_timeout_s": 240.0}  # it imports torch
        end = connect_group(Shard(0, 2), place, **patience)
        end.broadcast_bytes(b"die")
        began = time.monotonic()
        with pytest.raises(GroupLost):
            end.all_reduce(torch.ones(4))
        assert time.monotonic() - began < 30
        assert other.wait(timeout=30) == -9
