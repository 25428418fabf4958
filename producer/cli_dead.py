"""`tokenmill dead`: jobs that failed for good, for an operator to look at."""

import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ..shared.cli_support import handle_errors
from .cli_options import AsJson, Url, client_of
from .cli_output import (
    clock,
    duration,
    print_facts,
    print_json,
    print_note,
    print_table,
)

if TYPE_CHECKING:
    from .dead_letter import DeadLetter, Requeued

_HEADER: Final = ("ID", "REASON", "CLASS", "TENANT", "AGE", "REQUEUED AS", "ERROR")
_SPARE: Final = ("ERROR", "CLASS", "TENANT", "REQUEUED AS", "AGE", "REASON")
"""What a narrow terminal goes without; the id stays whole."""
_ERROR_WIDTH: Final = 60
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Letters = Annotated[
    list[str] | None, typer.Argument(metavar="ID…", help="Ids as `list` shows them.")
]
All = Annotated[bool, typer.Option("--all", help="Every dead letter of the pool.")]


def register_dead(app: typer.Typer) -> None:
    """Adds the commands."""
    dead = typer.Typer(
        help="Jobs that failed for good: look, run again, remove.", no_args_is_help=True
    )
    dead.command("list")(list_letters)
    dead.command("show")(show)
    dead.command("requeue")(requeue)
    dead.command("purge")(purge)
    app.add_typer(dead, name="dead")


@handle_errors
async def list_letters(url: Url = None, as_json: AsJson = False) -> None:
    """List the dead letters of all models, newest first."""
    async with client_of(url) as mill:
        found = await mill.dead_letters()
    if as_json:
        for letter in found:
            print_json(letter)
        return
    now_ms = time.time() * 1000
    print_table(_HEADER, [_row(letter, now_ms) for letter in found], _SPARE)
    if not found:
        print_note("no dead letters")


def _row(letter: "DeadLetter", now_ms: float) -> list[str]:
    message = letter.error.message if letter.error else ""
    cut = message if len(message) <= _ERROR_WIDTH else message[: _ERROR_WIDTH - 1] + "…"
    return [
        letter.id,
        letter.reason if letter.job else letter.reason[:20],
        letter.job.job_class if letter.job else "-",
        letter.job.tenant if letter.job else "-",
        duration(now_ms - letter.at_ms),
        letter.requeued_as or "-",
        cut or "-",
    ]


@handle_errors
async def show(
    letter: Annotated[str, typer.Argument(metavar="ID", help="As `list` shows it.")],
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show one dead letter: how the job failed, how often, and what became of it."""
    async with client_of(url) as mill:
        (found,) = await mill.dead_letters([letter])
    if as_json:
        print_json(found)
        return
    print_facts(_facts(found))


def _facts(letter: "DeadLetter") -> list[tuple[str, str]]:
    facts = [("id", letter.id), ("shard", letter.shard)]
    facts += [("buried", clock(letter.at_ms)), ("reason", letter.reason)]
    if letter.error is not None:
        facts.append(("error", f"[{letter.error.code}] {letter.error.message}"))
    job = letter.job
    if job is not None:
        facts += [
            ("class", job.job_class),
            ("tenant", job.tenant),
            ("priority", str(job.priority)),
            ("prompt", f"{job.prompt_tokens} tokens"),
            ("seed", str(job.seed)),
            ("attempts", f"{job.attempts} faults, {job.lease_losses} lost leases"),
            ("enqueued", clock(job.enqueued_ms)),
            ("started", clock(job.started_ms)),
        ]
    else:
        facts.append(("record", "none: it cannot be requeued, only purged"))
    return [*facts, ("requeued as", letter.requeued_as or "-")]


@handle_errors
async def requeue(
    letters: Letters = None,
    every: All = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for room where the queue is full.")
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Run dead jobs again as new jobs; one that was requeued before names its job."""
    ids = _chosen(letters, every)
    async with client_of(url) as mill:
        made = await mill.requeue(ids, when_full="wait" if wait else "raise")
    for one in made:
        if as_json:
            print_json(one)
        elif one.job is not None:
            print(f"{one.id} -> {one.job}")
        else:
            print_note(f"{one.id}: not requeued: {one.problem}")
    _fail_if_any(made)


def _fail_if_any(made: list["Requeued"]) -> None:
    from ..shared.errors import TokenmillError

    problems = [one for one in made if one.job is None]
    if problems:
        raise TokenmillError(
            f"{len(problems)} of {len(made)} letters were not requeued; the first: "
            f"{problems[0].problem}"
        )


@handle_errors
async def purge(
    letters: Letters = None,
    every: All = False,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="Only older ones: 90s, 15m, 12h or 7d."),
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Remove dead letters; their records go when those of other jobs would have."""
    age_ms = None if older_than is None else _age_ms(older_than)
    ids = _chosen(letters, every or age_ms is not None)
    async with client_of(url) as mill:
        removed = await mill.purge(ids, older_than_ms=age_ms)
    if as_json:
        print_json({"purged": removed})
    else:
        print(f"{removed} dead letters purged")


def _chosen(letters: list[str] | None, every: bool) -> list[str] | None:
    """Ids, or None for all; exactly one of both must be asked for."""
    if bool(letters) == every:
        raise typer.BadParameter("give ids, or --all, and not both")
    return letters or None


def _age_ms(text: str) -> int:
    number, unit = text[:-1], text[-1:]
    if unit not in _UNITS or not number.isascii() or not number.isdigit():
        raise typer.BadParameter(f"'{text}' is no age; expected 90s, 15m, 12h or 7d")
    return int(number) * _UNITS[unit] * 1000
