"""`tokenmill bulk run` and `bulk summarize`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from ...shared.cli_structs import with_structs
from ...shared.cli_support import handle_errors
from ...shared.messages import DEFAULT_MODEL
from ..cli_options import Url
from .cli_options import (
    RUN,
    AsJson,
    Output,
    OutputOptions,
    RunOptions,
    SummaryOptions,
)
from .cli_report import told

if TYPE_CHECKING:
    from ...shared.bulk.messages import Kind, RunSpec
    from .working import Reach

_STANDARD: Final = "-"


@with_structs
@handle_errors
async def run(
    *,
    file: Annotated[
        str, typer.Argument(help="JSONL, plain or gzip; - is standard input.")
    ],
    output: Output,
    model: Annotated[
        str | None,
        typer.Option(
            help="Of lines that name none; `m:a` has the adapter a. Default: the only "
            "one of the pool.",
            rich_help_panel=RUN,
        ),
    ] = None,
    asked: RunOptions,
    lines: OutputOptions,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Work off a file of requests: OpenAI's batch form, or id and prompt.

    Run again, it goes on where it stopped.
    """
    spec = _spec("run", file, output, model, asked)
    reach = reach_of(url, asked.patience)
    any_model = model is None
    await _do(file, output, spec, reach, lines, any_model=any_model, as_json=as_json)


@with_structs
@handle_errors
async def summarize(
    *,
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE|DIR",
            help="JSONL (id, title, text), text, Markdown or HTML; - is JSONL.",
        ),
    ],
    output: Output,
    how: SummaryOptions,
    model: Annotated[
        str | None,
        typer.Option(
            help="`m:a` has the adapter a. Default: the only one of the pool.",
            rich_help_panel=RUN,
        ),
    ] = None,
    asked: RunOptions,
    lines: OutputOptions,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Summarize documents of any length, one line for each.

    Run again, it goes on where it stopped.
    """
    spec = _summarizing(_spec("summarize", source, output, model, asked), how)
    reach = reach_of(url, asked.patience)
    any_model = model is None
    await _do(source, output, spec, reach, lines, any_model=any_model, as_json=as_json)


def _spec(
    kind: "Kind", source: str, output: str, model: str | None, asked: RunOptions
) -> "RunSpec":
    from ...shared.bulk.messages import RunSpec

    return RunSpec(
        kind=kind,
        tenant=asked.tenant,
        priority=asked.priority,
        name=asked.name,
        model=model or DEFAULT_MODEL,
        webhook=asked.webhook,
        input_label=_label(source),
        output_label=_label(output),
    )


def _summarizing(spec: "RunSpec", how: SummaryOptions) -> "RunSpec":
    from ...shared.bulk.messages import MAX_WORDS
    from ...shared.config_load import load_config

    bulk = load_config().config.bulk
    window_tokens = how.window_tokens or bulk.window_tokens
    overlap_tokens = how.overlap_tokens
    if overlap_tokens is None:
        overlap_tokens = bulk.overlap_tokens
    most = window_tokens // 2
    if not 0 <= overlap_tokens <= most:
        raise typer.BadParameter(
            f"{overlap_tokens} tokens of overlap; expected 0 to {most}, half of a "
            "window",
            param_hint="--overlap-tokens",
        )
    return msgspec.structs.replace(
        spec,
        style=how.style,
        max_words=how.max_words or MAX_WORDS,
        mode=how.mode.value,
        window_tokens=window_tokens,
        overlap_tokens=overlap_tokens,
        keep_tree=how.keep_tree,
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
    output: str,
    spec: "RunSpec",
    reach: "Reach",
    lines: OutputOptions,
    *,
    any_model: bool,
    as_json: bool,
) -> None:
    from .progress import display_for
    from .working import Work, work_off

    if output == _STANDARD and as_json:
        raise typer.BadParameter("standard output has the lines; name a file for them")
    work = Work(
        source=source,
        output=output,
        spec=spec,
        ordered=lines.ordered,
        restart=lines.restart,
        reach=reach,
        any_model=any_model,
    )
    unit = "lines" if spec.kind == "run" else "documents"
    with told(output) as tell:
        with display_for(as_json=as_json, quiet=lines.quiet, unit=unit) as display:
            ended = await work_off(work, display.show)
        tell(ended, as_json=as_json)


def _label(path: str) -> str:
    """A path for people to find; it is no part of what a run is."""
    return path if path == _STANDARD else str(Path(path).absolute())
