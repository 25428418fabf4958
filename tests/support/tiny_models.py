"""Tiny random models of every served family, written as real checkpoints."""

from __future__ import annotations

import importlib
from pathlib import Path

VOCABULARY = 259
"""256 bytes and three special tokens."""
BOS, EOS, PAD = 256, 257, 258

_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    # Wide initial weights: flat logits would make every token a near tie.
    "initializer_range": 0.3,
}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "initializer_range": 0.3,
}
_FALCON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "initializer_range": 0.3,
}


def _rope(kind: str, **parameters: object) -> dict[str, object]:
    return {"rope_type": kind, "rope_theta": 10000.0, **parameters}


# Name of the variant: (model_type, class stem, class of the model, configuration).
VARIANTS: dict[str, tuple[str, str, str, dict[str, object]]] = {
    "llama": ("llama", "Llama", "ForCausalLM", {**_LLAMA}),
    "llama-tied": (
        "llama",
        "Llama",
        "ForCausalLM",
        {**_LLAMA, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "llama-gelu": (
        "llama",
        "Llama",
        "ForCausalLM",
        {**_LLAMA, "hidden_act": "gelu", "intermediate_size": 83},
    ),
    "llama-linear": (
        "llama",
        "Llama",
        "ForCausalLM",
        {**_LLAMA, "rope_parameters": _rope("linear", factor=4.0)},
    ),
    "llama-dynamic": (
        "llama",
        "Llama",
        "ForCausalLM",
        {
            **_LLAMA,
            "max_position_embeddings": 48,
            "rope_parameters": _rope("dynamic", factor=4.0),
        },
    ),
    "llama-dynamic-far": (
        "llama",
        "Llama",
        "ForCausalLM",
        {
            **_LLAMA,
            "num_hidden_layers": 3,
            "head_dim": 80,
            "max_position_embeddings": 64,
            "initializer_range": 0.15,
            "rope_parameters": _rope("dynamic", factor=8.0),
        },
    ),
    "llama-yarn": (
        "llama",
        "Llama",
        "ForCausalLM",
        {
            **_LLAMA,
            "rope_parameters": _rope(
                "yarn", factor=4.0, original_max_position_embeddings=64
            ),
        },
    ),
    "llama-llama3": (
        "llama",
        "Llama",
        "ForCausalLM",
        {
            **_LLAMA,
            "rope_parameters": _rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
        },
    ),
    "llama-longrope": (
        "llama",
        "Llama",
        "ForCausalLM",
        {
            **_LLAMA,
            "rope_parameters": _rope(
                "longrope",
                factor=4.0,
                short_factor=[1.0, 1.1, 1.2, 1.3],
                long_factor=[1.0, 2.0, 3.0, 4.0],
                original_max_position_embeddings=64,
            ),
        },
    ),
    "mistral": ("mistral", "Mistral", "ForCausalLM", {**_LLAMA, "sliding_window": 24}),
    "mistral-full": (
        "mistral",
        "Mistral",
        "ForCausalLM",
        {**_LLAMA, "sliding_window": None},
    ),
    "qwen2": ("qwen2", "Qwen2", "ForCausalLM", {**_LLAMA, "tie_word_embeddings": True}),
    "qwen2-window": (
        "qwen2",
        "Qwen2",
        "ForCausalLM",
        {
            **_LLAMA,
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("qwen3", "Qwen3", "ForCausalLM", {**_LLAMA}),
    "glm4": (
        "glm4",
        "Glm4",
        "ForCausalLM",
        {**_LLAMA, "attention_bias": True, "partial_rotary_factor": 0.5},
    ),
    "gpt2": ("gpt2", "GPT2", "LMHeadModel", {**_GPT2}),
    "gpt2-scaled": (
        "gpt2",
        "GPT2",
        "LMHeadModel",
        {**_GPT2, "scale_attn_by_inverse_layer_idx": True},
    ),
    "falcon-grouped": (
        "falcon",
        "Falcon",
        "ForCausalLM",
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "falcon-multi-query": (
        "falcon",
        "Falcon",
        "ForCausalLM",
        {
            **_FALCON,
            "new_decoder_architecture": False,
            "multi_query": True,
            "parallel_attn": True,
        },
    ),
    "falcon-alibi": (
        "falcon",
        "Falcon",
        "ForCausalLM",
        {
            **_FALCON,
            "new_decoder_architecture": False,
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
            "alibi": True,
            "num_attention_heads": 8,
            "max_position_embeddings": 1024,
        },
    ),
    "falcon-alibi-multi-query": (
        "falcon",
        "Falcon",
        "ForCausalLM",
        {
            **_FALCON,
            "new_decoder_architecture": False,
            "multi_query": True,
            "parallel_attn": True,
            "alibi": True,
            "num_attention_heads": 12,  # no power of two
            "max_position_embeddings": 1024,
        },
    ),
}


def save_tiny_model(
    variant: str, directory: Path, *, seed: int = 0, **changes: object
) -> Path:
    """Writes a tiny random checkpoint with a byte-level tokenizer.

    Args:
        variant: A key of `VARIANTS`.
        directory: Where a sub-directory of that name is made.
        seed: Of the weights.
        **changes: Settings that differ from the variant's.

    Returns:
        The checkpoint's directory.
    """
    import torch

    model_type, stem, suffix, settings = VARIANTS[variant]
    package = f"transformers.models.{model_type}"
    configurations = importlib.import_module(f"{package}.configuration_{model_type}")
    models = importlib.import_module(f"{package}.modeling_{model_type}")
    config = getattr(configurations, f"{stem}Config")(**{**settings, **changes})
    torch.manual_seed(seed)
    model = getattr(models, f"{stem}{suffix}")(config)
    with torch.no_grad():  # biases and norms that start at 0 and 1 would hide mistakes
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
            elif "wpe" in name:
                parameter.mul_(0.2)
    target = directory / variant
    model.save_pretrained(target)
    save_byte_tokenizer(target)
    return target


def save_byte_tokenizer(directory: Path) -> None:
    """Writes a tokenizer whose ids 0 to 255 are bytes, then BOS, EOS and PAD."""
    import json

    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = _byte_alphabet()
    vocabulary = {alphabet[byte]: byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = ("<|bos|>", "<|eos|>", "<|pad|>")
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": specials[0],
        "eos_token": specials[1],
        "pad_token": specials[2],
        "model_max_length": 256,
        "chat_template": (
            "{% for message in messages %}<|bos|>{{ message['role'] }}: "
            "{{ message['content'] }}<|eos|>{% endfor %}"
            "{% if add_generation_prompt %}<|bos|>assistant: {% endif %}"
        ),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def byte_letters() -> list[str]:
    """Returns the 256 letters of byte-level tokenizers in the order of their bytes."""
    letters = _byte_alphabet()
    return [letters[byte] for byte in range(256)]


def _byte_alphabet() -> dict[int, str]:
    """Returns the printable stand-in that byte-level tokenizers use for each byte."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters.update({byte: chr(256 + rank) for rank, byte in enumerate(others)})
    return letters
