"""Token ids to text: held against the tokenizers library's own decoding."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tokenmill.shared.errors import ModelLoadError
from tokenmill.workers.engine.detokenizer import TokenTable

TEXTS = [
    "The quick brown fox jumps over the lazy dog. " * 3,
    "Zażółć gęślą jaźń; Ελληνικά; 日本語のテキスト; 한국어",
    "emoji 👩‍👩‍👧 🏳️‍🌈 🙂🙃 and tabs\t\n  two  spaces ",
    " leading space",
]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS[:2], trainer)
    tokenizer.add_tokens(["<tool> ü"])
    return tokenizer


def sentencepiece(decoder) -> Tokenizer:
    """Pieces as sentencepiece writes them, with all 256 byte tokens."""
    words = ["▁", "▁The", "▁quick", "▁fox", "quick", "s", "▁▁", ".", "é", "日"]
    names = ["<s>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoder
    return tokenizer


LLAMA = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)
METASPACE = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])


def joined(table: TokenTable, ids) -> str:
    detokenizer = table.start()
    parts = [detokenizer.push(token_id) for token_id in ids]
    assert all("\ufffd" not in part for part in parts)
    return "".join(parts) + detokenizer.flush()


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_text_equals_the_librarys(text):
    tokenizer = byte_level()
    ids = tokenizer.encode(text).ids
    assert joined(TokenTable.from_tokenizer(tokenizer), ids) == text


def test_special_tokens_have_no_text_and_added_ones_have():
    tokenizer = byte_level()
    table = TokenTable.from_tokenizer(tokenizer)
    ids = [
        tokenizer.token_to_id("<|end|>"),
        tokenizer.token_to_id("<tool> ü"),
        *tokenizer.encode(" ok").ids,
    ]
    assert joined(table, ids) == tokenizer.decode(ids, skip_special_tokens=True)
    assert joined(table, ids) == "<tool> ü ok"


@pytest.mark.parametrize("decoder", [LLAMA, METASPACE], ids=["llama", "metaspace"])
def test_sentencepiece_text_equals_the_librarys(decoder):
    tokenizer = sentencepiece(decoder)
    table = TokenTable.from_tokenizer(tokenizer)
    words = ["▁", "▁The", "▁quick", "▁fox", "quick", "s", "▁▁", ".", "é", "日", "<s>"]
    chooser = random.Random(3)
    for _ in range(300):
        ids = []
        for _ in range(chooser.randint(1, 8)):
            if chooser.random() < 0.3:
                char = chooser.choice("🙂é日")
                ids += [tokenizer.token_to_id(f"<0x{b:02X}>") for b in char.encode()]
            else:
                ids.append(tokenizer.token_to_id(chooser.choice(words)))
        assert joined(table, ids) == tokenizer.decode(ids, skip_special_tokens=True)


def test_an_emoji_over_four_tokens_appears_once_and_whole():
    detokenizer = TokenTable.for_bytes().start()
    parts = [detokenizer.push(byte) for byte in "🙂!".encode()]
    assert parts == ["", "", "", "🙂", "!"]


def test_invalid_bytes_show_as_soon_as_they_are_known_to_be():
    detokenizer = TokenTable.for_bytes().start()
    assert detokenizer.push(0xC3) == ""
    assert detokenizer.has_pending
    assert detokenizer.push(ord("a")) == "\ufffda"
    assert detokenizer.push(0xF0) == ""
    assert detokenizer.flush() == "\ufffd"


def test_ids_beyond_the_vocabulary_have_no_text():
    assert TokenTable.for_bytes().start().push(50_000) == ""


def test_an_unknown_decoder_and_a_missing_file_are_errors_that_name_them(tmp_path):
    tokenizer = byte_level()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ModelLoadError, match="WordPiece"):
        TokenTable.from_tokenizer(tokenizer)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        TokenTable.from_directory(tmp_path)


def test_a_directory_is_read(tmp_path):
    tokenizer = byte_level()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    table = TokenTable.from_directory(tmp_path)
    assert joined(table, tokenizer.encode(TEXTS[1]).ids) == TEXTS[1]
