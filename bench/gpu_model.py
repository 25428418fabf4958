"""A random llama of a size that fits the device, written as a real checkpoint."""

import json
import shutil
import time
from pathlib import Path

import torch

Row = dict[str, object]
SHAPES: dict[str, dict[str, int]] = {
    "6.7B": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
    },
    "3.2B": {
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
        "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "1.2B": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    },
}  # fmt: skip
SMOKE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64,
}  # fmt: skip
MAX_CONTEXT = 1024
_TIMES_ON_DEVICE = 3
"""Free memory over the weights in bfloat16: a quantizing copy and the pool as well."""
_TIMES_ON_DISK = 2


def choose(free_on_device: int, free_on_disk: int) -> tuple[str, dict[str, int]]:
    """Returns the largest shape that fits; the smallest where none does.

    Args:
        free_on_device: Bytes.
        free_on_disk: Bytes, where the checkpoint is written.
    """
    for name, shape in SHAPES.items():
        size = 2 * parameters(shape)
        if (
            free_on_device > _TIMES_ON_DEVICE * size
            and free_on_disk > _TIMES_ON_DISK * size
        ):
            return name, shape
    return list(SHAPES.items())[-1]


def parameters(shape: dict[str, int]) -> int:
    """Returns how many weights a shape has, an untied head included."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner + 2 * hidden
    return (
        shape["num_hidden_layers"] * layer + 2 * shape["vocab_size"] * hidden + hidden
    )


def write(directory: Path, device: torch.device, *, smoke: bool) -> Row:
    """Writes a checkpoint with weights drawn on the device, a shard a layer.

    Args:
        directory: Exists and is empty.
        device: Where numbers are drawn.
        smoke: A tiny shape.

    Returns:
        What was written, for the table.
    """
    began = time.perf_counter()
    name, shape = "tiny", SMOKE
    if not smoke:
        free = torch.cuda.mem_get_info(device)[0]
        name, shape = choose(free, shutil.disk_usage(directory).free)
    settings: dict[str, object] = {
        **shape,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "max_position_embeddings": MAX_CONTEXT,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(settings))
    size = _write_shards(directory, shape, device)
    return {
        "what": f"random llama {name}",
        "parameters": parameters(shape),
        "gib": size / 2**30,
        "write_s": time.perf_counter() - began,
    }


def _write_shards(directory: Path, shape: dict[str, int], device: torch.device) -> int:
    from safetensors.torch import save_file

    generator = torch.Generator(device).manual_seed(0)

    def draw(rows: int, columns: int) -> torch.Tensor:
        weight = torch.empty(rows, columns, device=device, dtype=torch.bfloat16)
        return weight.normal_(0, columns**-0.5, generator=generator).cpu()

    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    shards = [
        {
            "model.embed_tokens.weight": draw(shape["vocab_size"], hidden),
            "lm_head.weight": draw(shape["vocab_size"], hidden),
            "model.norm.weight": ones,
        }
    ]
    where: dict[str, str] = {}
    size = 0
    for index in range(-1, shape["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        tensors = shards.pop() if index < 0 else {
            f"{layer}.self_attn.q_proj.weight": draw(hidden, hidden),
            f"{layer}.self_attn.k_proj.weight": draw(kv, hidden),
            f"{layer}.self_attn.v_proj.weight": draw(kv, hidden),
            f"{layer}.self_attn.o_proj.weight": draw(hidden, hidden),
            f"{layer}.mlp.gate_proj.weight": draw(inner, hidden),
            f"{layer}.mlp.up_proj.weight": draw(inner, hidden),
            f"{layer}.mlp.down_proj.weight": draw(hidden, inner),
            f"{layer}.input_layernorm.weight": ones.clone(),
            f"{layer}.post_attention_layernorm.weight": ones.clone(),
        }  # fmt: skip
        file = f"layer{index + 1:03}.safetensors"
        save_file(tensors, directory / file, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, file)
        size += sum(tensor.nbytes for tensor in tensors.values())
    index_file = directory / "model.safetensors.index.json"
    index_file.write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": where})
    )
    return size
