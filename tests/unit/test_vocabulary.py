"""A tokenizer with tokens that its model does not have."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from structlog.testing import capture_logs
from support.damaged_models import WEIGHTS, edit_config, edit_tensors
from support.tiny_models import save_tiny_model
from tokenizers import Tokenizer

from tokenmill.shared.config import ModelConfig, WorkerConfig
from tokenmill.shared.errors import ModelLoadError
from tokenmill.workers.cli_calibrate import calibrate_model
from tokenmill.workers.engine.model.inspection import describe
from tokenmill.workers.engine.model.vocabulary import read_tokenizer
from tokenmill.workers.loading import load

BEYOND = r"tokenizer\.json has 56 tokens beyond the model's vocabulary of 200 \("


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A model with fewer tokens than its tokenizer, which has 256 bytes and 3 more."""
    path = save_tiny_model("llama", tmp_path)
    stored = load_file(path / WEIGHTS)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    edit_config(path, vocab_size=200, eos_token_id=1, bos_token_id=1, pad_token_id=1)
    edit_tensors(path, **{name: stored[name][:200].clone() for name in names})
    return path


def test_ordinary_tokens_beyond_the_vocabulary_are_refused(small: Path) -> None:
    with pytest.raises(ModelLoadError, match=BEYOND):
        read_tokenizer(small)
    with pytest.raises(ModelLoadError, match=BEYOND):
        describe(small)
    with pytest.raises(ModelLoadError, match=BEYOND):
        load("model", ModelConfig(name="m", path=str(small)), WorkerConfig())
    with pytest.raises(ModelLoadError, match=BEYOND):
        calibrate_model(str(small))


def test_added_tokens_beyond_the_vocabulary_are_told(tmp_path: Path) -> None:
    path = save_tiny_model("llama", tmp_path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    with capture_logs() as logs:
        read_tokenizer(path, size)
        read_tokenizer(path, size + 1000)  # matrices are often padded
    assert not logs
    with capture_logs() as logs:
        read_tokenizer(path, size - 1)
    (told,) = logs
    assert told["event"] == "tokens_beyond_vocabulary"
    assert f"is {size - 1}" in told["tokens"]


def test_a_config_without_a_vocabulary_is_left_to_the_family(tmp_path: Path) -> None:
    path = save_tiny_model("llama", tmp_path)
    edit_config(path, vocab_size=None)
    with capture_logs() as logs:
        read_tokenizer(path)
    assert not logs
