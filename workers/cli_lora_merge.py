"""The command that merges an adapter into its base for good: lora merge."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ..shared.cli_lora import lora_group
from ..shared.cli_options import PrintJson
from ..shared.cli_support import handle_errors

if TYPE_CHECKING:
    from .engine.adapters.checkpoint import AdapterFacts
    from .engine.adapters.merge_check import MergeCheck

_LOSS_WORTH_A_WORD = 0.1
"""Part of an adapter that rounding may lose before the command says so."""


class Merged(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a merge."""

    path: str
    base: str
    adapter: "AdapterFacts"
    lost: float
    """Part of the adapter, by its norm, lost by rounding to the checkpoint's type."""
    check: "MergeCheck"


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    lora_group(app).command("merge")(handle_errors(merge))


def merge(
    base: Annotated[
        str, typer.Option("--base", help="Directory, hub id or built-in name.")
    ],
    adapter: Annotated[
        Path, typer.Option("--adapter", help="Directory of a peft LoRA adapter.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="New directory for the model.")
    ],
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="How far logits may be off, as a share of their spread; else by the "
            "checkpoint's type.",
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Compute threads.")] = None,
    as_json: PrintJson = False,
) -> None:
    """Write a model with a LoRA adapter merged into it, checked by its logits."""
    from ..shared.config_load import load_config
    from ..shared.logging import configure
    from .extras import model_stack
    from .progress import bar

    with model_stack():
        from .engine.adapters.merging import merge_adapter
        from .engine.model.resolve import resolve_model

    configure(load_config(None).config.log, "merge")
    with bar("merge", silent=as_json) as report:
        path = resolve_model(base, progress=report)
        facts, lost, check = merge_adapter(
            path, adapter, output, tolerance=tolerance, threads=threads, progress=report
        )
    merged = Merged(
        path=str(output), base=str(path), adapter=facts, lost=lost, check=check
    )
    for note in facts.notes:
        print(f"warning: {note}", file=sys.stderr)
    if as_json:
        print(msgspec.json.encode(merged).decode())
    else:
        _print(merged)


def _print(merged: Merged) -> None:
    facts, check = merged.adapter, merged.check
    print(
        f"adapter of rank {facts.rank} on {', '.join(facts.targets)} merged into "
        f"{merged.path}"
    )
    print(
        f"logits at {check.positions} tokens, as shares of their spread: the adapter "
        f"moves them by {check.effect:.3%}, the merged model is off by {check.off:.5%} "
        f"(at most {check.tolerance:.2%}), computed in {check.weights}"
    )
    if merged.lost > _LOSS_WORTH_A_WORD:
        print(
            f"rounding to the checkpoint's type lost {merged.lost:.0%} of the adapter; "
            "serve it unmerged to keep all of it"
        )
