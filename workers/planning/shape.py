"""A model's sizes as its configuration has them: no weights, no torch, no model code.

Sizes that a `config.json` leaves out are those of the family's class in transformers; a
test holds every formula here against models of that library on the meta device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from ...shared.errors import ModelLoadError
from .context import context_limit

Config = Mapping[str, object]
"""The content of a `config.json`."""
_LLAMA: Final[Config] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
_QWEN: Final[Config] = {
    **_LLAMA,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
_DEFAULTS: Final[Mapping[str, Config]] = {
    "llama": _LLAMA,
    "mistral": {
        **_LLAMA,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "glm4": {
        **_LLAMA,
        "vocab_size": 151552,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "attention_bias": True,
    },
    "gpt2": {
        "vocab_size": 50257,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
    "falcon": {
        "vocab_size": 65024,
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "max_position_embeddings": 2048,
        "multi_query": True,
        "parallel_attn": True,
        "tie_word_embeddings": True,
    },
}
"""Of transformers' configuration classes, by family."""
_GPT2_NAMES: Final = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}
_BIASES: Final = ("qkv_bias", "output_bias", "up_bias", "down_bias")
FUSED_FAMILIES: Final = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Those that the fused decoder runs."""


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a family's model is made of; every layer is alike."""

    family: str
    num_layers: int
    hidden: int
    inner: int
    """Width between the two products of the MLP."""
    gated: bool
    """The MLP has a gate beside its upward product."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    """Longest sequence in tokens."""
    tied: bool
    """The output head is the embedding."""
    qkv_bias: bool = False
    output_bias: bool = False
    up_bias: bool = False
    down_bias: bool = False
    layer_norms: int = 0
    """Values in the norms of one layer."""
    final_norm: int = 0
    """Values in the last norm."""
    positions: int = 0
    """Rows of a table of learned positions."""
    alibi: bool = False
    activation: str = "silu"
    stored: str | None = None
    """Type of the checkpoint's weights, as "bfloat16", where the configuration says."""

    @property
    def is_fused(self) -> bool:
        """Whether the family has a fused decoder."""
        return self.family in FUSED_FAMILIES


def read_shape(config: Config, source: str) -> ModelShape:
    """Returns the sizes of a served model.

    Args:
        config: The content of its `config.json`; `model_type` is one that is served.
        source: Names it in messages.

    Raises:
        ModelLoadError: A size is missing or none that a model can have.
    """
    family = str(config.get("model_type"))
    reader = _Reader(family, config, source)
    make = {"gpt2": _gpt2, "falcon": _falcon}.get(family, _llama_like)
    shape = make(reader)
    _check(shape, source)
    return shape


class _Reader:
    """Reads values with the family's defaults.

    Args:
        family: Whose defaults apply.
        config: What was given.
        source: Names it in messages.
    """

    def __init__(self, family: str, config: Config, source: str) -> None:
        self.family = family
        self._config = config
        self._defaults = _DEFAULTS[family]
        self._source = source

    def get(self, name: str) -> object:
        """Returns a value, the family's default, or None."""
        names = [name]
        if self.family == "gpt2" and name in _GPT2_NAMES:
            names.insert(0, _GPT2_NAMES[name])
        for one in names:
            if one in self._config:
                return self._config[one]
        return self._defaults.get(name)

    def size(self, name: str, otherwise: int | None = None) -> int:
        """Returns a whole number from 1; `otherwise` where there is none."""
        value = self.get(name)
        if value is None and otherwise is not None:
            return otherwise
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelLoadError(
                f"{self._source}: {name} is {value!r}; expected a whole number from 1"
            )
        return value

    def flag(self, name: str) -> bool:
        """Returns whether something is set."""
        return bool(self.get(name))

    def common(self) -> dict[str, object]:
        """Returns the fields that all families read alike."""
        stored = self.get("dtype") or self.get("torch_dtype")
        return {
            "family": self.family,
            "num_layers": self.size("num_hidden_layers"),
            "hidden": self.size("hidden_size"),
            "num_heads": self.size("num_attention_heads"),
            "vocabulary": self.size("vocab_size"),
            "tied": self.flag("tie_word_embeddings"),
            "context": context_limit(
                self._config, self.size("max_position_embeddings")
            ),
            "stored": str(stored) if stored else None,
        }


def _llama_like(read: _Reader) -> ModelShape:
    common = read.common()
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    head_dim = read.size("head_dim", hidden // heads)
    has_bias = read.flag("attention_bias")
    norms = {"glm4": 4 * hidden, "qwen3": 2 * hidden + 2 * head_dim}
    biases = {
        "llama": (has_bias, has_bias),
        "qwen2": (True, False),
        "qwen3": (has_bias, has_bias),
        "glm4": (has_bias, False),
    }
    qkv_bias, output_bias = biases.get(read.family, (False, False))
    mlp_bias = read.family == "llama" and read.flag("mlp_bias")
    values = {
        **common,
        "inner": read.size("intermediate_size"),
        "gated": True,
        "num_kv_heads": read.size("num_key_value_heads", heads),
        "head_dim": head_dim,
        "qkv_bias": qkv_bias,
        "output_bias": output_bias,
        "up_bias": mlp_bias,
        "down_bias": mlp_bias,
        "layer_norms": norms.get(read.family, 2 * hidden),
        "final_norm": hidden,
        "activation": str(read.get("hidden_act") or "silu"),
    }
    return msgspec.convert(values, ModelShape)


def _gpt2(read: _Reader) -> ModelShape:
    common = read.common()
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    values = {
        **common,
        "inner": read.size("intermediate_size", 4 * hidden),
        "gated": False,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        **dict.fromkeys(_BIASES, True),
        "layer_norms": 4 * hidden,
        "final_norm": 2 * hidden,
        "positions": read.size("max_position_embeddings"),
        "activation": "gelu",
    }
    return msgspec.convert(values, ModelShape)


def _falcon(read: _Reader) -> ModelShape:
    common = read.common()
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    is_new = read.flag("new_decoder_architecture")
    if is_new:
        kv_heads = read.size("num_kv_heads", heads)
    else:
        kv_heads = 1 if read.flag("multi_query") else heads
    norms = 2 if is_new else 1
    if read.get("num_ln_in_parallel_attn") is not None:
        norms = 2 if read.get("num_ln_in_parallel_attn") == 2 else 1
    if not read.flag("parallel_attn"):
        norms = 2
    has_bias = read.flag("bias")
    values = {
        **common,
        "inner": read.size("ffn_hidden_size", 4 * hidden),
        "gated": False,
        "num_kv_heads": kv_heads,
        "head_dim": hidden // heads,
        **dict.fromkeys(_BIASES, has_bias),
        "layer_norms": norms * 2 * hidden,
        "final_norm": 2 * hidden,
        "alibi": read.flag("alibi"),
        "activation": "gelu",
    }
    return msgspec.convert(values, ModelShape)


def _check(shape: ModelShape, source: str) -> None:
    if shape.num_heads % shape.num_kv_heads:
        raise ModelLoadError(
            f"{source}: {shape.num_heads} attention heads are no multiple of "
            f"{shape.num_kv_heads} KV heads"
        )
    if shape.head_dim < 1:
        raise ModelLoadError(
            f"{source}: hidden_size {shape.hidden} is less than its "
            f"{shape.num_heads} heads"
        )
