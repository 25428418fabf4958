"""Holds a merged model against its base with the adapter beside it, by their logits."""

from __future__ import annotations

import gc
import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import torch

from ....shared.errors import ModelLoadError
from ..batch import SequenceSlice, StepBatch
from ..model.budget import free_memory
from ..model.headers import read_headers
from ..model.load import load_runner
from .serving import serve_adapters

if TYPE_CHECKING:
    from ..model.headers import StoredTensor
    from ..model.quantize import Weights
    from ..model.runner import TransformersRunner

TOLERANCES: Final = {"F64": 1e-3, "F32": 1e-3, "F16": 1e-2, "BF16": 5e-2}
"""How far logits may be off, as a share of their spread, by the checkpoint's type: what
rounding every merged weight to it comes to, with room."""
_OF_EFFECT: Final = 0.5
"""Share of what the adapter does that they may be off by besides: a merge that left it
out, or whose rounding lost it, would be within the tolerance of a small one."""
_NOISE: Final = 2e-5
"""Of another order of sums; an adapter without effect does not have to stay below."""
_SAME_TYPE: Final[dict[str, Weights]] = {"F16": "float16", "BF16": "bfloat16"}
_PROMPTS: Final = 2
_LENGTH: Final = 24
_BLOCK: Final = 8
_KEY: Final = "merged"
_ROOM: Final = 0.8
"""Share of free memory that float32 weights may take."""


class MergeCheck(msgspec.Struct, frozen=True, kw_only=True):
    """How a merged model compares; shares are of the spread of the logits."""

    off: float
    """Between the merged model and base plus adapter, root mean square."""
    effect: float
    """Between base plus adapter and the base alone."""
    tolerance: float
    """What `off` may be."""
    weights: str
    """Precision in which all were computed."""
    positions: int
    """Tokens whose logits were compared."""

    @property
    def passed(self) -> bool:
        """Whether the merged model is what it should be."""
        return math.isfinite(self.off) and self.off <= self.tolerance


def check_merged(
    base: Path,
    adapter: Path,
    digest: str,
    merged: Path,
    *,
    tolerance: float | None = None,
    threads: int | None = None,
) -> MergeCheck:
    """Compares logits of a merged model with those of base plus adapter.

    Args:
        base: The base's directory.
        adapter: The adapter's.
        digest: The adapter's, as it was merged.
        merged: The merged model's.
        tolerance: How far they may be off; None goes by the checkpoint's type and by
            what the adapter does.
        threads: Compute threads; None is all cores.

    Raises:
        ModelLoadError: One of them cannot be loaded.
    """
    stored = read_headers(base)
    kind = Counter(tensor.dtype for tensor in stored.values()).most_common(1)[0][0]
    weights = _precision(kind, stored)
    runner = _load(base, weights, threads)
    tokens = _tokens(runner)
    alone = _logits(runner, tokens, None, f"of {base}: it is damaged")
    cache = serve_adapters(runner, max_bytes=free_memory().size, max_rank=None)
    with cache.load(_KEY, adapter, digest):
        blame = f"with {adapter}: its training diverged, or its lora_alpha is wrong"
        beside = _logits(runner, tokens, _KEY, blame)
    del cache, runner
    _let_go()
    blame = "of the merged model, unlike those of base plus adapter: serve it unmerged"
    inside = _logits(_load(merged, weights, threads), tokens, None, blame)
    spread = float((beside - beside.mean(dim=1, keepdim=True)).square().mean().sqrt())
    effect = _distance(beside, alone) / max(spread, 1e-30)
    if tolerance is None:
        tolerance = min(TOLERANCES[kind], max(_OF_EFFECT * effect, _NOISE))
    return MergeCheck(
        off=_distance(inside, beside) / max(spread, 1e-30),
        effect=effect,
        tolerance=tolerance,
        weights=weights,
        positions=len(beside),
    )


def _precision(kind: str, stored: dict[str, StoredTensor]) -> Weights:
    """Returns float32 where there is memory for it, else the checkpoint's own type,
    whose weights stay in the mapped file.
    """
    needed = 4 * sum(tensor.size for tensor in stored.values())
    if kind not in _SAME_TYPE or needed < _ROOM * free_memory().size:
        return "float32"
    return _SAME_TYPE[kind]


def _load(path: Path, weights: Weights, threads: int | None) -> TransformersRunner:
    return load_runner(
        path,
        weights=weights,
        kv="float32",
        block_size=_BLOCK,
        num_blocks=_PROMPTS * _LENGTH // _BLOCK,
        threads=threads,
        device="cpu",
        calibration=None,
    )


def _let_go() -> None:
    """Frees a model that is used no more; loading had it kept for good."""
    gc.unfreeze()
    gc.collect()


def _tokens(runner: TransformersRunner) -> np.ndarray:
    """int64 [prompts, length] of any ids: every weight is passed through."""
    length = min(_LENGTH, runner.max_context)
    generator = np.random.default_rng(0)
    return generator.integers(0, runner.vocab_size, (_PROMPTS, length))


def _logits(
    runner: TransformersRunner, tokens: np.ndarray, key: str | None, blame: str
) -> torch.Tensor:
    """Returns the logits of every token, float64 [tokens, vocab_size].

    Raises:
        ModelLoadError: They are not finite; `blame` completes the message.
    """
    prompts, length = tokens.shape
    per_prompt = -(-length // _BLOCK)
    slices = tuple(
        SequenceSlice(
            query_start=index * length,
            query_length=length,
            context_length=length,
            block_table=tuple(range(index * per_prompt, (index + 1) * per_prompt)),
            prompt_length=length,
        )
        for index in range(prompts)
    )
    batch = StepBatch(
        token_ids=tokens.reshape(-1),
        positions=np.tile(np.arange(length), prompts),
        slices=slices,
        logit_rows=np.arange(prompts * length),
        adapters=() if key is None else (key,) * prompts,
    )
    logits = runner.run(batch).double()
    if not bool(torch.isfinite(logits).all()):
        raise ModelLoadError(f"logits are not finite {blame}")
    return logits


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).square().mean().sqrt())
