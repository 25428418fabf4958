"""The demo's prompts: real text of very different lengths, in both classes."""

import json
from importlib.resources import files
from typing import Final

from ...shared.messages import JobClass, Message, Prompt, Sampling

SYSTEM: Final = "You are a helpful assistant. Answer in a few plain sentences."

QUESTIONS: Final = (
    ("Why is the sky blue?", 64),
    ("Name three uses of a queue in a computer system.", 56),
    ("Write a two-line poem about a water mill.", 40),
    ("What is the capital of France, and which river runs through it?", 32),
    (
        (
            "I have a list of customer names in a text file, one per line, some "
            "of them repeated, some with blanks at the end. Explain how I would "
            "count how often each name occurs, and what to do about the blanks."
        ),
        64,
    ),
    (
        (
            "Two friends leave the same town at the same time. One walks at five "
            "kilometres an hour towards the north, the other cycles at fifteen "
            "kilometres an hour towards the south. After an hour the cyclist stops for "
            "half an hour to drink a coffee and repair a tyre, then goes on. Describe "
            "in your own words how the distance between the two changes over the first "
            "three hours, and say where the numbers come from."
        ),
        64,
    ),
    ("Translate to French: 'The mill grinds what the river brings.'", 32),
    ("Give one reason to write tests before fixing a bug.", 40),
)
"""(question, most output tokens), interactive."""


def demo_prompts() -> list[Prompt]:
    """Returns a dozen prompts: eight questions, four documents to summarize."""
    prompts = [
        Prompt(
            messages=(Message("system", SYSTEM), Message("user", question)),
            sampling=Sampling(max_tokens=max_tokens),
        )
        for question, max_tokens in QUESTIONS
    ]
    text = files(__package__).joinpath("documents.jsonl").read_text("utf-8")
    for line in text.splitlines():
        document = json.loads(line)
        request = (
            f"Summarize this document in two sentences.\n\n"
            f"# {document['title']}\n\n{document['text']}"
        )
        prompts.append(
            Prompt(
                messages=(Message("user", request),),
                sampling=Sampling(max_tokens=48),
                job_class=JobClass.BULK,
                tenant="documents",
            )
        )
    return prompts
