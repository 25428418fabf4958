"""What must hold of summaries, checked against source, tree and jobs. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill.scheduler.bulk.sentences import sentences
from tokenmill.shared.bulk.job_ids import place_of

Line = Mapping[str, Any]


def problems_of(
    lines: Sequence[Line],
    documents: Sequence[Line],
    *,
    run: str,
    max_words: int,
    asked: Mapping[str, str],
    answered: Mapping[str, str],
) -> list[str]:
    """Returns everything that is wrong with the lines of an output.

    Args:
        lines: As written.
        documents: The input, in its order.
        run: The run's id.
        max_words: Most words of a summary.
        asked: Job id -> everything that its model was given.
        answered: Job id -> what its model said.
    """
    ids = [line["id"] for line in lines]
    wanted = [document["id"] for document in documents]
    problems = [
        f"{name}: {ids.count(name)} lines" for name in set(ids) if ids.count(name) > 1
    ]
    problems += [f"{name}: no line" for name in wanted if name not in ids]
    problems += [f"{name}: not in the input" for name in ids if name not in wanted]
    by_id = {line["id"]: line for line in lines}
    for seq, document in enumerate(documents):
        line = by_id.get(document["id"])
        if line is None:
            continue
        found = _summary_problems(line, max_words)
        if "error" not in line:
            found += _uncovered(line, document["text"])
            found += _foreign(line, document["text"], run, seq, asked, answered)
        problems += [f"{document['id']}: {problem}" for problem in found]
    return problems


def _summary_problems(line: Line, max_words: int) -> list[str]:
    if "error" in line:
        return [f"failed: {line['error']['message']}"]
    words = len(line["summary"].split())
    if not words:
        return ["the summary is empty"]
    return [f"{words} words, not {max_words}"] if words > max_words else []


def leaves_of(line: Line) -> list[Line]:
    """Returns the nodes of a tree that summarize the text itself."""
    return [node for node in line["tree"] if node["level"] == 0]


def _uncovered(line: Line, text: str) -> list[str]:
    """Sentences that lie in no window; one longer than all windows may be cut."""
    spans = sorted(tuple(s) for leaf in leaves_of(line) for s in leaf["spans"])
    longest = max(end - start for start, end in spans)
    lost = []
    for one in sentences(text):
        whole = any(start <= one.start and one.end <= end for start, end in spans)
        if not whole and not (
            one.end - one.start > longest / 2 and _is_covered(one.start, one.end, spans)
        ):
            lost.append(f"no window has {text[one.start : one.end][:60]!r}")
    return lost


def _is_covered(start: int, end: int, spans: Sequence[tuple[int, ...]]) -> bool:
    for first, last in spans:
        if first <= start < last:
            start = last
    return start >= end


def _foreign(
    line: Line,
    text: str,
    run: str,
    seq: int,
    asked: Mapping[str, str],
    answered: Mapping[str, str],
) -> list[str]:
    """Nodes that are not of this document, or not what their job was about."""
    found = []
    for node in line["tree"]:
        name = f"node {node['level']}:{node['index']}"
        place = place_of(node["job_id"])
        if place is None or (place.run, place.seq) != (run, seq):
            found.append(f"{name} is of job {node['job_id']}")
            continue
        given, said = asked.get(node["job_id"]), answered.get(node["job_id"])
        if given is None or said is None:
            found.append(f"{name}: its job is not known")
        elif node["level"] == 0 and not all(
            text[start:end].strip() in given for start, end in node["spans"]
        ):
            found.append(f"{name}: its job was given another text")
        if "fell_back" not in node and said is not None and not _is_of(node, said):
            found.append(f"{name}: its job said something else")
    top = max(line["tree"], key=lambda node: node["level"])
    if line["summary"].split()[:5] != top["text"].split()[:5]:
        found.append("the summary is not that of the top of its tree")
    return found


def _is_of(node: Line, said: str) -> bool:
    """Whether a node's words are those that its job said, in their order.

    Less sentences that it said before, and what was cut off its end.
    """
    spoken = iter(said.casefold().split())
    words = node["text"].rstrip("…. ").casefold().split()
    *whole, last = words or [""]
    return all(word in spoken for word in whole) and any(
        one.startswith(last) for one in spoken
    )
