"""Calibrations that fit a model without having been measured on it."""

import json
from pathlib import Path

import torch

from tokenmill.workers.engine.model.calibration.result import (
    Calibration,
    Facts,
    LayerLoss,
)


def random_calibration(path: Path, *sensitive: str) -> Calibration:
    """A calibration whose scales are between 1/4 and 4, fitting a model.

    Args:
        path: Of the model.
        *sensitive: Names of layers that are said to lose most.
    """
    config = json.loads((path / "config.json").read_text())
    heads, width = config["num_key_value_heads"], config["head_dim"]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    attended = config["num_attention_heads"] * width
    key_heads = 1 if config["model_type"] == "qwen3" else heads
    generator = torch.Generator().manual_seed(5)

    def scale(*shape: int) -> torch.Tensor:
        return 4 ** (2 * torch.rand(shape, generator=generator) - 1)

    def mean(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {"head.input_scale": scale(hidden), "head.input_mean": mean(hidden)}
    for index in range(config["num_hidden_layers"]):
        tensors |= {
            f"layers.{index}.key_scale": scale(key_heads, width // 2),
            f"layers.{index}.value_scale": scale(heads, width),
            f"layers.{index}.qkv.input_scale": scale(hidden),
            f"layers.{index}.qkv.input_mean": mean(hidden),
            f"layers.{index}.output.input_mean": mean(attended),
            f"layers.{index}.gate_up.input_scale": scale(hidden),
            f"layers.{index}.down.input_scale": scale(inner),
        }
    facts = Facts(
        fingerprint="of a test",
        text="none",
        samples=1,
        tokens=1,
        sensitive=tuple(LayerLoss(name, 1.0, 1) for name in sensitive),
    )
    return Calibration(facts, tensors)
