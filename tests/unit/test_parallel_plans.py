"""What the leader tells its followers of a step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.ranks import Ranks

from tokenmill.shared.errors import EngineError
from tokenmill.workers.engine.batch import SequenceSlice, StepBatch
from tokenmill.workers.engine.parallel.plans import decode, encode
from tokenmill.workers.engine.parallel.runner import LeadingRunner, follow


def batch(**changes: object) -> StepBatch:
    fields = {
        "token_ids": np.array([5, 150_000, 7], np.int64),
        "positions": np.array([0, 1, 9], np.int64),
        "slices": (
            SequenceSlice(0, 2, 2, (70_000,), 40),
            SequenceSlice(2, 1, 10, (3, 1), 4),
        ),
        "logit_rows": np.array([2], np.int64),
    }
    return StepBatch(**{**fields, **changes})


@pytest.mark.parametrize("adapters", [(), ("7", None)])
@pytest.mark.parametrize("rows", [np.array([2], np.int64), np.array([], np.int64)])
def test_a_batch_comes_back_as_it_was(
    rows: np.ndarray, adapters: tuple[str | None, ...]
) -> None:
    told = batch(logit_rows=rows, adapters=adapters)
    heard = decode(encode(told))
    assert heard.slices == told.slices
    assert heard.adapters == told.adapters
    for name in ("token_ids", "positions", "logit_rows"):
        mine, theirs = getattr(heard, name), getattr(told, name)
        assert mine.dtype == theirs.dtype == np.int64
        assert mine.tolist() == theirs.tolist()


def test_nothing_of_a_batch_is_left_out() -> None:
    """A new field has to be sent."""
    assert StepBatch.__struct_fields__ == (
        *("token_ids", "positions", "slices", "logit_rows"),
        "adapters",
    )


def test_adapters_are_told_by_what_followers_know_them_by(tmp_path: Path) -> None:
    runners = [Recording() for _ in range(2)]
    told = batch(adapters=("polite@0", None))
    with Ranks(2, tmp_path / "rendezvous") as ranks:
        following = ranks.start(1, lambda end: follow(runners[1], end))
        leading = LeadingRunner(runners[0], ranks.ends[0])
        with pytest.raises(EngineError, match="this group serves none"):
            leading.run(told)
        leading.adapters = SimpleNamespace(tickets=lambda _: ("7", None))
        leading.run(told)
        leading.close()
        following.result(timeout=30)
    assert [one.batches[0].adapters for one in runners] == [
        ("polite@0", None),
        ("7", None),
    ]
    assert runners[0].adapters is leading.adapters


class Recording:
    """A runner that keeps what it was given."""

    vocab_size = 11

    def __init__(self) -> None:
        self.batches: list[StepBatch] = []

    def run(self, told: StepBatch) -> torch.Tensor:
        self.batches.append(told)
        return torch.zeros(len(told.logit_rows), self.vocab_size)


def test_followers_run_what_the_leader_runs_until_it_ends(tmp_path: Path) -> None:
    runners = [Recording() for _ in range(3)]
    with Ranks(3, tmp_path / "rendezvous") as ranks:
        following = [
            ranks.start(rank, lambda end, own=runners[rank]: follow(own, end))
            for rank in (1, 2)
        ]
        leading = LeadingRunner(runners[0], ranks.ends[0])
        assert leading.vocab_size == 11
        told = batch(token_ids=np.array([1, 2, 3], np.int64))
        for one in (batch(), told):
            assert leading.run(one).shape == (1, 11)
        leading.close()
        leading.close()  # says it once
        for future in following:
            future.result(timeout=30)
    for runner in runners:
        assert [one.token_ids.tolist() for one in runner.batches] == [
            [5, 150_000, 7],
            [1, 2, 3],
        ]


def test_a_follower_does_not_guess_what_it_does_not_know(tmp_path: Path) -> None:
    with Ranks(2, tmp_path / "rendezvous") as ranks:
        following = ranks.start(1, lambda end: follow(Recording(), end))
        ranks.ends[0].broadcast_bytes(b"?")
        with pytest.raises(EngineError, match="same version"):
            following.result(timeout=30)
        with pytest.raises(EngineError, match="rank 1 cannot lead"):
            LeadingRunner(Recording(), ranks.ends[1])
        lost = LeadingRunner(Recording(), ranks.ends[0])
        ranks.ends[0].close()
        lost.close()  # nobody is left to be told
