"""A bulk command from what it was asked to do, to its report."""

import asyncio
import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from ...shared.bulk.messages import RunSpec
from ...shared.bulk.store import RunStore
from ...shared.errors import BulkRunConflict, RedisUnavailable, UnknownRun
from ..cli_output import print_note
from ..client import Client
from .accepted import accepted_by
from .documents import is_lines
from .drive import Copy, Drive, OnProgress
from .finishing import prepare_retry
from .flow import WRONG, Report
from .identity import Identity, identify
from .index import RETRIED, Index
from .off_loop import off_loop
from .opening import Begun, begin, check_there, opened, recorded
from .place import Place
from .stdin import spool_stdin
from .target import check_named, check_target

PATIENCE_S: Final = 300.0
"""How long an outage of Redis is waited out: longer than any restart."""
STANDARD: Final = "-"
"""Standard input, or output."""
_CANCEL_S: Final = 5.0
"""How long a command that leaves waits for its run to be cancelled."""
_LINE: Final = 64 * 1024 * 1024
"""Lines are counted in pieces of so many bytes."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What a command was asked to do."""

    source: str
    """A path, or `-`."""
    output: str
    """A path, or `-`."""
    spec: RunSpec
    ordered: bool = False
    restart: bool = False
    reach: "Reach"
    any_model: bool = False
    """None was named, so the one in `spec` means nothing: what was begun goes on with
    its own, a new run takes the pool's only one."""


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """How the pool is reached."""

    url: str | None = None
    patience_s: float = PATIENCE_S
    keep_ms: int
    """How long a run's keys stay in Redis after it was last touched."""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How a command came to its end."""

    report: Report
    output: str
    was_finished: bool = False
    """The output was there and whole before."""
    others: int = 0
    """Files of other kinds in a directory, which were passed over."""


async def work_off(work: Work, on_progress: OnProgress) -> Ended:
    """Does what a command was asked to do, or what is left of it.

    Args:
        work: What to do.
        on_progress: Called about twice a second.

    Raises:
        BulkRunConflict: The output belongs to other options or input, or is in use.
        BulkOutputFailed: The output cannot be written.
        InvalidRequest: The input cannot be read, or the output is no file to write.
        RedisUnavailable: Redis did not answer for longer than the patience.
    """
    check_named(work.source, "file")
    check_named(work.output, "output")
    if work.output == STANDARD:
        return await _to_stdout(work, on_progress)
    place = Place(Path(work.output))
    check_target(place, None if work.source == STANDARD else Path(work.source))
    with opened(place, restart=work.restart) as index:
        return await _in_place(work, place, index, on_progress)


async def _to_stdout(work: Work, on_progress: OnProgress) -> Ended:
    """Nothing stays: lines cannot be taken back, so such a run cannot go on later."""
    with tempfile.TemporaryDirectory(prefix="tokenmill-bulk-") as directory:
        place = Place(Path(directory) / "output.jsonl")
        copy = None if work.ordered else _write_out
        with opened(place) as index:
            try:
                ended = await _in_place(work, place, index, on_progress, copy)
            except BaseException:
                await _cancel(work.reach, index)
                raise
        if copy is None and place.output.exists():
            with place.output.open("rb") as lines:
                for line in lines:
                    sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        return ended


def _write_out(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


async def _cancel(reach: Reach, index: Index) -> None:
    """Takes a run out of the pool whose outcomes nobody will collect."""
    begun = recorded(index)
    if begun is None:
        return
    try:
        async with asyncio.timeout(_CANCEL_S), Client(reach.url) as mill:
            await RunStore(mill.session.redis, begun.run).cancel()
    except (RedisUnavailable, UnknownRun, TimeoutError) as error:
        print_note(f"run {begun.run} was not cancelled: {error or 'no answer in time'}")


async def _in_place(
    work: Work,
    place: Place,
    index: Index,
    on_progress: OnProgress,
    copy: Copy | None = None,
) -> Ended:
    path = Path(work.source)
    if work.source == STANDARD:
        path = await spool_stdin(place)
    in_lines = _in_lines(work.spec, work.source)
    source = await _identity(path, index, in_lines=in_lines)
    found = recorded(index)
    if work.any_model and found is not None:
        work = _with_model(work, found.spec.model)
    if found is not None and found.is_finished:
        check_there(place, found)
        begun = _begin(work, place, index, source, path)
        report = _report_of(begun, index)
    else:
        # Before anything is recorded: what this pool refuses is not begun.
        async with Client(work.reach.url, patience_s=work.reach.patience_s) as mill:
            await _cancel_replaced(mill, index)
            accepted = await accepted_by(mill, work.spec.tenant)
            if work.any_model and found is None:
                work = _with_model(work, accepted.default_model)
            accepted.check_spec(work.spec, is_new=found is None)
            begun = _begin(work, place, index, source, path)
            drive = Drive(mill, accepted, begun, work.reach.keep_ms, on_progress)
            report = await drive.to_its_end(place, index, copy)
    return Ended(
        report=report,
        output=work.output,
        was_finished=found is not None and found.is_finished,
        others=source.others,
    )


def _with_model(work: Work, model: str) -> Work:
    spec = msgspec.structs.replace(work.spec, model=model)
    return msgspec.structs.replace(work, spec=spec)


async def _identity(path: Path, index: Index, *, in_lines: bool) -> Identity:
    known, most = index.fact("source", Identity), _LINE if in_lines else None
    return await off_loop(
        lambda check: identify(path, known, max_line=most, check=check)
    )


async def _cancel_replaced(mill: Client, index: Index) -> None:
    """Ends the run that `--restart` forgot: nobody will collect its outcomes."""
    run = index.fact("replaced", str)
    if not run:
        return
    with contextlib.suppress(UnknownRun):
        await mill.session.patiently(RunStore(mill.session.redis, run).cancel)
    index.set_facts(replaced="")


def _begin(
    work: Work, place: Place, index: Index, source: Identity, path: Path
) -> Begun:
    begun = begin(
        place,
        index,
        spec=work.spec,
        ordered=work.ordered,
        source=source,
        restart=work.restart,
    )
    if work.source == STANDARD:
        path = path.replace(place.spooled)
    in_lines = _in_lines(work.spec, work.source)
    index.set_facts(input=str(path.absolute()), in_lines=in_lines)
    return begun


async def retry_failed(output: str, reach: Reach, on_progress: OnProgress) -> Ended:
    """Runs what failed again, and puts its lines in the place of those that say so.

    What was never run, since the run was broken off or cancelled, is run as well.

    Args:
        output: The path of an output that a bulk command wrote.
        reach: How the pool is reached.
        on_progress: Called about twice a second.

    Raises:
        BulkRunConflict: It is not such an output, or input or output were changed.
    """
    place = Place(Path(output))
    if not place.index.exists():
        raise _no_index(output)
    with opened(place) as index:
        begun, source = recorded(index), index.fact("source", Identity)
        path = index.fact("input", str)
        if begun is None or source is None or path is None:
            raise _no_index(output)
        in_lines = bool(index.fact("in_lines", bool))
        now = await _identity(Path(path), index, in_lines=in_lines)
        if not now.is_same(source):
            raise BulkRunConflict(
                f"{path} was changed since {output} was written, so it cannot be said "
                "which items failed; begin again with --restart"
            )
        check_there(place, begun)
        num_again = await off_loop(
            lambda check: prepare_retry(
                place, index, ordered=begun.ordered, check=check
            )
        )
        if not num_again and begun.is_finished:
            return Ended(
                report=_report_of(begun, index),
                output=output,
                was_finished=True,
                others=now.others,
            )
        # Else there is something to run: what failed, or what never came to its turn.
        async with Client(reach.url, patience_s=reach.patience_s) as mill:
            accepted = await accepted_by(mill, begun.spec.tenant)
            drive = Drive(mill, accepted, begun, reach.keep_ms, on_progress)
            report = await drive.to_its_end(place, index)
        return Ended(report=report, output=output, others=now.others)


def _no_index(output: str) -> BulkRunConflict:
    return BulkRunConflict(
        f"{output} has no index beside it ({Place(Path(output)).sidecar.name}); it was "
        "written by something else, or the index was removed"
    )


def _in_lines(spec: RunSpec, source: str) -> bool:
    return spec.kind == "run" or source == STANDARD or is_lines(Path(source))


def _report_of(begun: Begun, index: Index) -> Report:
    """What an output says that was there before."""
    counts = index.counts()
    return Report(
        run=begun.run,
        state="complete",
        total=sum(counts.values()),
        succeeded=counts.get("succeeded", 0),
        failed=sum(counts.get(state, 0) for state in RETRIED),
        refused=sum(counts.get(state, 0) for state in WRONG),
        seconds=0.0,
    )
