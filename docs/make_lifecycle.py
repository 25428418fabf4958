"""Writes docs/lifecycle.md from the transition table: `python docs/make_lifecycle.py`.

A test fails when the file and the table differ.
"""

import ast
import inspect
import itertools
import sys
from pathlib import Path

from tokenmill.shared import lifecycle
from tokenmill.shared.lifecycle import TRANSITIONS, Event, State, mermaid


def member_docs(enum: type) -> dict[str, str]:
    """The string that stands under each member of an enum."""
    tree = ast.parse(inspect.getsource(lifecycle))
    body = next(
        node.body
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == enum.__name__
    )
    docs = {}
    for this, following in itertools.pairwise(body):
        if isinstance(this, ast.Assign) and isinstance(following, ast.Expr):
            value, text = this.value, following.value
            if isinstance(value, ast.Constant) and isinstance(text, ast.Constant):
                docs[str(value.value)] = str(text.value)
    return docs


def page() -> str:
    """Returns the whole page."""
    states, events = member_docs(State), member_docs(Event)
    lines = [
        "# A job's life",
        "",
        "Generated from `shared/lifecycle.py` by `python docs/make_lifecycle.py`; a",
        "test holds the two together. A pair that is not listed is an error.",
        "",
        "```mermaid",
        mermaid(),
        "```",
        "",
        "| state | meaning |",
        "|---|---|",
        *(f"| {s} | {states[s]} |" for s in State),
        "",
        "| event | meaning |",
        "|---|---|",
        *(f"| {e} | {events[e]} |" for e in Event),
        "",
        "| from | event | to |",
        "|---|---|---|",
        *(f"| {s} | {e} | {t} |" for (s, e), t in TRANSITIONS.items()),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    target = Path(__file__).with_name("lifecycle.md")
    target.write_text(page(), "utf-8")
    sys.stdout.write(f"wrote {target.name}\n")
