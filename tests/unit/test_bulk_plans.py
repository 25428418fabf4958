"""Levels of a document: what the model's limits and template make of a run."""

import pytest

from tokenmill.scheduler.bulk.plans import Part, first_level, next_level, tree_of
from tokenmill.shared.bulk.messages import RunSpec, Span
from tokenmill.shared.errors import InvalidRequest, PromptTooLong
from tokenmill.shared.messages import JobRequest, ModelCard
from tokenmill.shared.tokens_bytes import ByteTokenizer

SPEC = RunSpec(kind="summarize", window_tokens=400, overlap_tokens=0, max_words=20)
TEXT = " ".join(f"This is sentence {number}." for number in range(60))


class NoSystemRole(ByteTokenizer):
    """As a chat template that takes turns of user and assistant alone."""

    def encode_request(
        self, request: JobRequest, max_context: int | None = None
    ) -> list[int]:
        if any(m.role == "system" for m in request.messages or ()):
            raise InvalidRequest("messages", "the chat template refuses this")
        return super().encode_request(request, max_context)


def card(context: int = 10_000, *, has_chat_template: bool = True) -> ModelCard:
    return ModelCard(
        model="tiny",
        max_context=context,
        vocab_size=257,
        tokenizer="bytes",
        has_chat_template=has_chat_template,
        weights_version="w",
    )


def test_the_instruction_goes_where_the_template_takes_it():
    forms = [
        first_level(SPEC, "", TEXT, ByteTokenizer(), card()).form,
        first_level(SPEC, "", TEXT, NoSystemRole(), card()).form,
        first_level(
            SPEC, "", TEXT, ByteTokenizer(), card(has_chat_template=False)
        ).form,
    ]
    assert forms == ["system", "user", "text"]


@pytest.mark.parametrize("context", [600, 800, 1000])
def test_every_job_of_every_level_fits_the_context(context: int):
    tokenizer = ByteTokenizer()
    level = first_level(SPEC, "Title", TEXT, tokenizer, card(context))
    texts = [TEXT[first:end] for first, end, _ in level.windows]
    while True:
        for text in texts:
            prompt = level.prompt(SPEC, "Title", text)
            request = JobRequest(messages=prompt.messages, control_tokens="as_text")
            size = len(tokenizer.encode_request(request))
            assert size + prompt.sampling.max_tokens <= context
        if level.is_last:
            break
        longest = "x" * level.ask(SPEC).max_tokens
        parts = [longest] * len(level.windows)
        level = next_level(level, parts, tokenizer)
        texts = ["\n\n".join(parts[first:end]) for first, end, _ in level.windows]
    assert level.level >= 1


def test_a_context_without_room_is_named():
    with pytest.raises(PromptTooLong, match="the model holds 300"):
        first_level(SPEC, "", TEXT, ByteTokenizer(), card(300))


def test_a_tree_names_what_each_part_covers():
    tokenizer = ByteTokenizer()
    levels = [first_level(SPEC, "", TEXT, tokenizer, card())]
    parts = [[Part(text="x" * 150) for _ in levels[0].windows]]
    while not levels[-1].is_last:
        texts = [part.text for part in parts[-1]]
        levels.append(next_level(levels[-1], texts, tokenizer))
        parts.append([Part(text="x" * 150) for _ in levels[-1].windows])
    nodes = tree_of(levels, parts)
    assert len(nodes) == sum(map(len, parts))
    assert nodes[0].spans == (Span(*levels[0].windows[0][:2]),)
    assert nodes[-1].spans == (Span(0, len(TEXT)),)
    first_of_second = next(node for node in nodes if node.level == 1)
    assert first_of_second.spans[0].start == 0
