"""Finds what a worker would refuse in a checkpoint, without reading its weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..detokenizer import TokenTable
from .assembly import skeleton
from .matching import TensorMatcher
from .vocabulary import read_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedConfig

    from .families import Family
    from .headers import StoredTensor


def check_checkpoint(
    path: Path,
    family: Family,
    config: PreTrainedConfig,
    stored: Mapping[str, StoredTensor],
) -> None:
    """Checks tokenizer, names and shapes as a worker does; values are not looked at.

    Args:
        path: The checkpoint.
        family: Its family.
        config: Its configuration.
        stored: From `read_headers`.

    Raises:
        ModelLoadError: A worker would refuse it, with the same message.
    """
    from ....shared.tokens import collect_tokenizer

    collect_tokenizer(path)
    model = skeleton(path, family, config)
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
    TensorMatcher(model, shapes).match(path, stored)
    TokenTable.from_tokenizer(read_tokenizer(path, int(config.vocab_size)))
