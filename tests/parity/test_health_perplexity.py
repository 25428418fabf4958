"""A health run on a real, tiny model: its perplexity is that of transformers' own."""

import math

import pytest
import torch
from support.tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tokenmill.shared.config import ModelConfig, WorkerConfig
from tokenmill.shared.health_set import parse_health_set
from tokenmill.workers.health_set import run_health_set
from tokenmill.workers.loading import load

TEXT = "The quick brown fox jumps over the lazy dog, and over forty more of its kin."


@pytest.mark.parametrize("tp", [1, 2])
def test_a_text_has_the_perplexity_of_the_reference(tmp_path, tp: int) -> None:
    directory = save_tiny_model("llama", tmp_path)
    model = ModelConfig(
        name="tiny", path=str(directory), weights="float32", kv="float32", tp=tp
    )
    worker = WorkerConfig(num_blocks=64, threads=1, device="cpu")
    loaded = load("model", model, worker)
    ids = AutoTokenizer.from_pretrained(directory)(TEXT, return_tensors="pt").input_ids
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        wanted = math.exp(float(reference(input_ids=ids, labels=ids).loss))
    lines = (
        f'{{"text": "{TEXT}", "max_perplexity": {wanted * 1.001}}}\n'
        f'{{"text": "{TEXT}", "max_perplexity": {wanted * 0.99}}}\n'
        '{"prompt": "abc", "regex": "(?s).", "max_tokens": 4}\n'
    )
    report = run_health_set(parse_health_set(lines.encode(), "set"), loaded, "g")
    if loaded.group is not None:
        loaded.group.close()
    assert report.perplexity == pytest.approx(wanted, rel=1e-4)
    assert report.num_failed == 1
    assert report.failures[0].startswith("line 2: expected a perplexity")
