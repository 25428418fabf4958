"""Files of any length in constant memory."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.pools import clean_environment

CHILD = """
import asyncio, re, sys
from pathlib import Path
from support.fake_run import SPEC, FakeRun, succeed
from tokenmill.producer.bulk import driver
from tokenmill.producer.bulk.accepted import Accepted
from tokenmill.producer.bulk.finishing import finish
from tokenmill.producer.bulk.index import Index
from tokenmill.producer.bulk.line_source import LineSource
from tokenmill.producer.bulk.place import Place
from tokenmill.producer.bulk.requests import RequestReader
from tokenmill.producer.bulk.sink import FileSink
from tokenmill.producer.bulk.window import Window
from tokenmill.shared.messages import PoolCard

driver.StoreCalls = lambda *_, **__: FakeRun(succeed)
class Client:
    session = None
count, directory = int(sys.argv[1]), Path(sys.argv[2])
source = directory / "in.jsonl"
with source.open("w") as file:
    for number in range(count):
        file.write('{"id": %d, "prompt": "%s"}\\n' % (number, "word " * 40))
place = Place(directory / "out.jsonl")
place.make()
index = Index(place.index)
sink = FileSink(place, index, lambda settled: b"{}" + b" " * 200)
reader = RequestReader(Accepted(PoolCard(), {}), "m")
made = driver.BulkDriver(
    Client(), LineSource(source, index, reader), sink, SPEC, run_id="a" * 10,
    window=Window(200, 10**9),
)
report = asyncio.run(made.run())
assert report.succeeded == count, report
sink.close()
finish(place, index, ordered=True)
assert sum(1 for _ in place.output.open()) == count
index.close()
# Not what `getrusage` says: there a process begins with the peak of its parent.
status = Path("/proc/self/status").read_text()
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) // 1024)
"""


def peak_mib(count: int, directory: Path) -> int:
    directory.mkdir()
    env = clean_environment()
    env["PYTHONPATH"] += f":{Path(__file__).parents[1]}"
    command = [sys.executable, "-c", CHILD, str(count), str(directory)]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return int(ran.stdout)


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs Linux's /proc"
)
def test_ten_times_the_lines_take_the_same_memory(tmp_path: Path) -> None:
    few = peak_mib(2000, tmp_path / "few")
    many = peak_mib(20_000, tmp_path / "many")
    # 20,000 lines are 4 MB of input, and as much of items and outcomes again.
    assert many - few < 6
