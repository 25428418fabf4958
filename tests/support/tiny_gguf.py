"""Tiny random GGUF files of the llama architecture, whole or with one thing wrong."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from support.tiny_models import byte_letters

HIDDEN, INNER, HEADS, KV_HEADS, VOCABULARY = 64, 96, 4, 2, 264


def write_tiny_gguf(
    path: Path,
    *,
    seed: int = 3,
    architecture: str = "llama",
    kind: str = "gpt2",
    flavour: str = "smollm",
    eos: int = 2,
    integers: Mapping[str, int] = {},
    strings: Mapping[str, str] = {},
    tensors: Mapping[str, np.ndarray | None] = {},
) -> None:
    """Writes a random two-layer model, quantized as the built-in model is.

    Args:
        path: The file.
        seed: Of the weights.
        architecture: As its metadata names it.
        kind: Of the tokenizer.
        flavour: How the tokenizer splits text.
        eos: Id of its end token.
        integers: Metadata over the usual one.
        strings: Metadata over the usual one.
        tensors: Float tensors over the usual ones; None leaves one out.
    """
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    numbers = {
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.vocab_size": VOCABULARY,
    }
    for key, value in {**numbers, **integers}.items():
        writer.add_uint32(key, value)
    for key, text in strings.items():
        writer.add_string(key, text)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    _add_tokenizer(writer, kind, flavour, eos)
    generator = np.random.default_rng(seed)
    for name, shape in _shapes().items():
        values = generator.normal(size=shape).astype(np.float32)
        if name in tensors:
            continue
        if len(shape) == 1:
            writer.add_tensor(name, values)
            continue
        packing = gguf.GGMLQuantizationType.Q4_1
        if name == "token_embd.weight":
            packing = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(
            name, gguf.quants.quantize(values, packing), raw_dtype=packing
        )
    for name, given in tensors.items():
        if given is not None:
            writer.add_tensor(name, given)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shapes() -> dict[str, tuple[int, ...]]:
    keys = HIDDEN * KV_HEADS // HEADS
    in_layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (HIDDEN,),
        "ffn_norm": (HIDDEN,),
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (keys, HIDDEN),
        "attn_v": (keys, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCABULARY, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(2):
        for name, shape in in_layer.items():
            shapes[f"blk.{layer}.{name}.weight"] = shape
    return shapes


def _add_tokenizer(writer: object, kind: str, flavour: str, eos: int) -> None:
    import gguf

    assert isinstance(writer, gguf.GGUFWriter)
    letters = byte_letters()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*specials, *letters, "ab", "cd", "abcd", "ef", "gh"]
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(flavour)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(specials) + [1] * (len(tokens) - len(specials)))
    writer.add_token_merges(["a b", "c d", "ab cd", "e f", "g h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(eos)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
