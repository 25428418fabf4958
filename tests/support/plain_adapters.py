"""Adapters for the echo engine: files of the right form, written without torch."""

import json
import struct
from pathlib import Path

NAME = "base_model.model.model.layers.0.self_attn.q_proj"


def save_plain_adapter(
    directory: Path, *, rank: int = 4, value: float = 0.5, **settings: object
) -> Path:
    """Writes a checkpoint as peft lays it out.

    Args:
        directory: Where to.
        rank: Of its one layer.
        value: Of all its elements, so that contents can differ.
        settings: More of adapter_config.json.
    """
    directory.mkdir(parents=True, exist_ok=True)
    content = {
        "peft_type": "LORA",
        "base_model_name_or_path": "tiny",
        "bias": "none",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ["q_proj"],
        **settings,
    }
    (directory / "adapter_config.json").write_text(json.dumps(content))
    width, header, body = 8, {}, b""
    for half, shape in (("A", [rank, width]), ("B", [width, rank])):
        data = struct.pack("<f", value) * (rank * width)
        header[f"{NAME}.lora_{half}.weight"] = {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    file = struct.pack("<Q", len(head)) + head + body
    (directory / "adapter_model.safetensors").write_bytes(file)
    return directory
