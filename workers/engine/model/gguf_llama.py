"""Reads a llama-family GGUF file into transformers' tensor names, config, tokenizer.

transformers can do this too, in about thirty seconds; dequantizing the tensors
directly takes a few. A test holds the two against each other.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ....shared.errors import ModelLoadError

TOKEN_TYPE_CONTROL = 3
"""GGUF's mark for special tokens in `tokenizer.ggml.token_type`."""

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class LlamaGguf:
    """One GGUF file of the llama architecture.

    Args:
        path: The file.

    Raises:
        ModelLoadError: Not readable as GGUF, or of another architecture.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        try:
            self._reader: GGUFReader = GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise ModelLoadError(
                f"{path} is not a readable GGUF file: {error}; reinstall it"
            ) from error
        architecture = self.field("general.architecture")
        if architecture != "llama":
            raise ModelLoadError(
                f"{path} holds architecture {architecture!r}; only 'llama' GGUF files "
                "are converted: use a safetensors checkpoint instead"
            )
        self.num_heads = self.integer("llama.attention.head_count")
        self.num_kv_heads = self.integer("llama.attention.head_count_kv")

    def field(self, name: str) -> object:
        """Returns a metadata value by its GGUF key; ModelLoadError if it lacks."""
        found = self._reader.get_field(name)
        if found is None:
            raise ModelLoadError(f"{self.path} lacks the metadata key {name!r}")
        value: object = found.contents()
        return value

    def integer(self, name: str) -> int:
        """Returns an integer metadata value."""
        value = self.field(name)
        if not isinstance(value, int):
            raise ModelLoadError(
                f"{self.path}: metadata {name!r} is {value!r}, expected an integer"
            )
        return value

    def number(self, name: str) -> float:
        """Returns a float metadata value."""
        value = self.field(name)
        if not isinstance(value, (int, float)):
            raise ModelLoadError(
                f"{self.path}: metadata {name!r} is {value!r}, expected a number"
            )
        # GGUF stores float32; its shortest decimal form is what the author wrote.
        return float(str(np.float32(value)))

    def strings(self, name: str) -> list[str]:
        """Returns a metadata array of strings."""
        value = self.field(name)
        if not isinstance(value, list):
            raise ModelLoadError(
                f"{self.path}: metadata {name!r} is no array of strings"
            )
        return [str(item) for item in value]

    def config(self) -> dict[str, object]:
        """Returns the content of transformers' `config.json`."""
        names = {tensor.name for tensor in self._reader.tensors}
        hidden = self.integer("llama.embedding_length")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "bos_token_id": self.integer("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.integer("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.integer("tokenizer.ggml.padding_token_id"),
            "head_dim": hidden // self.num_heads,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": self.integer("llama.feed_forward_length"),
            "max_position_embeddings": self.integer("llama.context_length"),
            "mlp_bias": False,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.integer("llama.block_count"),
            "num_key_value_heads": self.num_kv_heads,
            "rms_norm_eps": self.number("llama.attention.layer_norm_rms_epsilon"),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.number("llama.rope.freq_base"),
            },
            "tie_word_embeddings": "output.weight" not in names,
            "dtype": "float32",
            "vocab_size": self.integer("llama.vocab_size"),
        }

    def num_tensors(self) -> int:
        """Returns how many tensors `tensors()` yields."""
        return len(self._reader.tensors)

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (transformers' name, float32 array [out, in] or [n]) in file order."""
        from gguf.quants import dequantize

        for tensor in self._reader.tensors:
            name = transformers_name(tensor.name)
            values = dequantize(tensor.data, tensor.tensor_type)
            values = np.ascontiguousarray(values, dtype=np.float32)
            if name.endswith("q_proj.weight"):
                values = half_split_rows(values, self.num_heads)
            elif name.endswith("k_proj.weight"):
                values = half_split_rows(values, self.num_kv_heads)
            yield name, values


def transformers_name(name: str) -> str:
    """Translates a llama GGUF tensor name into transformers' own.

    Args:
        name: For example ``blk.3.attn_q.weight``.

    Returns:
        For example ``model.layers.3.self_attn.q_proj.weight``.

    Raises:
        ModelLoadError: The name is not one of the llama architecture's.
    """
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _IN_LAYER:
        return f"model.layers.{parts[1]}.{_IN_LAYER[parts[2]]}.{parts[3]}"
    raise ModelLoadError(f"GGUF tensor {name!r} is not part of the llama architecture")


def half_split_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorders the rows of a q or k projection from GGUF's rotary layout.

    GGUF keeps the two members of a rotated pair side by side; transformers keeps
    all first members of a head, then all second ones.

    Args:
        weight: float32 [num_heads * head_dim, hidden].
        num_heads: Heads of this projection.

    Returns:
        The same values and shape, rows reordered within each head.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)
