"""Makes a model on the meta device a rank's, and joins it with the others once filled.

Nothing is known here of precisions: layers get narrower before they are swapped for
quantized ones, and are wrapped after those have their weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..model.placing import has_bias, is_linear, is_transposed
from .cuts import LayerCut, find_cut, layer_cuts
from .layers import GatheredHead, SplitEmbedding, SummedLinear
from .reading import TensorCut
from .shard import Shard, heads_of, share_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from ..model.families import Family
    from .communicator import Communicator


class Sharding:
    """A rank's part of a model.

    Args:
        config: Of the whole model.
        shard: The rank.

    Raises:
        ModelLoadError: The model cannot be split over so many ranks.
    """

    def __init__(self, config: PreTrainedConfig, shard: Shard) -> None:
        self._config = config
        self._shard = shard
        self._layers = layer_cuts(config, shard)
        self._cuts: dict[str, TensorCut] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dropped: set[str] = set()

    # --- before weights are read --------------------------------------------------
    def narrow(self, model: PreTrainedModel, family: Family) -> None:
        """Cuts a model's parameters and head counts to the rank's.

        Args:
            model: On the meta device; changed in place.
            family: Its family.
        """
        narrowed: dict[int, nn.Parameter] = {}
        for name, module in model.named_modules():
            cut = find_cut(self._layers, name)
            if cut is None:
                continue
            _narrow_widths(module, cut)
            transposed = is_linear(module) and is_transposed(module)
            dim = (cut.side == "inputs") != transposed
            parameters = {"weight": TensorCut(int(dim), cut.ranges)}
            if has_bias(module) and cut.side == "outputs":
                parameters["bias"] = TensorCut(0, cut.ranges)
            elif has_bias(module) and self._shard.rank:
                self._dropped.add(f"{name}.bias")
            for leaf, part in parameters.items():
                whole = module.get_parameter(leaf)
                self._cuts[f"{name}.{leaf}"] = part
                self._shapes[f"{name}.{leaf}"] = tuple(whole.shape)
                # A tensor that serves as embedding and as head stays one.
                if id(whole) not in narrowed:
                    narrowed[id(whole)] = _narrowed(whole, part, cut.width)
                setattr(module, leaf, narrowed[id(whole)])
        for layer in model.get_submodule(family.layers).children():
            self._count_heads(layer.get_submodule(family.attention))

    def _count_heads(self, attention: nn.Module) -> None:
        """Tells an attention module how many heads it has here."""
        share = heads_of(self._config, self._shard)
        heads, kind = share.num_queries, self._config.model_type
        counts = {"num_key_value_groups": heads // share.num_keys}
        if kind == "gpt2":
            width = heads * int(getattr(attention, "head_dim"))  # noqa: B009
            counts = {"num_heads": heads, "split_size": width}
        elif kind == "falcon":
            counts = {"num_heads": heads, "num_kv_heads": share.num_keys}
        for name, count in counts.items():
            setattr(attention, name, count)

    # --- while weights are read ---------------------------------------------------
    def whole_shape(self, parameter: str) -> tuple[int, ...] | None:
        """Returns a parameter's shape in the checkpoint; None for one that is whole."""
        return self._shapes.get(parameter)

    def drops(self, parameter: str) -> bool:
        """Returns whether a bias is left to the rank that adds it."""
        return parameter in self._dropped

    def parts(self, targets: Mapping[str, str]) -> dict[str, TensorCut | None]:
        """Returns what to read of each stored tensor.

        Args:
            targets: Parameters by stored name.
        """
        return {name: self._cuts.get(target) for name, target in targets.items()}

    # --- after --------------------------------------------------------------------
    def connect(self, model: PreTrainedModel, communicator: Communicator) -> None:
        """Lets the ranks meet where their parts have to come together.

        Args:
            model: With its weights; changed in place.
            communicator: The rank's end of its group.
        """
        size, vocabulary = self._shard.size, int(self._config.vocab_size)
        shares = [share_of(vocabulary, Shard(rank, size)) for rank in range(size)]
        ends = model.get_input_embeddings(), model.get_output_embeddings()
        for name, module in list(model.named_modules()):
            cut = find_cut(self._layers, name)
            if cut is not None and cut.side == "inputs":
                parent, _, child = name.rpartition(".")
                wrapped = SummedLinear(module, communicator)
                setattr(model.get_submodule(parent), child, wrapped)
        model.set_input_embeddings(
            SplitEmbedding(ends[0], shares[self._shard.rank], communicator)
        )
        widths = tuple(stop - start for start, stop in shares)
        model.set_output_embeddings(GatheredHead(ends[1], widths, communicator))


def _narrow_widths(module: nn.Module, cut: LayerCut) -> None:
    """Sets the numbers that a layer keeps beside its parameters."""
    if isinstance(module, nn.Embedding):
        module.num_embeddings = cut.width
        module.padding_idx = None  # for training alone, and perhaps another rank's
    elif isinstance(module, nn.Linear):
        name = "in_features" if cut.side == "inputs" else "out_features"
        setattr(module, name, cut.width)
    elif cut.side == "outputs":
        module.nf = cut.width  # type: ignore[assignment]  # GPT-2's own layer


def _narrowed(whole: nn.Parameter, cut: TensorCut, width: int) -> nn.Parameter:
    shape = list(whole.shape)
    shape[cut.dim] = width
    empty = torch.empty(shape, dtype=whole.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=False)
