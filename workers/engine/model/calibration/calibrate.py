"""Makes a calibration: runs samples through the float model, then chooses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from .....shared.errors import ModelLoadError
from ..assembly import LoadOptions, read_model
from ..device import choose_target
from ..families import family_of
from ..lean_import import import_transformers
from .fingerprint import weights_fingerprint
from .folding import normed_heads
from .result import Calibration, Facts, LayerLoss
from .search import (
    head_scale,
    input_scale,
    most_sensitive,
    rounding_loss,
)
from .statistics import (
    HeadStatistics,
    LinearStatistics,
    Statistics,
    token_batches,
)
from .tuning import module_name

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from ..cache import Progress

_ROW_TOKENS: Final = 1024
"""Tokens in a forward pass: their logits and gradients bound the memory."""
_CORRECTED: Final = ("qkv", "output", "head")
"""Layers whose bias takes the mean error off; the kernels' MLP has no bias."""


def calibrate(
    path: Path, samples: Sequence[list[int]], text: str, progress: Progress
) -> Calibration:
    """Calibrates a model of the llama pattern.

    Args:
        path: The checkpoint.
        samples: Token ids of the calibration text, all of one length.
        text: Its name.
        progress: Told the stage and the fraction done.

    Raises:
        ModelLoadError: Another architecture, or no samples.
    """
    family = family_of(path)
    if not family.llama_pattern:
        raise ModelLoadError(
            f"{family.model_type} models are not calibrated: they run with plain INT8 "
            "weights; calibrated are llama, mistral, qwen2 and qwen3"
        )
    if not samples:
        raise ModelLoadError("the calibration text is too short for even one sample")
    import_transformers()
    config = family.load_config(path)
    highest = max(map(max, samples))
    if highest >= config.vocab_size:
        raise ModelLoadError(
            f"the calibration text has token {highest}, but the model's vocabulary is "
            f"{config.vocab_size}: take a text without that token"
        )
    target = choose_target("cpu", "float32")
    options = LoadOptions(weights="float32", target=target, fused=False)
    model = read_model(path, family, config, options, {}, progress).model
    rows = max(1, _ROW_TOKENS // max(map(len, samples)))
    statistics = Statistics(model, int(config.num_key_value_heads))
    statistics.run(token_batches(list(samples), rows, progress))
    search = _Search(model, config, statistics)
    for done, key in enumerate(statistics.linears):
        search.add(key)
        progress("choosing scales", (done + 1) / len(statistics.linears))
    facts = Facts(
        fingerprint=weights_fingerprint(path),
        text=text,
        samples=len(samples),
        tokens=statistics.tokens,
        sensitive=search.sensitive(),
        loss_percent=search.remaining_loss(),
        plain_loss_percent=search.plain_loss,
    )
    return Calibration(facts, search.tensors)


class _Search:
    """Chooses scales layer by layer."""

    def __init__(
        self, model: PreTrainedModel, config: PreTrainedConfig, statistics: Statistics
    ) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.plain_loss = 0.0
        self._losses: dict[str, float] = {}
        self._sizes: dict[str, int] = {}
        self._model = model
        self._group = config.num_attention_heads // config.num_key_value_heads
        self._statistics = statistics
        shared = normed_heads(config.model_type)
        for name, heads in statistics.heads.items():
            alike = shared and name.endswith("key_scale")
            self.tensors[name] = _stored(
                head_scale(one_head(heads) if alike else heads)
            )

    def add(self, key: str) -> None:
        """Chooses a layer's scale and estimates what rounding costs then."""
        found = self._statistics.linears[key]
        weight = torch.cat(list(self._weights(found)))
        energy = torch.cat(list(found.energy.values())) / self._statistics.tokens
        energy = energy.float()
        second = (found.second / found.weight).float()
        mean = (found.mean / found.weight).float()
        layer, _, linear = key.rpartition(".")
        kind = linear or key
        spread = second
        if kind in _CORRECTED:
            self.tensors[f"{key}.input_mean"] = _stored(mean)
            spread = (second - mean.square()).clamp_min(0)
        if kind == "output":  # its scale is that of the values
            value = self.tensors[f"{layer}.value_scale"]
            scale = value.repeat_interleave(self._group, 0).ravel()
        else:
            scale = _stored(input_scale(weight, energy, spread))
            self.tensors[f"{key}.input_scale"] = scale
        self._losses[key] = rounding_loss(weight, energy, spread, scale)
        self._sizes[key] = weight.numel()
        self.plain_loss += rounding_loss(weight, energy, second)

    def _weights(self, found: LinearStatistics) -> Iterator[torch.Tensor]:
        for name in found.energy:
            module: nn.Module = self._model.get_submodule(name)
            yield module.get_parameter("weight").detach()

    def sensitive(self) -> tuple[LayerLoss, ...]:
        """Returns the layers that keep a second plane."""
        return tuple(
            LayerLoss(module_name(key), self._losses[key], self._sizes[key])
            for key in most_sensitive(self._losses, self._sizes)
        )

    def remaining_loss(self) -> float:
        """Returns the estimated loss of layers with one plane."""
        kept = most_sensitive(self._losses, self._sizes)
        return sum(loss for key, loss in self._losses.items() if key not in kept)


def one_head(statistics: HeadStatistics) -> HeadStatistics:
    """Returns all heads as one, for keys that share the norm that is to be scaled."""
    channels = statistics.energy.shape[1]
    return HeadStatistics(
        statistics.energy.sum(dim=0, keepdim=True),
        [kept.reshape(-1, 1, channels) for kept in statistics.kept],
    )


def _stored(values: torch.Tensor) -> torch.Tensor:
    """Returns values as the file will hold them, so that estimates are of those."""
    return values.half().float()
