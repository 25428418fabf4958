"""Just enough of PromQL to know which metrics an expression reads."""

import re

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_LABELS = re.compile(
    r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^()]*\)"
)
_WORD = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_WORDS = frozenset(("and", "or", "unless", "by", "bool", "group_left", "group_right"))
_FUNCTIONS = frozenset(
    (
        *("sum", "max", "min", "avg", "count", "rate", "increase", "delta", "absent"),
        "max_over_time",
        *("histogram_quantile", "label_values", "clamp_min"),
    )
)


def metrics_of(expression: str) -> set[str]:
    """Names of the series that an expression reads.

    Raises:
        AssertionError: It calls a function that is not known here, or its brackets do
            not match.
    """
    text = _STRING.sub('""', expression)
    for pair in ("()", "{}", "[]"):
        assert text.count(pair[0]) == text.count(pair[1]), expression
    text = re.sub(r"\{[^{}]*\}|\[[^\[\]]*\]", "", _LABELS.sub(" ", text))
    found = set()
    for word in _WORD.finditer(text):
        name, after = word.group(), text[word.end() :].lstrip()
        if re.search(r"[0-9]$", text[: word.start()]) or name in _WORDS:
            continue
        if after.startswith("("):
            assert name in _FUNCTIONS, f"unknown function {name} in {expression}"
            continue
        found.add(name)
    return found
