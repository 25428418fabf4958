"""Random LoRA adapters for tiny models, as peft writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from tokenmill.workers.engine.adapters.targets import base_linears

SETTINGS: Mapping[str, object] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "lora_dropout": 0.05,
    "modules_to_save": None,
    "use_dora": False,
}


def save_tiny_adapter(
    base: Path,
    directory: Path,
    *,
    ends: tuple[str, ...] | None = None,
    rank: int = 4,
    alpha: float = 8,
    size: float = 0.25,
    seed: int = 0,
    ranks: Mapping[str, int] | None = None,
    dtype: torch.dtype = torch.float32,
    **settings: object,
) -> Path:
    """Writes an adapter.

    Args:
        base: The model's directory.
        directory: Where to; made here.
        ends: Last parts of the names of the layers it adapts; None is all of them.
        rank: Of all layers that `ranks` does not name.
        alpha: Of all layers, for `settings` to refine.
        size: Spread of both matrices' values.
        seed: Of the weights.
        ranks: Rank by the last part of a layer's name.
        dtype: Of the tensors.
        settings: More of adapter_config.json.
    """
    ranks = ranks or {}
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    chosen: list[str] = []
    for module, (rows, columns) in base_linears(base).shapes.items():
        end = module.rpartition(".")[2]
        if ends is not None and end not in ends:
            continue
        chosen.append(end)
        own = ranks.get(end, rank)
        for half, shape in (("A", (own, columns)), ("B", (rows, own))):
            values = torch.randn(shape, generator=generator) * size
            tensors[f"base_model.model.{module}.lora_{half}.weight"] = values.to(dtype)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
    content = {
        **SETTINGS,
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(set(chosen)),
        "rank_pattern": dict(ranks),
        **settings,
    }
    (directory / "adapter_config.json").write_text(json.dumps(content))
    return directory
