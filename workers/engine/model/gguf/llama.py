"""Reads a llama-family GGUF file into transformers' tensor names and configuration.

transformers can do this too, in about thirty seconds; dequantizing the tensors
directly takes a few. A test holds the two against each other.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .....shared.errors import ModelLoadError
from .file import GgufFile, shape_of

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
_ROPE_FACTORS = "rope_freqs.weight"
_NAMED_IN_MESSAGE = 5


class LlamaGguf(GgufFile):
    """One GGUF file of the llama architecture.

    Args:
        path: The file.

    Raises:
        ModelLoadError: Not readable as GGUF, or of another architecture.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        architecture = self.field("general.architecture")
        if architecture != "llama":
            raise ModelLoadError(
                f"{path} holds architecture {architecture!r}; only 'llama' GGUF files "
                "are converted: use a safetensors checkpoint instead"
            )
        self.num_heads = self.integer("llama.attention.head_count", least=1)
        self.num_kv_heads = self.integer(
            "llama.attention.head_count_kv", self.num_heads, least=1
        )
        self._names = {tensor.name for tensor in self.stored}

    def config(self) -> dict[str, object]:
        """Returns the content of transformers' `config.json`."""
        hidden = self.integer("llama.embedding_length", least=1)
        special = {
            f"{ours}_token_id": self.integer(f"tokenizer.ggml.{key}_token_id")
            for ours, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
            if self.has(f"tokenizer.ggml.{key}_token_id")
        }
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": "blk.0.attn_q.bias" in self._names,
            **special,
            "head_dim": self._head_dim(hidden),
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": self.integer("llama.feed_forward_length", least=1),
            "max_position_embeddings": self.integer("llama.context_length", least=1),
            "mlp_bias": "blk.0.ffn_up.bias" in self._names,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.integer("llama.block_count", least=1),
            "num_key_value_heads": self.num_kv_heads,
            "rms_norm_eps": self.number("llama.attention.layer_norm_rms_epsilon"),
            "rope_parameters": self._rope(),
            "tie_word_embeddings": "output.weight" not in self._names,
            "dtype": "float32",
            "vocab_size": self._vocabulary(),
        }

    def _head_dim(self, hidden: int) -> int:
        size = self.integer(
            "llama.attention.key_length", hidden // self.num_heads, least=1
        )
        rotated = self.integer("llama.rope.dimension_count", size)
        values = self.integer("llama.attention.value_length", size)
        if rotated != size or values != size or size % 2:
            raise ModelLoadError(
                f"{self.path}: keys have {size} numbers a head, of which {rotated} are "
                f"rotated, and values {values}; expected one even number for all three"
            )
        return size

    def _rope(self) -> dict[str, object]:
        theta = self.number("llama.rope.freq_base", 10000.0)
        key = "llama.rope.scaling.type"
        kind = self.field(key) if self.has(key) else "none"
        if kind == "linear":
            factor = self.number("llama.rope.scaling.factor")
            return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
        if kind != "none":
            raise ModelLoadError(
                f"{self.path}: rotary scaling {kind!r} is not converted from GGUF; "
                "use a safetensors checkpoint instead"
            )
        factors = self._rope_factors()
        if factors is None:
            return {"rope_type": "default", "rope_theta": theta}
        # A divisor for each frequency is what "longrope" takes, here at any length.
        return {
            "rope_type": "longrope",
            "rope_theta": theta,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": self.integer("llama.context_length"),
            "short_factor": factors,
            "long_factor": factors,
        }

    def _rope_factors(self) -> list[float] | None:
        for tensor in self.stored:
            if tensor.name == _ROPE_FACTORS:
                return [float(value) for value in self.values(tensor)]
        return None

    def _vocabulary(self) -> int:
        for tensor in self.stored:
            if tensor.name == "token_embd.weight":
                return self.integer("llama.vocab_size", shape_of(tensor)[0], least=1)
        raise ModelLoadError(f"{self.path} lacks tensor token_embd.weight")

    def num_tensors(self) -> int:
        """Returns how many tensors the file has."""
        return len(self.stored)

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (transformers' name, float32 array [out, in] or [n]) in file order.

        Raises:
            ModelLoadError: A tensor is missing, unknown, of another shape than the
                metadata calls for, or of a type that cannot be read.
        """
        self._check_tensors()
        for tensor in self.stored:
            if tensor.name == _ROPE_FACTORS:
                continue  # part of the configuration
            name = transformers_name(tensor.name)
            values = self.values(tensor)
            if ".q_proj." in name:
                values = half_split_rows(values, self.num_heads)
            elif ".k_proj." in name:
                values = half_split_rows(values, self.num_kv_heads)
            yield name, values

    def _check_tensors(self) -> None:
        expected = _expected_shapes(self.config())
        missing = sorted(set(expected) - self._names)
        if missing:
            shown = ", ".join(missing[:_NAMED_IN_MESSAGE])
            raise ModelLoadError(
                f"{self.path} lacks {len(missing)} tensor{'s' * (len(missing) > 1)} "
                f"that its metadata calls for ({shown}); fetch it again"
            )
        for tensor in self.stored:
            wanted = expected.get(tensor.name)
            if tensor.name != _ROPE_FACTORS and wanted is None:
                raise ModelLoadError(
                    f"{self.path}: tensor {tensor.name} is not part of the llama "
                    "architecture that its metadata describes"
                )
            if wanted is not None and shape_of(tensor) != wanted:
                raise ModelLoadError(
                    f"{self.path}: tensor {tensor.name} has shape "
                    f"{list(shape_of(tensor))}, but its metadata calls for "
                    f"{list(wanted)}"
                )


def _expected_shapes(config: dict[str, object]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all tensors by GGUF name, for a `config.json`."""

    def size(key: str) -> int:
        value = config[key]
        assert isinstance(value, int)
        return value

    hidden, inner = size("hidden_size"), size("intermediate_size")
    queries = size("num_attention_heads") * size("head_dim")
    keys = size("num_key_value_heads") * size("head_dim")
    attention = {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
    }
    mlp = {
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (size("vocab_size"), hidden),
        "output_norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["output.weight"] = (size("vocab_size"), hidden)
    for layer in range(size("num_hidden_layers")):
        for norm in ("attn_norm", "ffn_norm"):
            shapes[f"blk.{layer}.{norm}.weight"] = (hidden,)
        for group, bias in ((attention, "attention_bias"), (mlp, "mlp_bias")):
            for name, shape in group.items():
                shapes[f"blk.{layer}.{name}.weight"] = shape
                if config[bias]:
                    shapes[f"blk.{layer}.{name}.bias"] = shape[:1]
    return shapes


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


def half_split_rows(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorders the rows of a q or k projection from GGUF's rotary layout.

    GGUF keeps the two members of a rotated pair side by side; transformers keeps
    all first members of a head, then all second ones.

    Args:
        values: float32 weight [num_heads * head_dim, hidden], or a bias without the
            last dimension.
        num_heads: Heads of this projection.

    Returns:
        The same values and shape, rows reordered within each head.
    """
    rows = len(values)
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
