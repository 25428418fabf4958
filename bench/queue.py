"""The full path with an engine that answers at once, in separate processes.

    python bench/queue.py [--against arq,streaq,taskiq] [--jobs 20000] [--report]

Redis, scheduler, worker (`--engine echo`), producer and reader are a process each.
Every job takes enqueue, dispatch, start, one emit and one finish; its result is read
back and compared. The same is then asked of other job queues, in turn with tokenmill,
on a server of the same binary and settings. A peer that is named and does not run, and
any wrong result, is a problem. The last line is one JSON object.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path


def become_the_standard_module() -> None:
    """Gives `import queue` of any script in this folder the standard library's."""
    path = Path(os.__file__).with_name("queue.py")
    spec = importlib.util.spec_from_file_location("queue", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["queue"] = module
    spec.loader.exec_module(module)


if __name__ == "queue":
    # Python puts a script's folder first on its path, so this file hides the module.
    become_the_standard_module()


def arguments() -> argparse.Namespace:
    """What is asked for."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--jobs", type=int, default=20_000, help="jobs through tokenmill, each round")
    add("--peer-jobs", type=int, default=3_000, help="jobs through each peer")
    add("--rounds", type=int, default=2, help="turns of every side; the best counts")
    add("--paced", type=int, default=400, help="jobs of the latency runs; 0 for none")
    add("--against", default="arq", help="peers with commas between, or none")
    for peer in ("arq", "streaq", "taskiq"):
        add(
            f"--{peer}-python",
            default=sys.executable,
            metavar="PYTHON",
            help=f"interpreter of the environment with {peer}",
        )
    add("--report", action="store_true", help="save the figures in bench/results")
    add("--require-targets", action="store_true", help="fail when one is missed")
    return parser.parse_args()


def chosen_peers(options: argparse.Namespace) -> tuple[list["Peer"], dict[str, str]]:
    """The peers that can take part, and why the others cannot."""
    names = [] if options.against == "none" else options.against.split(",")
    unknown = set(names) - set(PEERS)
    if unknown:
        raise SystemExit(f"no such peer: {unknown}; there are {', '.join(PEERS)}")
    peers = [Peer(name, getattr(options, f"{name}_python")) for name in names]
    missing = {peer.name: why for peer in peers if (why := peer.problem())}
    return [peer for peer in peers if peer.name not in missing], missing


def rounds(
    options: argparse.Namespace, peers: list["Peer"], report: dict[str, object]
) -> dict[str, list["Figures"]]:
    """Runs every side in turn; tokenmill's latency is measured in its first."""
    sides: dict[str, list[Figures]] = {}
    failed: dict[str, str] = {}
    report["not_completed"] = failed
    for number in range(options.rounds):
        with pool() as running:
            found = measure_pool(running, options.jobs)
            sides.setdefault("tokenmill", []).append(found)
            show(f"tokenmill, round {number + 1}", found)
            if number == 0 and options.paced:
                report |= latency(running.url, options.paced)
                report |= result_latency(running.url, options.paced)
                print(f"at {RATE:.0f} jobs/s: P99 {report['p99_ms']} ms", flush=True)
        for peer in peers:
            try:
                found = measure_peer(peer, options.peer_jobs)
            except (SystemExit, subprocess.SubprocessError) as error:
                # A peer whose run does not complete is named, and the others go on.
                failed[peer.name] = str(error)
                print(f"{peer.name} did not complete: {error}", flush=True)
                continue
            sides.setdefault(peer.name, []).append(found)
            show(f"{peer.name}, round {number + 1}", found)
    return sides


def compared(sides: dict[str, list["Figures"]]) -> dict[str, dict[str, float]]:
    """How tokenmill stands to each peer: by rate and by processor time."""
    best = {name: max(turns, key=rate_of) for name, turns in sides.items()}
    mine = best.pop("tokenmill")
    return {
        name: {
            "ratio": round(rate_of(mine) / rate_of(its), 2),
            "ratio_of_processed": round(rate_of(mine) / number_of(its, PROCESSED), 2),
            "cpu_ratio": round(number_of(its, IN_ALL) / number_of(mine, IN_ALL), 2),
        }
        for name, its in best.items()
    }


def rate_of(found: "Figures") -> float:
    """A side's rate."""
    return number_of(found, "jobs_per_s")


def main() -> int:
    """Runs every side and prints the figures as one line of JSON."""
    options = arguments()
    peers, missing = chosen_peers(options)
    report: dict[str, object] = {"benchmark": "queue", "machine": machine()}
    sides = rounds(options, peers, report)
    best = max(sides["tokenmill"], key=rate_of)
    report |= {
        **best,
        "sides": sides,
        "comparisons": compared(sides),
        "not_installed": missing,
        "targets": TARGETS,
    }
    report["missed"] = missed(report)
    report["problems"] = invalid(report, sides)
    if options.require_targets:
        report["problems"] += missed(report)
    return finish(report, save=options.report)


if __name__ == "__main__":
    from harness import finish, machine, new_parser, show
    from queue_latency import RATE, latency, result_latency
    from queue_pool import pool
    from queue_sides import PEERS, Figures, Peer, measure_peer, measure_pool
    from queue_verdict import TARGETS, invalid, missed, number_of

    PROCESSED, IN_ALL = "processed_jobs_per_s", "cpu_us_per_job_in_all"
    sys.exit(main())
