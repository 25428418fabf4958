"""Which models may be label values: those that someone of ours has named.

A stranger can put any model's name into the set of shards; none of these may become a
series of its own.
"""

from collections.abc import Iterable
from typing import Final

from .instruments import OTHER

MOST_MODELS: Final = 64
_known: set[str] = set()


def know(models: Iterable[str]) -> None:
    """Lets these be label values: models of the settings, or that a worker serves."""
    for model in models:
        if len(_known) < MOST_MODELS:
            _known.add(model)


def model_label(model: str) -> str:
    """Returns the model's name, or `other` for one that nobody has named."""
    return model if model in _known else OTHER
