"""A tiny random llama with a byte tokenizer: real work for the engine, quick to load.

Called as a script it writes one: `python bench/chaos_model.py DIRECTORY`. That is done
in a process of its own, so that the bench itself needs neither torch nor its memory.
"""

import json
import subprocess
import sys
from pathlib import Path

MODEL = "chaos"
"""Public name in the pool."""
VOCABULARY = 259
CONTEXT = 1024


def build(directory: Path) -> Path:
    """Writes the checkpoint in a fresh process; returns its directory."""
    target = directory / "model"
    subprocess.run([sys.executable, __file__, str(target)], check=True)
    return target


def _save_model(target: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
        initializer_range=0.3,  # flat logits would make every token a near tie
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(target)


def _save_tokenizer(target: Path) -> None:
    """Ids 0 to 255 are bytes; BOS, EOS and padding follow."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = level
    tokenizer.decoder = decoders.ByteLevel()
    specials = ("<|bos|>", "<|eos|>", "<|pad|>")
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    tokenizer.save(str(target / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": specials[0],
        "eos_token": specials[1],
        "pad_token": specials[2],
        "model_max_length": CONTEXT,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    _save_model(directory)
    _save_tokenizer(directory)
