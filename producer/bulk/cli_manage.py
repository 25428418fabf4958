"""`tokenmill bulk status`, `list`, `cancel` and `retry-failed`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ...shared.cli_support import handle_errors
from ...shared.errors import UnknownRun
from ..cli_options import Url, client_of
from ..cli_output import (
    clock,
    duration,
    print_facts,
    print_json,
    print_note,
    print_table,
)
from .cli_options import AsJson, Patience, Quiet
from .cli_report import told
from .cli_work import reach_of

if TYPE_CHECKING:
    from ...shared.bulk.messages import RunView

DRIVER_GONE_MS: Final = 15_000
"""A driver that was not heard of for so long has left or died."""
_HEADER: Final = (
    *("RUN", "STATE", "KIND", "DONE", "FAILED", "WRONG"),
    *("DRIVER", "AGE", "NAME"),
)
_SPARE: Final = ("NAME", "KIND", "AGE", "DRIVER", "WRONG", "FAILED")
"""What a narrow terminal goes without; the id stays whole."""

Named = Annotated[
    str, typer.Argument(metavar="RUN|OUTPUT", help="A run's id, or its output file.")
]


@handle_errors
async def status(named: Named, url: Url = None, as_json: AsJson = False) -> None:
    """Show how far a run has come."""
    from ...shared.bulk.store import RunStore
    from .finding import run_named

    run = run_named(named)
    async with client_of(url) as mill:
        store = RunStore(mill.session.redis, run)
        view = await mill.session.patiently(store.view)
    if as_json:
        print_json(view)
        return
    print_facts(_facts(view))


def _facts(view: "RunView") -> list[tuple[str, str]]:
    spec = view.spec
    total = "?" if view.total is None else str(view.total)
    tokens = f"{view.prompt_tokens} prompt, {view.completion_tokens} output"
    facts = [
        ("run", f"{view.run}  {spec.name}".rstrip()),
        ("state", view.state),
        ("kind", spec.kind if spec.kind == "run" else f"{spec.kind}, {spec.mode}"),
        ("input", spec.input_label or "-"),
        ("output", spec.output_label or "-"),
        ("tenant", spec.tenant),
        ("webhook", spec.webhook or "-"),
        ("settled", f"{view.settled} of {total}, {view.fed} fed"),
        ("succeeded", str(view.succeeded)),
        ("failed", str(view.failed)),
    ]
    if view.refused:
        facts.append(("wrong", f"{view.refused} lines of the input, which never ran"))
    if view.cancelled:
        facts.append(("cancelled", str(view.cancelled)))
    if view.windows:
        facts.append(("windows", str(view.windows)))
    facts.append(("jobs", f"{view.jobs} ended, {view.open_jobs} in the queue"))
    facts.append(("tokens", tokens))
    if view.fell_back:
        facts.append(("fell back", f"{view.fell_back} parts, to key sentences"))
    facts += [
        ("created", clock(view.created_ms)),
        ("updated", f"{clock(view.updated_ms)}, {_ago(view, view.updated_ms)} ago"),
        ("driver", _driver(view)),
    ]
    return facts


def _driver(view: "RunView") -> str:
    if view.state in ("complete", "cancelled"):
        return "-"
    heard = _ago(view, view.driver_ms)
    if view.has_left:
        return f"left {heard} ago; give its command again to go on"
    if view.now_ms - view.driver_ms < DRIVER_GONE_MS:
        return f"alive, heard {heard} ago"
    return f"gone for {heard}; give its command again to go on"


def _ago(view: "RunView", ms: int) -> str:
    return duration(view.now_ms - ms)


@handle_errors
async def list_runs(
    limit: Annotated[int, typer.Option(min=1, help="Most runs.")] = 50,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List the newest runs of the pool, newest first."""
    from ...shared.bulk import store

    async with client_of(url) as mill:
        redis = mill.session.redis
        found = await mill.session.patiently(
            lambda: store.list_runs(redis, limit=limit)
        )
    if as_json:
        for view in found:
            print_json(view)
        return
    print_table(_HEADER, [_row(view) for view in found], _SPARE)
    if not found:
        print_note("no bulk runs")


def _row(view: "RunView") -> list[str]:
    total = "?" if view.total is None else str(view.total)
    ended = view.state in ("complete", "cancelled")
    alive = view.now_ms - view.driver_ms < DRIVER_GONE_MS
    return [
        view.run,
        view.state,
        view.spec.kind,
        f"{view.settled}/{total}",
        str(view.failed),
        str(view.refused),
        "-" if ended else "left" if view.has_left else "alive" if alive else "gone",
        _ago(view, view.created_ms),
        view.spec.name or "-",
    ]


@handle_errors
async def cancel(named: Named, url: Url = None, as_json: AsJson = False) -> None:
    """Cancel a run: its jobs end, its command leaves; what is written stays."""
    from ...shared.bulk.store import RunStore
    from .finding import run_named

    run = run_named(named)
    async with client_of(url) as mill:
        store = RunStore(mill.session.redis, run)
        state = await mill.session.patiently(store.cancel)
    if as_json:
        print_json({"run": run, "state": state})
    else:
        print(state)


@handle_errors
async def retry(
    named: Annotated[
        str, typer.Argument(metavar="OUTPUT|RUN", help="An output file, or its run.")
    ],
    patience: Patience = 300.0,
    quiet: Quiet = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Run what failed again; new lines take the place of those that say so."""
    from .progress import display_for
    from .working import retry_failed

    output = await _output_of(named, url)
    reach = reach_of(url, patience)
    with told(output) as tell:
        with display_for(as_json=as_json, quiet=quiet, unit="items") as display:
            ended = await retry_failed(output, reach, display.show)
        tell(ended, as_json=as_json)


async def _output_of(named: str, url: str | None) -> str:
    """The path of an output; that of a run stands in its record."""
    from ...shared.bulk.keys import RUN_ID
    from ...shared.bulk.store import RunStore
    from .place import Place

    if Place(Path(named)).index.exists() or not RUN_ID.fullmatch(named):
        return named
    async with client_of(url) as mill:
        store = RunStore(mill.session.redis, named)
        label = (await mill.session.patiently(store.view)).spec.output_label
    if not label or not Place(Path(label)).index.exists():
        raise UnknownRun(
            f"run {named} writes {label or 'no file'}, which is not on this host; give "
            "the path of its output"
        )
    return label
