"""Reads a workload file for the engine benchmark."""

import json
from pathlib import Path

import msgspec
from tokenizers import Tokenizer


class Item(msgspec.Struct, frozen=True):
    """One request: exact prompt tokens, and a forced output length."""

    id: str
    token_ids: tuple[int, ...]
    max_tokens: int


def read_workload(path: Path, model: Path, limit: int | None) -> list[Item]:
    """Reads and tokenizes a workload.

    Args:
        path: JSON lines with id, prompt and max_tokens.
        model: Directory with tokenizer.json.
        limit: How many requests to take; None takes all.
    """
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    lines = path.read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines if line.strip()][:limit]
    return [
        Item(
            id=record["id"],
            token_ids=tuple(tokenizer.encode(record["prompt"]).ids),
            max_tokens=record["max_tokens"],
        )
        for record in records
    ]


def output_tokens(items: list[Item]) -> int:
    """Returns how many output tokens a workload asks for."""
    return sum(item.max_tokens for item in items)


def read_text(model: Path, count: int) -> list[int]:
    """Returns the first tokens of the text in `data`.

    Args:
        model: Directory with tokenizer.json.
        count: How many tokens.
    """
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = (Path(__file__).parent / "data" / "wikitext2-valid.txt").read_text("utf-8")
    # Sixteen characters a token never fall short.
    ids: list[int] = tokenizer.encode(text[: 16 * count], add_special_tokens=False).ids
    return ids[:count]
