"""Adapters of the echo engine: real checkpoints, of which nothing is computed.

So that everything between a submit and the engine can be tried without a model. Files
and settings are read and their digest is compared; shapes are not, there is no base.
"""

from pathlib import Path

from ..shared.errors import ModelLoadError
from .engine.adapters.cache import AdapterCache
from .engine.adapters.checkpoint import AdapterFacts, open_adapter
from .engine.adapters.source import LoadedAdapter


class EchoLoader:
    """Reads adapters as far as one can without a model.

    Args:
        max_rank: Adapters of a higher rank are refused.
    """

    def __init__(self, max_rank: int) -> None:
        self._max_rank = max_rank

    def load(self, path: Path) -> LoadedAdapter:
        """Reads an adapter's settings, the names of its tensors and its digest.

        It takes as many bytes as its weights have on disk.

        Raises:
            ModelLoadError: One of them is missing or wrong.
        """
        files = open_adapter(path)
        config = files.config
        if config.rank > self._max_rank:
            raise ModelLoadError(
                f"{path} has rank {config.rank}; expected at most {self._max_rank} "
                "(worker.max_adapter_rank)"
            )
        weights = files.weights()
        facts = AdapterFacts(
            rank=config.rank,
            alpha=config.alpha,
            targets=tuple(sorted({_layer_of(name) for name in files.stored})),
            bytes=len(weights),
            digest=files.digest(weights),
            base=config.base,
        )
        return LoadedAdapter(facts, {}, facts.bytes)


def _layer_of(tensor: str) -> str:
    """Returns the last part of an adapted layer's name, `…q_proj.lora_A.weight`."""
    return tensor.rpartition(".lora_")[0].rpartition(".")[2] or tensor


def echo_adapters(max_bytes: int, max_rank: int) -> AdapterCache:
    """Returns adapters for an echo engine.

    Args:
        max_bytes: That all of them may take.
        max_rank: Of one.
    """
    return AdapterCache(EchoLoader(max_rank), max_bytes)
