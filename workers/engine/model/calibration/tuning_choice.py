"""Decides what is done to a model's weights, from its calibration or without one.

Without a calibration keys and values are smoothed by what the weights alone tell. The
exact mode (float32 weights and KV) is left as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import structlog
import torch

from .....shared.errors import ModelLoadError
from ..families import kv_shape
from ..quantize import INT8_WEIGHTS, Weights
from .files import find_calibration
from .folding import Scales, Shape, make_folds, normed_heads, powers_of_two
from .rank import cut_scales, heads_here
from .result import Calibration
from .smoothing import scales_from_weights
from .tuning import Tuning, linear_key

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ...kv.store import KVKind
    from ...parallel.shard import Shard
    from ..families import Family

CalibrationChoice = Calibration | Literal["auto"] | None
"""A calibration; "auto" looks for the model's own; None uses none."""
log = structlog.get_logger("tokenmill.model")


def choose_tuning(
    path: Path,
    family: Family,
    config: PreTrainedConfig,
    *,
    weights: Weights,
    kv: KVKind,
    choice: CalibrationChoice,
    fused: bool = True,
    half: bool = False,
    shard: Shard | None = None,
) -> Tuning:
    """Decides how a model's weights are to be changed while they are read.

    Args:
        path: The checkpoint.
        family: Its family; only the llama pattern is tuned.
        config: Its configuration.
        weights: Precision of linear layers.
        kv: Precision of the KV pool.
        choice: See `CalibrationChoice`.
        fused: Projections are merged, which makes slots of float layers, too.
        half: Round scales to powers of two: half precision divides by them exactly.
        shard: The rank whose part of the model is tuned; None is all of it.

    Returns:
        The tuning; empty for the exact mode, unless a calibration is given.

    Raises:
        ModelLoadError: The calibration does not fit the model's configuration.
    """
    exact = weights not in INT8_WEIGHTS and kv == "float32"
    if not family.llama_pattern or choice is None or (exact and choice == "auto"):
        return Tuning()
    calibration, source = _of_choice(path, choice)
    if calibration is None and kv == "float32":
        return Tuning(source=source)
    shape = heads_here(config, shard)
    if calibration is None:
        scales = _rounded(scales_from_weights(path, config, shard), half=half)
        folds = make_folds(shape, scales, inputs=False)
        return Tuning(folds, version="smooth1", source=source)
    check_shapes(config, calibration.tensors)
    scales = _rounded(cut_scales(calibration.tensors, config, shard), half=half)
    quantized = weights in INT8_WEIGHTS
    # Float layers take a given one's input scales too: so the folding is tested.
    inputs = quantized or (calibration is choice and weights == "float32")
    head = quantized or fused or not config.tie_word_embeddings
    return _from_calibration(
        shape, calibration, scales, inputs=inputs, source=source, head=head
    )


def _of_choice(
    path: Path, choice: Calibration | Literal["auto"]
) -> tuple[Calibration | None, str]:
    """Returns the calibration to use, if any, and where it comes from."""
    if isinstance(choice, Calibration):
        return choice, "as given"
    found = find_calibration(path)
    log.info("calibration_chosen", source=found.source)
    return found.calibration, found.source


def _rounded(scales: Scales, *, half: bool) -> Scales:
    return powers_of_two(scales) if half else scales


def _from_calibration(
    config: Shape,
    calibration: Calibration,
    scales: Scales,
    *,
    inputs: bool,
    source: str,
    head: bool,
) -> Tuning:
    if not inputs:
        folds = make_folds(config, scales, inputs=False)
        return Tuning(folds, version=calibration.digest, source=source)
    return Tuning(
        folds=make_folds(config, scales, inputs=True, head=head),
        means=_scaled_means(config, scales),
        sensitive=frozenset(
            key for name in calibration.sensitive_names if (key := linear_key(name))
        ),
        version=calibration.digest,
        source=source,
    )


def check_shapes(config: PreTrainedConfig, scales: Scales) -> None:
    """Refuses a calibration of another shape than the model's.

    Args:
        config: Of the model.
        scales: Of the calibration.

    Raises:
        ModelLoadError: A tensor has another shape or an unknown name.
    """
    shape = kv_shape(config)
    shared = normed_heads(config.model_type)
    widths = {
        "qkv": config.hidden_size,
        "gate_up": config.hidden_size,
        "head": config.hidden_size,
        "down": config.intermediate_size,
        "output": config.num_attention_heads * shape.head_dim,
    }
    for name, values in scales.items():
        owner, _, kind = name.rpartition(".")
        linear = owner.rpartition(".")[2]
        if kind == "key_scale":
            heads = 1 if shared else shape.num_kv_heads
            expected: tuple[int, ...] = (heads, shape.head_dim // 2)
        elif kind == "value_scale":
            expected = (shape.num_kv_heads, shape.head_dim)
        else:
            expected = (widths.get(linear, 0),)
        if tuple(values.shape) != expected:
            raise ModelLoadError(
                f"calibration tensor {name} has shape {list(values.shape)}, but the "
                f"model calls for {list(expected)}; run `tokenmill calibrate` again"
            )


def _scaled_means(config: Shape, scales: Scales) -> dict[str, torch.Tensor]:
    """Returns mean inputs as the folded layers see them."""
    group = config.num_attention_heads // config.num_key_value_heads
    means = {}
    for name, mean in scales.items():
        key, _, kind = name.rpartition(".")
        if kind != "input_mean":
            continue
        scale = scales.get(f"{key}.input_scale")
        layer, _, linear = key.rpartition(".")
        if linear == "output":
            value = scales.get(f"{layer}.value_scale")
            if value is not None:
                scale = value.repeat_interleave(group, 0).ravel()
        means[key] = mean if scale is None else mean / scale
    return means
