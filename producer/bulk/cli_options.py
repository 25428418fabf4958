"""Options of the bulk commands: a struct for each heading of their help."""

from enum import StrEnum
from typing import Annotated, Final

import msgspec
import typer

from ...shared.messages import DEFAULT_TENANT
from ..cli_input import check_seconds

RUN: Final = "Run"
OUTPUT: Final = "Output"
SUMMARIES: Final = "Summaries"

Output = Annotated[
    str,
    typer.Option("--output", "-o", help="Where lines go; .gz packs them, - is stdout."),
]
Patience = Annotated[
    float,
    typer.Option(
        help="Seconds for which an outage of Redis is waited out.",
        callback=check_seconds,
        rich_help_panel=RUN,
    ),
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Progress and report as JSON lines on stdout.",
        rich_help_panel=OUTPUT,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="No progress.", rich_help_panel=OUTPUT),
]


class Mode(StrEnum):
    """How summaries are made, as typer lists it."""

    ABSTRACTIVE = "abstractive"
    EXTRACTIVE = "extractive"


class SummaryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How documents are cut and summarized."""

    style: Annotated[
        str | None,
        typer.Option(
            help="How to write, in your words, as 'for children'.",
            rich_help_panel=SUMMARIES,
        ),
    ] = None
    max_words: Annotated[
        int | None,
        typer.Option(min=1, help="Most words.", rich_help_panel=SUMMARIES),
    ] = None
    mode: Annotated[
        Mode,
        typer.Option(
            help="extractive picks key sentences, without a model.",
            rich_help_panel=SUMMARIES,
        ),
    ] = Mode.ABSTRACTIVE
    window_tokens: Annotated[
        int | None,
        typer.Option(min=64, help="Most tokens in one job.", rich_help_panel=SUMMARIES),
    ] = None
    overlap_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Most tokens that a window repeats.",
            rich_help_panel=SUMMARIES,
        ),
    ] = None
    keep_tree: Annotated[
        bool,
        typer.Option(
            "--keep-tree", help="Partial summaries, too.", rich_help_panel=SUMMARIES
        ),
    ] = False


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Whose run it is, how urgent, and what becomes of it in an outage."""

    tenant: Annotated[str, typer.Option(rich_help_panel=RUN)] = DEFAULT_TENANT
    priority: Annotated[
        int,
        typer.Option(help="Smaller is more urgent, within bulk.", rich_help_panel=RUN),
    ] = 0
    name: Annotated[str, typer.Option(help="For people.", rich_help_panel=RUN)] = ""
    webhook: Annotated[
        str | None,
        typer.Option(help="Told when the run is complete.", rich_help_panel=RUN),
    ] = None
    patience: Patience = 300.0


class OutputOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How lines and progress are written."""

    ordered: Annotated[
        bool,
        typer.Option(
            "--ordered",
            help="Lines in input order, once all are there.",
            rich_help_panel=OUTPUT,
        ),
    ] = False
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help="Forget what was begun for this output, and replace it.",
            rich_help_panel=OUTPUT,
        ),
    ] = False
    quiet: Quiet = False
