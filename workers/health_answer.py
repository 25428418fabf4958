"""What is wrong with what a check of a health set has brought."""

import math
from typing import Final

from ..shared.health_set import HealthCheck

MATCH_S: Final = 2.0
"""Processor time that one regular expression may search for."""
_SHOWN: Final = 120
"""Characters of an output that a report shows."""


def problem_of(
    check: HealthCheck, output: str, *, match_s: float = MATCH_S
) -> str | None:
    """Returns what is wrong with the output of a check, None where nothing is.

    Args:
        check: A prompt's.
        output: What the model answers.
        match_s: Processor time that a regular expression may take.
    """
    if check.regex is not None:
        return _mismatch(check.regex, output, match_s)
    if check.exact is not None:
        ok, wanted = output == check.exact, f"exactly {_short(check.exact)}"
    elif check.prefix is not None:
        wanted = f"an output that begins with {_short(check.prefix)}"
        ok = output.startswith(check.prefix)
    else:
        wanted = f"an output with {_short(check.contains or '')} in it"
        ok = (check.contains or "") in output
    return None if ok else f"expected {wanted}, got {_short(output)}"


def _mismatch(pattern: str, output: str, match_s: float) -> str | None:
    """Searches as `re` does, but with an end, and without Python's lock: a search that
    tries exponentially many ways would stop this worker, its signals included.
    """
    import regex

    try:
        found = regex.search(pattern, output, timeout=match_s, concurrent=True)
    except TimeoutError:
        return (
            f"its regex {_short(pattern)} took longer than {match_s:g} s on "
            f"{_short(output)}; expected one without a repeat inside a repeat, and "
            "without alternatives that match the same"
        )
    except regex.error as error:
        return f"its regex {_short(pattern)} cannot be used: {error}"
    if found is not None:
        return None
    return f"expected an output that matches {_short(pattern)}, got {_short(output)}"


def problem_of_text(check: HealthCheck, perplexity: float) -> str | None:
    """Returns what is wrong with the perplexity of a text, None where nothing is."""
    bound = check.max_perplexity or math.inf
    if perplexity <= bound:  # not so for what is no number
        return None
    return f"expected a perplexity of at most {bound:g}, got {perplexity:.4g}"


def _short(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 3]}..."
