"""A field that takes one of a few words says which."""

from typing import Literal

import msgspec
import pytest

from tokenmill.shared.decode import decode_prompt
from tokenmill.shared.errors import InvalidRequest
from tokenmill.shared.typed import convert


@pytest.mark.parametrize(
    ("prompt", "field", "words"),
    [
        (
            {"text": "x", "control_tokens": "bad"},
            "control_tokens",
            "'bad' is not one of allow, as_text, refuse",
        ),
        (
            {"text": "x", "job_class": "slow"},
            "job_class",
            "'slow' is not one of interactive, bulk",
        ),
        (
            {"messages": [{"role": "robot", "content": "x"}]},
            "messages[...].role",
            "'robot' is not one of assistant, system, user",
        ),
    ],
)
def test_the_allowed_words_are_listed(prompt, field, words) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_prompt(prompt)
    assert caught.value.problem == words
    assert caught.value.field.split(".")[-1] == field.split(".")[-1]


class _Window(msgspec.Struct):
    length: Literal["24h"] | None = None


class _Body(msgspec.Struct):
    windows: list[_Window] | None = None


def test_words_of_any_form_are_listed() -> None:
    with pytest.raises(InvalidRequest) as caught:
        convert({"windows": [{"length": "1h"}]}, _Body, "body")
    assert caught.value.problem == "'1h' is not one of 24h"
