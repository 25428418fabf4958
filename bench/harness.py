"""What all benchmarks need: own processes, the state of the machine, saved results."""

import argparse
import json
import math
import multiprocessing
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import structlog

Figures = dict[str, float]
"""Measured values by name."""

RESULTS = Path(__file__).parent / "results"
"""The latest saved figures of each benchmark; `report.py` makes the page from them."""

BUSY_LOAD = 0.5
"""Processes that want a core before the start; above it, times are not to be trusted"""


def new_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help says what a script is, and the default of each option.

    Args:
        doc: Of the script; its first line is shown.
    """
    return argparse.ArgumentParser(
        description=(doc or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )


def quiet_logs() -> None:
    """Sends log lines to standard error: standard output ends with the JSON line."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))


def in_own_process(
    function: Callable[..., Figures], *args: object, **kwargs: object
) -> Figures:
    """Runs one side in a fresh process, so that neither inherits threads or memory."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=quiet_logs) as pool:
        return pool.submit(function, *args, **kwargs).result()


def cores() -> int:
    """Returns how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str:
    """Returns the processor's name and which of the useful instructions it has."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = set(fields.get("flags", "").split())
    useful = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8")
    found = [flag for flag in useful if flag in flags]
    return ", ".join([fields.get("model name", platform.processor()), *found])


def machine() -> dict[str, object]:
    """Describes the machine and how busy it is now; warns when it is not quiet."""
    load = round(os.getloadavg()[0], 2)
    if load > BUSY_LOAD:
        print(
            f"warning: the load average is {load} before the start: other work makes "
            "every time here too long and ratios noisy",
            file=sys.stderr,
        )
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "processor": f"{platform.machine()}, {processor()}",
        "cores": cores(),
        "python": platform.python_version(),
        "load_average_at_start": load,
    }


def show(title: str, figures: Mapping[str, object]) -> None:
    """Prints one side's figures."""
    print(f"\n{title}")
    for name, value in figures.items():
        text = f"{value:,.2f}" if isinstance(value, float) else f"{value}"
        print(f"  {name:<28}{text:>14}", flush=True)


def finish(report: dict[str, object], *, save: bool) -> int:
    """Prints the problems and the JSON line, and saves the report if asked.

    Args:
        report: With `benchmark`, its name, and `problems`, what was wrong or missed.
        save: Whether `bench/results` keeps it.

    Returns:
        The exit status: 1 when there are problems.
    """
    problems = report["problems"]
    assert isinstance(problems, list)
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    if save:
        RESULTS.mkdir(exist_ok=True)
        text = json.dumps(report, indent=1) + "\n"
        (RESULTS / f"{report['benchmark']}.json").write_text(text, encoding="utf-8")
    print(json.dumps(report), flush=True)
    return 1 if problems else 0


def free_port() -> int:
    """Returns a port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def child(command: list[str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs a process for the length of a block; its output goes to a file."""
    with log.open("wb") as sink:
        running = subprocess.Popen(command, stdout=sink, stderr=sink)
        try:
            yield running
        finally:
            running.terminate()
            try:
                running.wait(20)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()


def percentile(values: list[float], fraction: float) -> float:
    """Returns the smallest value that this fraction of the values does not exceed."""
    if not values:
        raise SystemExit("no values were measured, so there is no percentile")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]
