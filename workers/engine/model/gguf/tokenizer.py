"""Writes the byte-level BPE tokenizer that a GGUF file carries as tokenizer.json."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from .....shared.errors import ModelLoadError
from .file import GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

TOKEN_TYPE_CONTROL: Final = 3
"""GGUF's mark for special tokens in `tokenizer.ggml.token_type`."""
FLAVOURS: Final = ("smollm", "gpt-2", "llama-bpe")
"""How text is split before merging, as `tokenizer.ggml.pre` names it."""
_LLAMA3_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # English contractions
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"  # a word, with one leading character
    r"|\p{N}{1,3}"  # digits by three
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"  # punctuation
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"  # line breaks and spaces
)
"""How Llama 3 defines the pieces that merges stay within."""


def save_tokenizer(gguf: GgufFile, directory: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json.

    Args:
        gguf: The file.
        directory: Where they go.

    Raises:
        ModelLoadError: Its tokenizer is of a kind that is not converted.
    """
    kind = gguf.field("tokenizer.ggml.model")
    key = "tokenizer.ggml.pre"
    flavour = gguf.field(key) if gguf.has(key) else None
    if kind != "gpt2" or flavour not in FLAVOURS:
        raise ModelLoadError(
            f"{gguf.path} has tokenizer {kind!r}/{flavour!r}; the byte-level 'gpt2' "
            f"tokenizers {', '.join(FLAVOURS)} are converted: for another, put the "
            "model's tokenizer.json and tokenizer_config.json beside the file"
        )
    tokens = gguf.strings("tokenizer.ggml.tokens")
    tokenizer = _tokenizer(gguf, tokens, str(flavour))
    tokenizer.save(str(directory / "tokenizer.json"))
    config = _config(gguf, tokens)
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text)


def _tokenizer(gguf: GgufFile, tokens: list[str], flavour: str) -> "Tokenizer":
    from tokenizers import AddedToken, Tokenizer, decoders, models

    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = gguf.strings("tokenizer.ggml.merges")
    pairs = [(left, right) for left, _, right in (m.partition(" ") for m in merges)]
    whole_words = flavour == "llama-bpe"  # a known word is a token, whatever merges say
    try:
        model = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=whole_words)
    except Exception as error:  # the library raises no narrower kind
        raise ModelLoadError(
            f"{gguf.path}: its merges do not fit its tokens: {error}"
        ) from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _splitter(flavour)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token in _control_tokens(gguf, tokens)
        ]
    )
    if _adds_bos(gguf, flavour):
        from tokenizers.processors import TemplateProcessing

        bos = gguf.integer("tokenizer.ggml.bos_token_id")
        tokenizer.post_processor = TemplateProcessing(
            single=f"{tokens[bos]} $A",
            pair=f"{tokens[bos]} $A {tokens[bos]}:1 $B:1",
            special_tokens=[(tokens[bos], bos)],
        )
    return tokenizer


def _splitter(flavour: str) -> "PreTokenizer":
    """Returns what cuts text into the pieces that merges stay within."""
    from tokenizers import Regex, pre_tokenizers

    if flavour == "llama-bpe":
        words = pre_tokenizers.Split(Regex(_LLAMA3_WORDS), behavior="isolated")
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([words, letters])
    words_of_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if flavour == "gpt-2":
        return words_of_gpt2
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, words_of_gpt2])


def _adds_bos(gguf: GgufFile, flavour: str) -> bool:
    """Returns whether a text begins with BOS: Llama 3's does unless it is said."""
    key = "tokenizer.ggml.add_bos_token"
    return bool(gguf.field(key)) if gguf.has(key) else flavour == "llama-bpe"


def _control_tokens(gguf: GgufFile, tokens: list[str]) -> list[str]:
    kinds = gguf.field("tokenizer.ggml.token_type")
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise ModelLoadError(
            f"{gguf.path}: 'tokenizer.ggml.token_type' is no array of "
            f"{len(tokens)} types"
        )
    return [
        token
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == TOKEN_TYPE_CONTROL
    ]


def _config(gguf: GgufFile, tokens: list[str]) -> dict[str, object]:
    special: dict[str, object] = {}
    roles = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    for role, key in roles.items():
        name = f"tokenizer.ggml.{key}_token_id"
        if not gguf.has(name):
            continue
        token = gguf.integer(name)
        if token >= len(tokens):
            raise ModelLoadError(
                f"{gguf.path}: metadata {name!r} is {token}, but there are "
                f"{len(tokens)} tokens"
            )
        special[f"{role}_token"] = tokens[token]
    config = {
        **special,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.integer("llama.context_length"),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if gguf.has("tokenizer.chat_template"):
        config["chat_template"] = gguf.field("tokenizer.chat_template")
    return config
