"""`tokenmill bulk run` and `bulk summarize`."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from ...shared.cli_support import handle_errors
from ...shared.messages import DEFAULT_MODEL, DEFAULT_TENANT
from ..cli_input import check_seconds
from ..cli_options import Url
from .cli_report import told

if TYPE_CHECKING:
    from ...shared.bulk.messages import RunSpec
    from .working import Reach

_RUN = "Run"
_OUTPUT = "Output"
_STANDARD: Final = "-"

Output = Annotated[
    str,
    typer.Option("--output", "-o", help="Where lines go; .gz packs them, - is stdout."),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="`m:a` has the adapter a. Default: the only one of the pool.",
        rich_help_panel=_RUN,
    ),
]
Tenant = Annotated[str, typer.Option(rich_help_panel=_RUN)]
Priority = Annotated[
    int,
    typer.Option(help="Smaller is more urgent, within bulk.", rich_help_panel=_RUN),
]
Name = Annotated[str, typer.Option(help="For people.", rich_help_panel=_RUN)]
Webhook = Annotated[
    str | None,
    typer.Option(help="Told when the run is complete.", rich_help_panel=_RUN),
]
Ordered = Annotated[
    bool,
    typer.Option(
        "--ordered",
        help="Lines in input order, once all are there.",
        rich_help_panel=_OUTPUT,
    ),
]
Restart = Annotated[
    bool,
    typer.Option(
        "--restart",
        help="Forget what was begun for this output, and replace it.",
        rich_help_panel=_OUTPUT,
    ),
]
Patience = Annotated[
    float,
    typer.Option(
        help="Seconds for which an outage of Redis is waited out.",
        callback=check_seconds,
        rich_help_panel=_RUN,
    ),
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Progress and report as JSON lines on stdout.",
        rich_help_panel=_OUTPUT,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="No progress.", rich_help_panel=_OUTPUT),
]


class Placing(NamedTuple):
    """Where and how lines are put."""

    output: str
    ordered: bool
    restart: bool


class Mode(StrEnum):
    """How summaries are made, as typer lists it."""

    ABSTRACTIVE = "abstractive"
    EXTRACTIVE = "extractive"


@handle_errors
async def run(
    file: Annotated[
        str, typer.Argument(help="JSONL, plain or gzip; - is standard input.")
    ],
    output: Output,
    model: Annotated[
        str | None,
        typer.Option(
            help="Of lines that name none; `m:a` has the adapter a. Default: the only "
            "one of the pool.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    tenant: Tenant = DEFAULT_TENANT,
    priority: Priority = 0,
    name: Name = "",
    webhook: Webhook = None,
    ordered: Ordered = False,
    restart: Restart = False,
    patience: Patience = 300.0,
    quiet: Quiet = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Work off a file of requests: OpenAI's batch form, or id and prompt.

    Run again, it goes on where it stopped.
    """
    from ...shared.bulk.messages import RunSpec

    spec = RunSpec(
        kind="run",
        tenant=tenant,
        priority=priority,
        name=name,
        model=model or DEFAULT_MODEL,
        webhook=webhook,
        input_label=_label(file),
        output_label=_label(output),
    )
    place = Placing(output, ordered, restart)
    reach = reach_of(url, patience)
    await _do(file, spec, place, reach, quiet, as_json, any_model=model is None)


@handle_errors
async def summarize(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE|DIR",
            help="JSONL (id, title, text), text, Markdown or HTML; - is JSONL.",
        ),
    ],
    output: Output,
    style: Annotated[
        str | None,
        typer.Option(
            help="How to write, in your words, as 'for children'.",
            rich_help_panel="Summaries",
        ),
    ] = None,
    max_words: Annotated[
        int | None,
        typer.Option(min=1, help="Most words.", rich_help_panel="Summaries"),
    ] = None,
    mode: Annotated[
        Mode,
        typer.Option(
            help="extractive picks key sentences, without a model.",
            rich_help_panel="Summaries",
        ),
    ] = Mode.ABSTRACTIVE,
    window_tokens: Annotated[
        int | None,
        typer.Option(
            min=64, help="Most tokens in one job.", rich_help_panel="Summaries"
        ),
    ] = None,
    overlap_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Most tokens that a window repeats.",
            rich_help_panel="Summaries",
        ),
    ] = None,
    keep_tree: Annotated[
        bool,
        typer.Option(
            "--keep-tree",
            help="Partial summaries, too.",
            rich_help_panel="Summaries",
        ),
    ] = False,
    model: Model = None,
    tenant: Tenant = DEFAULT_TENANT,
    priority: Priority = 0,
    name: Name = "",
    webhook: Webhook = None,
    ordered: Ordered = False,
    restart: Restart = False,
    patience: Patience = 300.0,
    quiet: Quiet = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Summarize documents of any length, one line for each.

    Run again, it goes on where it stopped.
    """
    from ...shared.bulk.messages import MAX_WORDS, RunSpec
    from ...shared.config_load import load_config

    bulk = load_config().config.bulk
    spec = RunSpec(
        kind="summarize",
        tenant=tenant,
        priority=priority,
        name=name,
        model=model or DEFAULT_MODEL,
        style=style,
        max_words=max_words or MAX_WORDS,
        mode=mode.value,
        window_tokens=window_tokens or bulk.window_tokens,
        overlap_tokens=(
            bulk.overlap_tokens if overlap_tokens is None else overlap_tokens
        ),
        keep_tree=keep_tree,
        webhook=webhook,
        input_label=_label(source),
        output_label=_label(output),
    )
    _check_windows(spec)
    place = Placing(output, ordered, restart)
    reach = reach_of(url, patience)
    await _do(source, spec, place, reach, quiet, as_json, any_model=model is None)


def _check_windows(spec: "RunSpec") -> None:
    most = spec.window_tokens // 2
    if not 0 <= spec.overlap_tokens <= most:
        raise typer.BadParameter(
            f"{spec.overlap_tokens} tokens of overlap; expected 0 to {most}, half of a "
            "window",
            param_hint="--overlap-tokens",
        )


def reach_of(url: str | None, patience_s: float) -> "Reach":
    """Returns how a command reaches its pool.

    Args:
        url: As given, or None.
        patience_s: How long an outage of Redis is waited out.
    """
    from ...shared.config_load import load_config
    from .working import Reach

    keep_ms = round(load_config().config.bulk.keep_s * 1000)
    return Reach(url=url, patience_s=patience_s, keep_ms=keep_ms)


async def _do(
    source: str,
    spec: "RunSpec",
    placing: Placing,
    reach: "Reach",
    quiet: bool,
    as_json: bool,
    *,
    any_model: bool,
) -> None:
    from .progress import display_for
    from .working import Work, work_off

    if placing.output == _STANDARD and as_json:
        raise typer.BadParameter("standard output has the lines; name a file for them")
    work = Work(
        source=source,
        output=placing.output,
        spec=spec,
        ordered=placing.ordered,
        restart=placing.restart,
        reach=reach,
        any_model=any_model,
    )
    unit = "lines" if spec.kind == "run" else "documents"
    with told(placing.output) as tell:
        with display_for(as_json=as_json, quiet=quiet, unit=unit) as display:
            ended = await work_off(work, display.show)
        tell(ended, as_json=as_json)


def _label(path: str) -> str:
    """A path for people to find; it is no part of what a run is."""
    return path if path == _STANDARD else str(Path(path).absolute())
