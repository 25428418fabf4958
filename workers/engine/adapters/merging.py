"""The whole of a merge: read, write beside, compare, and only then give it its name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ....shared.errors import ModelLoadError
from ..model.lean_import import import_transformers
from .merge import Progress, fresh_directory, write_merged
from .targets import base_linears
from .weights import read_adapter

if TYPE_CHECKING:
    from .checkpoint import AdapterFacts
    from .merge_check import MergeCheck


def merge_adapter(
    base: Path,
    adapter: Path,
    output: Path,
    *,
    progress: Progress,
    tolerance: float | None = None,
    threads: int | None = None,
) -> tuple[AdapterFacts, float, MergeCheck]:
    """Merges an adapter into a base and checks what came of it.

    Args:
        base: The base's directory.
        adapter: The adapter's.
        output: Where the merged model goes; must not exist.
        progress: Told the stage and its fraction done.
        tolerance: How far logits may be off; None goes by the checkpoint's type.
        threads: Compute threads for the comparison; None is all cores.

    Returns:
        The adapter's facts, the part of it that rounding lost, and the comparison.

    Raises:
        ModelLoadError: Something cannot be read or written, the two do not fit, or the
            merged model's logits are not those of base plus adapter. Nothing is left.
    """
    weights = read_adapter(adapter, base_linears(base), max_rank=None)
    with fresh_directory(output) as partial:
        rounding = write_merged(base, weights, partial, progress)
        import_transformers()
        from .merge_check import check_merged

        check = check_merged(
            base,
            adapter,
            weights.facts.digest,
            partial,
            tolerance=tolerance,
            threads=threads,
        )
        if not check.passed:
            raise ModelLoadError(
                f"the merged model's logits are off by {check.off:.3%} of their spread "
                f"from those of base plus adapter; at most {check.tolerance:.3%} is "
                f"allowed, so {output} was not made. The adapter moves them by "
                f"{check.effect:.3%}: serve it unmerged, merge into a checkpoint of a "
                "wider type, or allow more with --tolerance"
            )
    return weights.facts, rounding.share, check
