"""GGUF files that cannot be served are refused, with the file and tensor at fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from support.tiny_gguf import write_tiny_gguf

from tokenmill.shared.errors import ModelLoadError
from tokenmill.workers.engine.model.gguf.file import GgufFile
from tokenmill.workers.engine.model.resolve import resolve_model


def cut_gguf(path: Path) -> None:
    """Takes the end off a GGUF file."""
    write_tiny_gguf(path)
    path.write_bytes(path.read_bytes()[:-5000])


BLOCK = "blk.1.ffn_up.weight"
GGUF_CASES: list[tuple[str, Callable[[Path], object], str]] = [
    ("garbage", lambda p: p.write_bytes(b"not a model" * 10), "not a readable GGUF"),
    ("empty", lambda p: p.write_bytes(b""), "not a readable GGUF"),
    ("head alone", lambda p: p.write_bytes(b"GGUF\3\0\0\0"), "not a readable GGUF"),
    ("cut short", cut_gguf, r"tensor \S+ ends at byte \d+, but the file has \d+;"),
    (
        "another architecture",
        lambda p: write_tiny_gguf(p, architecture="gemma3"),
        "holds architecture 'gemma3'; only 'llama'",
    ),
    (
        "missing tensor",
        lambda p: write_tiny_gguf(p, tensors={BLOCK: None}),
        rf"lacks 1 tensor that.*{BLOCK}",
    ),
    (
        "other shape",
        lambda p: write_tiny_gguf(p, tensors={BLOCK: np.zeros((96, 32), np.float32)}),
        rf"tensor {BLOCK} has shape \[96, 32\].*\[96, 64\]",
    ),
    (
        "unknown tensor",
        lambda p: write_tiny_gguf(p, tensors={"blk.0.ssm": np.zeros(4, np.float32)}),
        r"tensor blk\.0\.ssm is not part of the llama architecture",
    ),
    (
        "integers",
        lambda p: write_tiny_gguf(p, tensors={BLOCK: np.zeros((96, 64), np.int32)}),
        rf"tensor {BLOCK} of type I32 cannot be read",
    ),
    (
        "more layers than it has",
        lambda p: write_tiny_gguf(p, integers={"llama.block_count": 3}),
        r"lacks 9 tensors.*blk\.2\.attn_k\.weight",
    ),
    (
        "no heads",
        lambda p: write_tiny_gguf(p, integers={"llama.attention.head_count": 0}),
        "'llama.attention.head_count' is 0, expected an integer from 1",
    ),
    (
        "one part of three",
        lambda p: write_tiny_gguf(p, integers={"split.count": 3}),
        "one of 3 parts; merge",
    ),
    (
        "rotary scaling that is not converted",
        lambda p: write_tiny_gguf(p, strings={"llama.rope.scaling.type": "yarn"}),
        "rotary scaling 'yarn' is not converted",
    ),
    (
        "a token beyond the vocabulary",
        lambda p: write_tiny_gguf(p, eos=999),
        "'tokenizer.ggml.eos_token_id' is 999, but there are 264 tokens",
    ),
]


@pytest.mark.parametrize(
    ("damage", "message"),
    [case[1:] for case in GGUF_CASES],
    ids=[case[0] for case in GGUF_CASES],
)
def test_a_gguf_file_that_cannot_be_served_says_why(
    damage: Callable[[Path], object],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"
    damage(file)
    with pytest.raises(ModelLoadError, match=message) as caught:
        resolve_model("any", str(file))
    assert str(file) in str(caught.value)
    left = (tmp_path / "cache" / "tokenmill" / "models").glob("*/")
    assert not [entry for entry in left if entry.is_dir()]


@pytest.mark.parametrize("name", ["model.bin", "model.safetensors", "model.pt"])
def test_a_file_that_is_no_model_by_itself_is_refused(
    name: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_bytes(b"\x80\x04")
    with pytest.raises(
        ModelLoadError, match=rf"{name} (holds weights alone|is no GGUF)"
    ):
        resolve_model("any", str(file))


def test_scales_that_are_not_finite_are_read_without_a_warning(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    scales = np.array([np.inf, -np.inf], np.float16).view(np.uint8)
    block = np.concatenate([scales, np.full(16, 0x11, np.uint8)])[None]
    tensor = SimpleNamespace(
        name=BLOCK, data=block, tensor_type=GGMLQuantizationType.Q4_1
    )
    values = GgufFile(tmp_path / "tiny.gguf").values(tensor)
    assert np.isnan(values).all()
