"""What the model is asked for a window of a document, or for partial summaries.

The instruction comes first and has the same bytes in every job of a run and level, so
that the prefix cache computes it once; the title follows it. A reminder comes last: a
small model that has read two thousand tokens goes on writing the text otherwise.
"""

import math
from typing import Final, Literal

import msgspec

from ...shared.bulk.messages import RunSpec
from ...shared.messages import Message, Prompt, Sampling

TOKENS_PER_WORD: Final = 2.0
"""Room that a word is given in the output; most languages need less."""
SPARE_TOKENS: Final = 16
PARTIAL_WORDS: Final = 60
"""Words of a partial summary at least, however short the whole is to be."""
PART_OF_WINDOW: Final = 4
"""A partial summary takes at most this part of a window, so that each level has far
fewer of them than the one below."""
TITLE_CHARACTERS: Final = 200
FREQUENCY_PENALTY: Final = 0.2
"""Greedy, and without it a small model goes in circles. It counts the output alone: a
penalty on the words of the text as well would lead away from what the text says."""


Form = Literal["system", "user", "text"]
"""A message of its own, the beginning of the user's, or plain text: not every model has
a chat template, and some templates refuse a system message."""


class Ask(msgspec.Struct, frozen=True):
    """How one part of a document is asked for."""

    instruction: str
    reminder: str
    """Repeats in one sentence, after the text, what is to be done."""
    max_words: int
    max_tokens: int


def ask_for(spec: RunSpec, *, level: int, is_last: bool, window_tokens: int) -> Ask:
    """Returns what is asked of the model for all jobs of a level.

    Args:
        spec: The run's.
        level: 0 summarizes text, others summaries.
        is_last: Whether the level has one job, which gives the document's summary.
        window_tokens: Most tokens of text in a job.
    """
    most_tokens = max(window_tokens // PART_OF_WINDOW, 8)
    words = spec.max_words
    if not is_last:
        fit = int((most_tokens - SPARE_TOKENS) / TOKENS_PER_WORD)
        words = max(1, min(max(words, PARTIAL_WORDS), fit))
    tokens = math.ceil(words * TOKENS_PER_WORD) + SPARE_TOKENS
    if not is_last:
        tokens = min(tokens, most_tokens)
    what = "the text" if level == 0 else "the partial summaries of one text"
    style = f" {spec.style.strip()}" if spec.style and spec.style.strip() else ""
    instruction = (
        f"You write summaries. Summarize {what} that the user gives, in one paragraph "
        f"of at most {words} words, in its language, with nothing that it does not "
        f"say.{style}"
    )
    above = "text" if level == 0 else "partial summaries"
    reminder = (
        f"Summarize the {above} above in one paragraph of at most {words} words. "
        "Write prose."
    )
    return Ask(instruction, reminder, words, tokens)


def prompt_for(spec: RunSpec, ask: Ask, title: str, text: str, *, form: Form) -> Prompt:
    """Returns the prompt of one part.

    Args:
        spec: The run's.
        ask: From `ask_for`.
        title: The document's; may be empty.
        text: A window of the document, or partial summaries.
        form: How the model takes the instruction.
    """
    named = " ".join(title.split())[:TITLE_CHARACTERS]
    heading = f"Title: {named}\n\n" if named else ""
    body = f'{heading}"""\n{text}\n"""\n\n{ask.reminder}'
    sampling = Sampling(max_tokens=ask.max_tokens, frequency_penalty=FREQUENCY_PENALTY)
    plain: str | None = None
    messages: tuple[Message, ...] | None = None
    if form == "system":
        messages = (Message("system", ask.instruction), Message("user", body))
    elif form == "user":
        messages = (Message("user", f"{ask.instruction}\n\n{body}"),)
    else:
        plain = f"{ask.instruction}\n\n{body}\n\nSummary:"
    return Prompt(
        plain,
        messages,
        model=spec.base,
        adapter=spec.adapter,
        sampling=sampling,
        control_tokens="as_text",
    )
