"""Tiny models of every served family with heads enough for eight ranks."""

from __future__ import annotations

from pathlib import Path

from support.tiny_models import save_tiny_model

_LLAMA = {"hidden_size": 64, "num_attention_heads": 8}
_FALCON = {"hidden_size": 64, "num_attention_heads": 8}

WIDE: dict[str, dict[str, object]] = {
    # KV heads split over two and four ranks, kept twice over by eight; a width of the
    # MLP that none of them divides.
    "llama": {**_LLAMA, "num_key_value_heads": 4, "intermediate_size": 83},
    # Biases, and one tensor for both ends.
    "llama-tied": {**_LLAMA, "num_key_value_heads": 4, "mlp_bias": True},
    "llama-gelu": {**_LLAMA, "num_key_value_heads": 8},
    "llama-dynamic": {**_LLAMA, "num_key_value_heads": 2},
    "mistral": {**_LLAMA, "num_key_value_heads": 2},
    "qwen2": {**_LLAMA, "num_key_value_heads": 2},
    "qwen3": {**_LLAMA, "num_key_value_heads": 4},
    "glm4": {**_LLAMA, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 64, "n_head": 8},
    "falcon-grouped": {**_FALCON, "num_kv_heads": 2},
    "falcon-multi-query": {**_FALCON, "bias": True},
    "falcon-alibi": {**_FALCON},
    "falcon-alibi-multi-query": {**_FALCON},
}
"""What differs from the variant of the same name."""


def save_wide_model(variant: str, directory: Path, **changes: object) -> Path:
    """Writes a checkpoint and returns its directory.

    Args:
        variant: A key of `WIDE`.
        directory: Where a sub-directory of that name is made.
        **changes: Further settings.
    """
    return save_tiny_model(variant, directory, **{**WIDE[variant], **changes})
