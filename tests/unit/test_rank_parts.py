"""What ranks tell each other's leader, and how they share a host: the pure parts."""

from __future__ import annotations

import os
from types import SimpleNamespace

import msgspec
import pytest

from tokenmill.shared.config import ModelConfig, WorkerConfig
from tokenmill.shared.errors import ProtocolError
from tokenmill.workers.engine.parallel.adapter_orders import (
    AdapterOrder,
    DropOrder,
    LoadOrder,
)
from tokenmill.workers.rank_blame import BLAME_S, Blame
from tokenmill.workers.rank_order import (
    RankOrder,
    follower_environment,
    orders,
    share_threads,
)
from tokenmill.workers.rank_orders import LeaderLines, Orders
from tokenmill.workers.rank_progress import LeastProgress
from tokenmill.workers.rank_rendezvous import Rendezvous
from tokenmill.workers.rank_reports import (
    LONGEST,
    Alive,
    Failed,
    Progressed,
    Reached,
    ReportReader,
    Stage,
)


@pytest.mark.parametrize(
    ("total", "size", "each"),
    [
        (8, 4, (2, 2, 2, 2)),
        (7, 3, (3, 2, 2)),
        (2, 4, (1, 1, 1, 1)),  # a rank has one at least, whatever is there
        (5, 1, (5,)),
    ],
)
def test_threads_are_shared_out(total: int, size: int, each: tuple[int, ...]) -> None:
    assert share_threads(total, size) == each


def test_each_follower_gets_its_own_rank_and_threads() -> None:
    worker = WorkerConfig(threads=7, max_running=3)
    first = RankOrder(
        group="w-1",
        rank=1,
        size=3,
        leader=1,
        path="/models/m",
        model=ModelConfig(name="m", tp=3),
        worker=worker,
        backend="gloo",
        rendezvous="/proc/self/fd/9",
        alive_s=0.5,
    )
    found = orders(first, worker, (3, 2, 1))
    assert [(one.rank, one.worker.threads) for one in found] == [(1, 2), (2, 1)]
    assert all(one.worker.max_running == 3 for one in found)
    line = msgspec.json.encode(found[1])
    assert msgspec.json.decode(line, type=RankOrder) == found[1]


def test_followers_see_no_settings_of_the_pool() -> None:
    given = {
        "TOKENMILL_URL": "redis://:secret@host/0",
        "TOKENMILL_REDIS_URL": "redis://:secret@host/0",
        "TOKENMILL_WEBHOOKS_SECRET": "whsec_x",
        "TOKENMILL_STORAGE_URL": "s3://key:secret@bucket",
    }
    kept = {"TOKENMILL_KERNELS": "numba", "TOKENMILL_BUILD_X": "1", "PATH": "/bin"}
    assert follower_environment({**given, **kept}) == kept


class Suspect(msgspec.Struct):
    name: str
    is_silent: bool = False


LOST, OWN = Failed("group_lost", "peer is gone"), Failed("engine_error", "no memory")


def blame(*reports: tuple[int, Failed], silent: int | None = None) -> Blame:
    """Of ranks 1 to 3, of which some have told of a failure one after the other."""
    ranks = [Suspect(f"rank {number}", number == silent) for number in (1, 2, 3)]
    made = Blame(ranks)
    for moment, (number, report) in enumerate(reports):
        made.hear(ranks[number - 1], report, 0.01 * moment)
    return made


def test_nobody_is_blamed_before_others_could_speak() -> None:
    assert blame().verdict() is None
    one = blame((1, OWN))
    assert one.verdict(now=BLAME_S) is None
    assert one.verdict(now=BLAME_S + 0.1) == "rank 1: no memory"
    assert one.verdict() == "rank 1: no memory"  # nobody is left


def test_the_first_that_failed_by_itself_is_blamed() -> None:
    assert blame((2, LOST), (1, OWN), (3, LOST)).verdict() == "rank 1: no memory"
    assert blame((1, OWN), (2, OWN)).verdict() == "rank 1: no memory"
    assert blame((2, LOST), (1, LOST)).verdict() == "rank 2: peer is gone"


def test_who_is_waited_for_and_says_nothing_is_named() -> None:
    hangs = blame((1, LOST), (2, LOST), silent=3)
    assert hangs.verdict() == "rank 3 did not answer the others: rank 1: peer is gone"
    assert blame((1, OWN), silent=3).verdict() == "rank 1: no memory"


def test_reports_are_read_wherever_the_pipe_cuts_them() -> None:
    reached, failed = Reached(Stage.ARRIVED), Failed("c", "m")
    sent = [reached, Progressed("weights", 0.5), Alive(), failed]
    data = b"".join(msgspec.json.encode(one) + b"\n" for one in sent)
    for width in (1, 7, len(data)):
        reader, got = ReportReader(), []
        for start in range(0, len(data), width):
            got += reader.feed(data[start : start + width])
        assert got == sent


@pytest.mark.parametrize(
    "data", [b"hello\n", b'{"type":"other"}\n', b"x" * (LONGEST + 1)]
)
def test_what_is_no_report_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="rank"):
        ReportReader().feed(data)


def test_orders_are_obeyed_wherever_the_pipe_cuts_them() -> None:
    sent = [LoadOrder("1", "/adapters/one"), DropOrder("1"), LoadOrder("2", "ä" * 9)]
    data = b"first\n" + b"".join(msgspec.json.encode(one) + b"\n" for one in sent)
    for width in (1, len(data)):
        out, into = os.pipe()
        heard: list[AdapterOrder] = []
        lines, obeying = LeaderLines(out), Orders()
        obeying.adapters = SimpleNamespace(hear=heard.append)
        for start in range(0, len(data), width):  # all of it fits the pipe
            os.write(into, data[start : start + width])
        os.close(into)
        assert lines.next() == b"first"
        obeying.obey(lines)
        assert heard == sent
        os.close(out)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"hello\n", "no order"),
        (b'{"type":"drop","ticket":"1"}\n', "before there are adapters"),
    ],
)
def test_what_is_no_order_is_refused(data: bytes, problem: str) -> None:
    out, into = os.pipe()
    os.write(into, data)
    with pytest.raises(ProtocolError, match=problem):
        Orders().obey(LeaderLines(out))
    for descriptor in (out, into):
        os.close(descriptor)


def test_what_is_left_of_a_meeting_place_touches_no_other_file(tmp_path) -> None:
    """torch's store writes to its path when it is freed, whatever that is by then."""
    from torch._C._distributed_c10d import FileStore

    place = Rendezvous()
    store = FileStore(place.path, 1)
    store.set("key", "value")
    place.close()
    with (tmp_path / "log").open("wb") as log:  # takes the lowest number that is free
        del store
        assert os.fstat(log.fileno()).st_size == 0


def test_a_group_is_as_far_as_its_slowest_rank() -> None:
    told: list[tuple[str, float]] = []
    progress = LeastProgress(2, lambda stage, part: told.append((stage, part)))
    progress.update(0, "weights", 0.5)
    assert told == []
    progress.update(1, "weights", 0.25)
    progress.update(0, "weights", 1.0)
    progress.update(1, "weights", 1.0)
    assert told == [("weights", 0.25), ("weights", 1.0)]
