"""Adapters of the echo engine: real checkpoints, of which nothing is computed.

So that everything between a submit and the engine can be tried without a model. Files
and settings are read and their digest is compared; shapes are not, there is no base.
"""

from pathlib import Path

from ..shared.errors import ModelLoadError
from .engine.adapters.cache import AdapterCache, LoadedAdapter
from .engine.adapters.checkpoint import (
    WEIGHTS_FILE,
    AdapterFacts,
    adapter_digest,
    read_weights_header,
)
from .engine.adapters.config import read_adapter_config


class EchoLoader:
    """Reads adapters as far as one can without a model.

    Args:
        max_rank: Adapters of a higher rank are refused.
    """

    def __init__(self, max_rank: int) -> None:
        self._max_rank = max_rank

    def check(self, path: Path) -> AdapterFacts:
        """Reads an adapter's settings, the names of its tensors and its digest.

        Raises:
            ModelLoadError: One of them is missing or wrong.
        """
        config = read_adapter_config(path)
        if config.rank > self._max_rank:
            raise ModelLoadError(
                f"{path} has rank {config.rank}; expected at most {self._max_rank} "
                "(worker.max_adapter_rank)"
            )
        names = read_weights_header(path)
        return AdapterFacts(
            rank=config.rank,
            alpha=config.alpha,
            targets=tuple(sorted({name.split(".")[-3] for name in names})),
            bytes=(path / WEIGHTS_FILE).stat().st_size,
            digest=adapter_digest(path),
            base=config.base,
        )

    def load(self, path: Path) -> LoadedAdapter:
        """The same; it takes as many bytes as its weights have on disk."""
        facts = self.check(path)
        return LoadedAdapter(facts, {}, facts.bytes)


def echo_adapters(max_bytes: int, max_rank: int) -> AdapterCache:
    """Returns adapters for an echo engine.

    Args:
        max_bytes: That all of them may take.
        max_rank: Of one.
    """
    return AdapterCache(EchoLoader(max_rank), max_bytes)
