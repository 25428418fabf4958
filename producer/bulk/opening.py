"""Opening an output: begun now, gone on with, or refused with what differs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from ...shared.bulk.keys import new_run_id
from ...shared.bulk.messages import RunSpec
from ...shared.errors import BulkRunConflict
from .finding import run_beside
from .finishing import FINISHED, RUNNING, recover
from .identity import Identity
from .index import Index
from .place import Lock, Place

_LABELS: Final = ("input_label", "output_label", "v")
"""Of a spec: where files lie may change between two runs."""


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """A run as the index of its output has it."""

    run: str
    spec: RunSpec
    ordered: bool
    is_finished: bool
    """The output is there and whole."""
    is_new: bool


@contextmanager
def opened(place: Place, *, restart: bool = False) -> Iterator[Index]:
    """Holds the lock of an output, and its index, for the length of a `with` block.

    Args:
        place: The output.
        restart: Forget whatever was begun.

    Raises:
        BulkRunConflict: Another command has it, or the index is damaged.
        BulkOutputFailed: Nothing can be written there.
    """
    place.make()
    with Lock(place):
        replaced = _forgotten(place) if restart else None
        index = Index(place.index)
        try:
            if replaced is not None:
                index.set_facts(replaced=replaced)
            recover(place, index)
            yield index
        finally:
            is_of_use = recorded(index) is not None or _is_replacing(index)
            index.close()
            if not is_of_use:
                place.remove_sidecar()


def _is_replacing(index: Index) -> bool:
    """Whether a run that `--restart` forgot is still to be cancelled."""
    return bool(index.fact("replaced", str))


def _forgotten(place: Place) -> str | None:
    """Forgets what was begun; returns the run, which is still in the pool."""
    run = run_beside(place)
    place.forget()
    return run


def begin(
    place: Place,
    index: Index,
    *,
    spec: RunSpec,
    ordered: bool,
    source: Identity,
    restart: bool,
) -> Begun:
    """Records what a run is to do, or checks that it is what was recorded.

    Args:
        place: The output.
        index: Its index.
        spec: What the run is to do.
        ordered: Lines are to stand in input order.
        source: The input.
        restart: An output that stands there may be replaced.

    Raises:
        BulkRunConflict: The output was begun with other options or another input, or
            is not one of ours.
    """
    found = recorded(index)
    if found is None:
        there = [path for path in (place.output, place.partial) if path.exists()]
        if there and not restart:
            raise BulkRunConflict(
                f"{there[0]} exists, and nothing says how it was made; move it "
                "away, name another output, or replace it with --restart"
            )
        run = new_run_id()
        index.set_facts(
            run=run, spec=spec, ordered=ordered, source=source, phase=RUNNING
        )
        return Begun(
            run=run, spec=spec, ordered=ordered, is_finished=False, is_new=True
        )
    differences = list(_differences(index, found, spec, ordered, source))
    if differences:
        raise BulkRunConflict(
            f"{place.output} was begun otherwise: {'; '.join(differences)}. Give what "
            "it was begun with to go on, name another output, or begin again with "
            "--restart"
        )
    index.set_facts(source=source)
    return found


def check_there(place: Place, begun: Begun) -> None:
    """Refuses an output that was finished and is gone.

    Args:
        place: The output.
        begun: What its index says.

    Raises:
        BulkRunConflict: It is not where it was put.
    """
    if begun.is_finished and not place.output.exists():
        raise BulkRunConflict(
            f"{place.output} was complete and is gone; put it back, or make it again "
            "with --restart"
        )


def recorded(index: Index) -> Begun | None:
    """Returns the run that an index is of, or None while it is of none."""
    run, spec = index.fact("run", str), index.fact("spec", RunSpec)
    if run is None or spec is None:
        return None
    return Begun(
        run=run,
        spec=spec,
        ordered=bool(index.fact("ordered", bool)),
        is_finished=index.fact("phase", str) == FINISHED,
        is_new=False,
    )


def _differences(
    index: Index, found: Begun, spec: RunSpec, ordered: bool, source: Identity
) -> Iterator[str]:
    for name in RunSpec.__struct_fields__:
        was, now = getattr(found.spec, name), getattr(spec, name)
        if name not in _LABELS and was != now:
            yield f"{name.replace('_', ' ')} was {was!r} and is {now!r}"
    if found.ordered != ordered:
        yield f"ordered was {found.ordered} and is {ordered}"
    before = index.fact("source", Identity)
    if before is not None and not before.is_same(source):
        changed = (
            f"{before.size} and is {source.size} bytes"
            if before.size != source.size
            else f"of {before.size} bytes and other content"
        )
        yield f"the input was {changed}"
