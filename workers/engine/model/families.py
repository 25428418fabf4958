"""The model families that are served, and what differs between them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from ....shared.errors import ModelLoadError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from ..kv.store import KVShape
    from ..parallel.shard import Shard

_SIZES: Final = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
"""Each is a whole number from 1."""
_OPTIONAL_SIZES: Final = (
    "num_key_value_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "ffn_hidden_size",
    "n_inner",
)
"""Those that a family may lack or leave to be worked out, which is None."""
_log = structlog.get_logger("tokenmill.model")
_HEADS_FILL_HIDDEN: Final = ("gpt2", "falcon")
"""Families whose head size is hidden_size / heads; others may name another."""


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One architecture of transformers."""

    model_type: str
    """As `config.json` names it."""
    config_class: str
    model_class: str
    layers: str
    """Dotted path of the list of decoder layers in the model."""
    attention: str
    """Name of the attention module in a layer."""
    llama_pattern: bool = False
    """Runs through the fused decoder (`llama_fused.py`)."""

    @property
    def package(self) -> str:
        """The transformers package that holds its code."""
        return f"transformers.models.{self.model_type}"

    def load_config(self, directory: Path) -> PreTrainedConfig:
        """Reads config.json with the family's own class, never with code beside it."""
        if read_config(directory).get("auto_map"):
            _log.warning(
                "model_code_ignored",
                path=str(directory),
                reason="config.json names code of its own (auto_map), which is never "
                f"run: transformers' {self.model_class} is used",
            )
        module = importlib.import_module(
            f"{self.package}.configuration_{self.model_type}"
        )
        config_class: type[PreTrainedConfig] = getattr(module, self.config_class)
        try:
            config: PreTrainedConfig = config_class.from_pretrained(directory)
        # transformers' validators raise classes of their own, under no common name.
        except Exception as error:
            reason = " ".join(str(error).split())  # of several lines, often
            raise _invalid(directory, self.model_type, reason) from error
        _check_sizes(directory, config)
        return config

    def load_class(self) -> type[PreTrainedModel]:
        """Imports the model's class; only this family's code is imported."""
        module = importlib.import_module(f"{self.package}.modeling_{self.model_type}")
        model_class: type[PreTrainedModel] = getattr(module, self.model_class)
        return model_class


def _invalid(directory: Path, model_type: str, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"{directory}/config.json is not a valid {model_type} configuration: {reason}"
    )


def _check_sizes(directory: Path, config: PreTrainedConfig) -> None:
    """Refuses sizes that no model has, before anything is computed with them."""
    for name in (*_SIZES, *_OPTIONAL_SIZES):
        value = getattr(config, name, None)
        if value is None and name in _OPTIONAL_SIZES:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            reason = f"{name} is {value!r}; expected a whole number from 1"
            raise _invalid(directory, config.model_type, reason)
    misfit = _misfit(config)
    if misfit is not None:
        raise _invalid(directory, config.model_type, misfit)


def _misfit(config: PreTrainedConfig) -> str | None:
    """Returns which sizes do not go together, if any."""
    shape, heads = kv_shape(config), int(config.num_attention_heads)
    if heads % shape.num_kv_heads:
        return (
            f"num_attention_heads {heads} is no multiple of num_key_value_heads "
            f"{shape.num_kv_heads}"
        )
    if config.hidden_size % heads and config.model_type in _HEADS_FILL_HIDDEN:
        return (
            f"hidden_size {config.hidden_size} is no multiple of num_attention_heads "
            f"{heads}"
        )
    if shape.head_dim < 1:
        return f"hidden_size {config.hidden_size} is less than its {heads} heads"
    if shape.head_dim % 2 and isinstance(
        getattr(config, "rope_parameters", None), dict
    ):
        return (
            f"head_dim is {shape.head_dim}; RoPE turns pairs, which takes an even one"
        )
    return None


def _llama_like(model_type: str, stem: str, *, fused: bool = True) -> Family:
    return Family(
        model_type=model_type,
        config_class=f"{stem}Config",
        model_class=f"{stem}ForCausalLM",
        layers="model.layers",
        attention="self_attn",
        llama_pattern=fused,
    )


FAMILIES: Final = {
    family.model_type: family
    for family in (
        _llama_like("llama", "Llama"),
        _llama_like("mistral", "Mistral"),
        _llama_like("qwen2", "Qwen2"),
        _llama_like("qwen3", "Qwen3"),
        _llama_like("glm4", "Glm4", fused=False),
        Family(
            model_type="gpt2",
            config_class="GPT2Config",
            model_class="GPT2LMHeadModel",
            layers="transformer.h",
            attention="attn",
        ),
        Family(
            model_type="falcon",
            config_class="FalconConfig",
            model_class="FalconForCausalLM",
            layers="transformer.h",
            attention="self_attention",
        ),
    )
}


def read_config(directory: Path) -> dict[str, object]:
    """Reads config.json as it stands; ModelLoadError if it is missing or broken."""
    file = directory / "config.json"
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} is no JSON object")
    return content


def family_of(directory: Path) -> Family:
    """Returns the family of a checkpoint.

    Args:
        directory: With config.json.

    Raises:
        ModelLoadError: Not a supported architecture; the message lists those.
    """
    content = read_config(directory)
    model_type = content.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        own_code = content.get("auto_map")
        remark = " (the code that comes with it is never run)" if own_code else ""
        raise ModelLoadError(
            f"architecture {model_type!r} of {directory}/config.json is not supported"
            f"{remark}; supported are: {', '.join(sorted(FAMILIES))}"
        )
    if content.get("quantization_config"):
        raise ModelLoadError(
            f"{directory} holds weights that are quantized already; give the float "
            "checkpoint: weights are quantized at load"
        )
    if content.get("is_encoder_decoder") or content.get("add_cross_attention"):
        raise ModelLoadError(
            f"{directory} has cross-attention; only decoder-only models are served"
        )
    return family


def kv_shape(config: PreTrainedConfig, shard: Shard | None = None) -> KVShape:
    """Returns layers, KV heads and head size of a supported model's configuration.

    Args:
        config: Of the whole model.
        shard: Counts that rank's KV heads; None all of them.
    """
    from ..kv.store import KVShape  # brings torch, which checking a name needs not

    heads = int(config.num_attention_heads)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if config.model_type == "falcon":
        if config.new_decoder_architecture:
            kv_heads = config.num_kv_heads
        else:
            kv_heads = 1 if config.multi_query else heads
    if shard is not None:
        from ..parallel.shard import heads_of

        kv_heads = heads_of(config, shard).num_keys
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KVShape(
        num_layers=int(config.num_hidden_layers),
        num_kv_heads=int(kv_heads),
        head_dim=int(head_dim),
    )
