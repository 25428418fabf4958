"""How a document is summarized: levels of windows, and the parts that come of them."""

from collections.abc import Sequence
from typing import Final

import msgspec
import structlog

from ...shared.bulk.checks import LEAST_WINDOW
from ...shared.bulk.messages import Node, RunSpec, Span
from ...shared.errors import InvalidRequest, PromptTooLong
from ...shared.messages import JobRequest, ModelCard, Prompt
from ...shared.tokens import Tokenizer
from .prompts import Ask, Form, ask_for, prompt_for
from .windows import divide, gather

PROBE: Final = "x"
"""Stands for the text where the prompt around it is measured."""
_log = structlog.get_logger(__name__)


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One level of a document, as it stands in its item: what each job is given."""

    level: int
    windows: tuple[tuple[int, int, int], ...]
    """First, end and tokens: of level 0 characters of the text, of others parts of the
    level below."""
    window_tokens: int
    form: Form

    @property
    def is_last(self) -> bool:
        """Whether its one job gives the document's summary."""
        return len(self.windows) == 1

    def ask(self, spec: RunSpec) -> Ask:
        """What is asked of the model here."""
        return ask_for(
            spec,
            level=self.level,
            is_last=self.is_last,
            window_tokens=self.window_tokens,
        )

    def prompt(self, spec: RunSpec, title: str, text: str) -> Prompt:
        """The prompt of one of its jobs; the same text gives the same bytes."""
        return prompt_for(spec, self.ask(spec), title, text, form=self.form)


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A partial summary, as it stands in its item."""

    text: str
    job_id: str = ""
    fell_back: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0


def first_level(
    spec: RunSpec, title: str, text: str, tokenizer: Tokenizer, card: ModelCard
) -> Level:
    """Divides a document's text. Heavy: not for an event loop.

    Args:
        spec: The run's.
        title: The document's.
        text: The document's.
        tokenizer: The model's.
        card: The model's limits.

    Raises:
        PromptTooLong: The model's context holds no window of any use.
    """
    form, around = _around(spec, title, tokenizer, card)
    room = card.max_context - around
    if room < LEAST_WINDOW:
        raise PromptTooLong(
            "max_words",
            f"instruction, title and a summary of {spec.max_words} words take {around} "
            f"tokens; the model holds {card.max_context} and a window needs at least "
            f"{LEAST_WINDOW}: ask for fewer words, or another model",
        )
    most = min(spec.window_tokens, room)
    overlap = min(spec.overlap_tokens, most // 2)
    windows = divide(text, tokenizer.count_texts, most, overlap)
    return Level(
        level=0,
        windows=tuple((w.start, w.end, w.tokens) for w in windows),
        window_tokens=most,
        form=form,
    )


def _around(
    spec: RunSpec, title: str, tokenizer: Tokenizer, card: ModelCard
) -> tuple[Form, int]:
    """How the model takes instructions, and the tokens around the text of a job."""
    if not card.has_chat_template:
        return "text", _tokens_around(spec, title, tokenizer, "text")
    try:
        return "system", _tokens_around(spec, title, tokenizer, "system")
    except InvalidRequest as error:
        if error.field != "messages":
            raise
        _log.info("instruction_in_user_message", model=spec.base, why=str(error))
    return "user", _tokens_around(spec, title, tokenizer, "user")


def _tokens_around(spec: RunSpec, title: str, tokenizer: Tokenizer, form: Form) -> int:
    """Instruction, title and output, of whichever job has most."""
    most = 0
    for level, is_last in ((0, False), (0, True), (1, False), (1, True)):
        ask = ask_for(
            spec, level=level, is_last=is_last, window_tokens=spec.window_tokens
        )
        prompt = prompt_for(spec, ask, title, PROBE, form=form)
        request = JobRequest(
            text=prompt.text, messages=prompt.messages, control_tokens="as_text"
        )
        num_tokens = len(tokenizer.encode_request(request)) + ask.max_tokens
        most = max(most, num_tokens)
    return most


def next_level(before: Level, texts: Sequence[str], tokenizer: Tokenizer) -> Level:
    """Groups partial summaries for the level above. Not for an event loop.

    Args:
        before: The level that gave them.
        texts: All of them, in order.
        tokenizer: The model's.
    """
    groups = gather(texts, tokenizer.count_texts, before.window_tokens)
    sizes = tokenizer.count_texts(
        ["\n\n".join(texts[group[0] : group[-1] + 1]) for group in groups]
    )
    return msgspec.structs.replace(
        before,
        level=before.level + 1,
        windows=tuple(
            (group[0], group[-1] + 1, size)
            for group, size in zip(groups, sizes, strict=True)
        ),
    )


def tree_of(
    levels: Sequence[Level], parts: Sequence[Sequence[Part]]
) -> tuple[Node, ...]:
    """Returns every partial summary with what of the source it covers.

    Args:
        levels: From the text upwards.
        parts: Of each level, in order.
    """
    nodes: list[Node] = []
    below: list[Span] = []
    for level, made in zip(levels, parts, strict=True):
        spans = [
            Span(first, end)
            if level.level == 0
            else Span(below[first].start, below[end - 1].end)
            for first, end, _ in level.windows
        ]
        nodes += [
            Node(
                level=level.level,
                index=index,
                spans=(span,),
                text=part.text,
                tokens=window[2],
                job_id=part.job_id or None,
                fell_back=part.fell_back,
            )
            for index, (span, part, window) in enumerate(
                zip(spans, made, level.windows, strict=True)
            )
        ]
        below = spans
    return tuple(nodes)
