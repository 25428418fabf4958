"""A field that takes one of a few words says which."""

import pytest

from tokenmill.shared.decode import decode_prompt
from tokenmill.shared.errors import InvalidRequest


@pytest.mark.parametrize(
    ("prompt", "field", "words"),
    [
        (
            {"text": "x", "control_tokens": "bad"},
            "control_tokens",
            "'bad' is not one of refuse, as_text, allow",
        ),
        (
            {"text": "x", "job_class": "slow"},
            "job_class",
            "'slow' is not one of interactive, bulk",
        ),
        (
            {"messages": [{"role": "robot", "content": "x"}]},
            "messages[...].role",
            "'robot' is not one of system, user, assistant",
        ),
    ],
)
def test_the_allowed_words_are_listed(prompt, field, words) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_prompt(prompt)
    assert caught.value.problem == words
    assert caught.value.field.split(".")[-1] == field.split(".")[-1]
