"""Requests, neighbours and scarcity for tests of what a batch must not change."""

from __future__ import annotations

import numpy as np
import torch

from tokenmill.shared.messages import Sampling
from tokenmill.workers.engine.batch import StepBatch
from tokenmill.workers.engine.engine import Engine
from tokenmill.workers.engine.request import EngineRequest

OUTPUT = 24
Outputs = dict[str, tuple[int, ...]]


def wanted(seed: int, temperature: float) -> EngineRequest:
    rng = np.random.default_rng(seed)
    return EngineRequest(
        id="wanted",
        token_ids=tuple(int(token) for token in rng.integers(0, 256, 45)),
        sampling=Sampling(max_tokens=OUTPUT, temperature=temperature, ignore_eos=True),
        seed=seed,
    )


def others(like: EngineRequest) -> list[EngineRequest]:
    """Fifteen of many lengths; some begin like the one that is looked at."""
    rng = np.random.default_rng(1000 + like.seed)
    made = []
    for index in range(15):
        shared = like.token_ids[: int(rng.integers(0, 40))] if index % 3 == 0 else ()
        own = rng.integers(0, 256, int(rng.integers(1, 50)))
        made.append(
            EngineRequest(
                id=f"other{index}",
                token_ids=(*shared, *(int(token) for token in own)),
                sampling=Sampling(max_tokens=OUTPUT, temperature=1.0, ignore_eos=True),
                seed=index,
            )
        )
    return made


def small(like: EngineRequest) -> list[EngineRequest]:
    """Two with short prompts and long outputs."""
    sampling = Sampling(max_tokens=60, temperature=1.0, ignore_eos=True)
    return [
        EngineRequest(
            id=f"small{index}",
            token_ids=(index, like.seed, 7),
            sampling=sampling,
            seed=index,
        )
        for index in range(2)
    ]


class Scarce:
    """A runner whose pool is small, or whose memory ends at some number of tokens."""

    def __init__(self, runner: object, num_blocks: int, max_rows: int = 10**6) -> None:
        self._runner = runner
        self.num_blocks = num_blocks
        self._max_rows = max_rows

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def run(self, batch: StepBatch) -> torch.Tensor:
        if len(batch.token_ids) > self._max_rows:
            raise MemoryError("too many rows")
        return self._runner.run(batch)


def drain(engine: Engine) -> Outputs:
    outputs: Outputs = {}
    while engine.has_work:
        for finished in engine.step().finished:
            assert finished.error is None
            outputs[finished.request_id] = finished.choices[0].token_ids
        engine.check_integrity()
    return outputs
