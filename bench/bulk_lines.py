"""Very many lines through a pool whose engine answers at once: rate and memory."""

import json
import time

import psutil
from bulk_pool import up

SAMPLE_S = 0.5


def measure(count: int) -> dict[str, object]:
    """Runs so many lines.

    Returns:
        Lines per second, and the highest memory of the command and the pool.
    """
    with up("echo", engine="echo") as pool:
        source = pool.directory / "lines.jsonl"
        options = {"max_tokens": 8}
        with source.open("w") as file:
            for number in range(count):
                row = {
                    "id": number,
                    "prompt": f"line {number} " * 8,
                    "options": options,
                }
                file.write(json.dumps(row) + "\n")
        output = pool.directory / "lines.out"
        began = time.monotonic()
        command = pool.start(
            "run", source, "-o", output, "--model", "echo", "--ordered", "--quiet"
        )
        peaks: dict[str, float] = {}
        while command.poll() is None:
            now = pool.rss_mib()
            try:
                now["command"] = psutil.Process(command.pid).memory_info().rss / 2**20
            except psutil.Error:
                break
            peaks = {name: max(peaks.get(name, 0), mib) for name, mib in now.items()}
            time.sleep(SAMPLE_S)
        if command.wait():
            raise SystemExit(f"bulk run ended with {command.returncode}")
        seconds = time.monotonic() - began
        with output.open("rb") as file:
            written = sum(1 for _ in file)
        index = pool.directory / "lines.out.run" / "index.sqlite"
        return {
            "lines": count,
            "written": written,
            "seconds": seconds,
            "lines_per_s": count / seconds,
            "index_bytes_per_line": index.stat().st_size / count,
            "peak_rss_mib": {name: round(mib, 1) for name, mib in peaks.items()},
        }
