"""What a float model's linear layers see and how much their outputs matter.

For each linear layer y = W x: the second moment and mean of its inputs, and the mean
square of the gradient at its outputs, for tokens drawn from the model's own
distribution (the diagonal of the Fisher information). An error dW then costs about
0.5 * sum_o g_o^2 * sum_i dW_oi^2 x_i^2 nats a token. Inputs are weighted by their
token's gradient: the first token of a text has huge activations that matter little.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from .folding import normed_heads
from .smoothing import pairwise
from .tuning import linear_key

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..cache import Progress

_KEPT_TOKENS: Final = 2048
"""Tokens whose keys and values are kept to choose their scales."""


@dataclass(slots=True)
class LinearStatistics:
    """Of the linear layers that share an input."""

    second: torch.Tensor
    """float64 [in], sum over tokens of x^2 times the token's gradient energy."""
    mean: torch.Tensor
    """float64 [in], the same of x."""
    weight: float = 0.0
    """Sum of gradient energies."""
    energy: dict[str, torch.Tensor] = field(default_factory=dict)
    """float64 [out] by member: sum over tokens of g^2."""


@dataclass(slots=True)
class HeadStatistics:
    """Of the keys or values of a layer."""

    energy: torch.Tensor
    """float64 [heads, channels], sum over tokens of g^2; keys: by rotated pair."""
    kept: list[torch.Tensor] = field(default_factory=list)
    """float16 [tokens, heads, channels], magnitudes; keys: radii of pairs."""


class Statistics:
    """Collects both kinds while batches run through `model`.

    Args:
        model: Of the llama pattern, float32, with its own linear layers.
        kv_heads: KV heads.
    """

    def __init__(self, model: PreTrainedModel, kv_heads: int) -> None:
        self.linears: dict[str, LinearStatistics] = {}
        self.heads: dict[str, HeadStatistics] = {}
        self.tokens = 0
        self._model = model
        self._kv_heads = kv_heads
        self._kept = 0
        self._watch()

    def _watch(self) -> None:
        normed = normed_heads(self._model.config.model_type)
        for name, module in self._model.named_modules():
            key = linear_key(name)
            if isinstance(module, nn.Linear) and key is not None:
                module.register_forward_hook(partial(self._on_linear, key, name))
            part = name.rpartition(".")[2]
            layer = name.removeprefix("model.").partition(".self_attn")[0]
            if part == ("k_norm" if normed else "k_proj"):
                kind = f"{layer}.key_scale"
            elif part == "v_proj":
                kind = f"{layer}.value_scale"
            else:
                continue
            module.register_forward_hook(partial(self._on_heads, kind))

    def run(self, batches: Iterable[torch.Tensor], seed: int = 0) -> None:
        """Runs batches forward and backward.

        Args:
            batches: int64 [rows, tokens] each.
            seed: Of the tokens drawn as targets.
        """
        generator = torch.Generator().manual_seed(seed)
        embedding = self._model.get_input_embeddings()
        for ids in batches:
            inputs = embedding(ids).detach().requires_grad_()
            logits = self._model(inputs_embeds=inputs, use_cache=False).logits
            flat = logits.reshape(-1, logits.shape[-1])
            chances = torch.softmax(flat.detach(), dim=-1)
            drawn = torch.multinomial(chances, 1, generator=generator)[:, 0]
            loss = nn.functional.cross_entropy(flat, drawn, reduction="sum")
            loss.backward()  # type: ignore[no-untyped-call]
            self.tokens += ids.numel()
            self._kept += ids.numel()

    def _on_linear(
        self,
        key: str,
        name: str,
        _module: nn.Module,
        inputs: tuple[torch.Tensor, ...],
        output: torch.Tensor,
    ) -> None:
        x = inputs[0].detach().flatten(0, -2)
        add = partial(self._add_linear, key, name, x)
        output.register_hook(add)  # type: ignore[no-untyped-call]

    def _add_linear(
        self, key: str, name: str, x: torch.Tensor, gradient: torch.Tensor
    ) -> None:
        squares = gradient.flatten(0, -2).square()
        weight = squares.sum(dim=1)
        found = self.linears.get(key)
        if found is None:
            zeros = torch.zeros(x.shape[1], dtype=torch.float64)
            found = self.linears[key] = LinearStatistics(zeros, zeros.clone())
        found.second += (weight @ x.square()).double()
        found.mean += (weight @ x).double()
        found.weight += float(weight.sum())
        energy = squares.sum(dim=0).double()
        found.energy[name] = found.energy.get(name, torch.zeros_like(energy)) + energy

    def _on_heads(
        self,
        kind: str,
        _module: nn.Module,
        _inputs: tuple[torch.Tensor, ...],
        output: torch.Tensor,
    ) -> None:
        add = partial(self._add_heads, kind, output.detach())
        output.register_hook(add)  # type: ignore[no-untyped-call]

    def _add_heads(
        self, kind: str, values: torch.Tensor, gradient: torch.Tensor
    ) -> None:
        tokens = values.shape[0] * values.shape[1]
        values = values.reshape(tokens, self._kv_heads, -1)
        gradient = gradient.reshape(values.shape)
        if kind.endswith("key_scale"):
            values, gradient = pairwise(values), pairwise(gradient)
        energy = gradient.square().sum(dim=0).double()
        found = self.heads.setdefault(kind, HeadStatistics(torch.zeros_like(energy)))
        found.energy += energy
        if self._kept < _KEPT_TOKENS:
            found.kept.append(values.abs().half())


def token_batches(
    samples: list[list[int]], rows: int, progress: Progress
) -> Iterable[torch.Tensor]:
    """Yields samples of one length as batches.

    Args:
        samples: Token ids, all of one length.
        rows: Samples a batch.
        progress: Told the fraction done.
    """
    for start in range(0, len(samples), rows):
        yield torch.tensor(samples[start : start + rows])
        progress("measuring", min(1.0, (start + rows) / len(samples)))
