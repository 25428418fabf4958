"""`tokenmill profile show`: what a profile says, alone or against another."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ..shared.cli_options import PrintJson
from ..shared.cli_support import handle_errors

if TYPE_CHECKING:
    from .profile_compare import Change
    from .profile_reading import Profile, Timing

_TITLES = {
    "step": "Steps",
    "phase": "Phases of a step",
    "model": "The model in a step (each eighth step, its kernels timed one by one)",
    "kernel": "Kernels in such a step",
}


def register(app: typer.Typer) -> None:
    """Adds the group of commands to `app`."""
    group = typer.Typer(
        help="Profiles that `work --profile` wrote.", no_args_is_help=True
    )
    group.command("show")(handle_errors(show))
    # A group with one command needs a callback to stay a group.
    group.callback()(_group)
    app.add_typer(group, name="profile")


def _group() -> None:
    """Profiles that `work --profile` wrote."""


def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A profile.")],
    against: Annotated[
        Path | None,
        typer.Option(help="An earlier profile; ends with 1 if anything is slower."),
    ] = None,
    threshold: Annotated[
        float, typer.Option(min=0.001, help="Change that counts: 0.1 is a tenth.")
    ] = 0.1,
    as_json: PrintJson = False,
) -> None:
    """Say how long steps, their phases and kernels take; what became slower."""
    from .profile_compare import changes, differences
    from .profile_reading import read_profile

    now = read_profile(file)
    if against is None:
        _print_json(now) if as_json else _print_profile(now)
        return
    before = read_profile(against)
    found, notes = changes(now, before, threshold), differences(now, before)
    if as_json:
        _print_json({"changes": found, "notes": notes})
    else:
        _print_changes(found, notes)
    if any(change.verdict == "slower" for change in found):
        raise typer.Exit(1)


def _print_json(record: object) -> None:
    print(msgspec.json.encode(record).decode())


def _print_profile(profile: "Profile") -> None:
    facts = ", ".join(
        f"{k} {v}" for k, v in profile.facts.items() if v not in (None, "none")
    )
    print(facts)
    tokens = ", ".join(
        f"{n:.1f} a {kind} step" for kind, n in profile.mean_tokens.items()
    )
    print(f"{profile.steps} ordinary steps; tokens: {tokens}")
    _print_table(
        ("", "KIND", "STEPS", "CALLS", "TOTAL MS", "SHARE", "P50 MS", "P95 MS"),
        [(timing.part, _cells(timing, profile)) for timing in profile.timings],
    )


def _cells(timing: "Timing", profile: "Profile") -> tuple[str, ...]:
    whole = sum(
        other.total_ms
        for other in profile.timings
        if (other.part, other.kind) == (timing.part, timing.kind)
    )
    return (
        timing.name,
        timing.kind,
        str(timing.steps),
        str(timing.calls),
        f"{timing.total_ms:.1f}",
        f"{100 * timing.total_ms / whole:.0f} %" if whole else "-",
        f"{timing.p50_ms:.3f}",
        f"{timing.p95_ms:.3f}",
    )


def _print_changes(found: "list[Change]", notes: list[str]) -> None:
    for note in notes:
        print(f"not the same: {note}")
    _print_table(
        ("", "KIND", "STEPS", "P50 MS NOW", "BEFORE", "RATIO", ""),
        [
            (
                change.now.part,
                (
                    change.now.name,
                    change.now.kind,
                    f"{change.now.steps}/{change.before.steps}",
                    f"{change.now.p50_ms:.3f}",
                    f"{change.before.p50_ms:.3f}",
                    f"{change.ratio:.2f}",
                    "" if change.verdict == "same" else change.verdict.upper(),
                ),
            )
            for change in found
        ],
    )
    slower = [f"{c.now.name} ({c.now.kind})" for c in found if c.verdict == "slower"]
    print(f"\nslower: {', '.join(slower) or 'nothing'}")


def _print_table(
    header: tuple[str, ...], rows: "list[tuple[str, tuple[str, ...]]]"
) -> None:
    """Prints rows under a title for each part, the first column to the left."""
    lines = [header, *(cells for _, cells in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    part = ""
    for title, cells in rows:
        if title != part:
            part = title
            print(f"\n{_TITLES[part]}")
            print(_line(header, widths))
        print(_line(cells, widths))


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    first, *rest = zip(cells, widths, strict=True)
    parts = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
    return "  ".join(parts).rstrip()
