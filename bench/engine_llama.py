"""llama.cpp with Q8_0 weights: its server on the workload, its own bench for rates."""

import http.client
import json
import os
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine_workload import Item, output_tokens
from harness import Figures, child, free_port
from peers.make_q8_0 import q8_0_model

VARIABLE = "TOKENMILL_BENCH_LLAMA_CPP"
PROGRAMS = ("llama-server", "llama-batched-bench")
READY_S = 60.0


def find(directory: Path | None) -> Path | None:
    """Returns the folder of llama.cpp's programs, or None where it is not installed.

    Args:
        directory: As named on the command line; else `TOKENMILL_BENCH_LLAMA_CPP`,
            else the search path.

    Raises:
        SystemExit: The folder that was named lacks a program.
    """
    named = directory or (
        Path(os.environ[VARIABLE]) if VARIABLE in os.environ else None
    )
    if named is not None:
        for folder in (named, named / "bin"):
            if all((folder / program).is_file() for program in PROGRAMS):
                return folder
        raise SystemExit(f"{named} holds no {' and '.join(PROGRAMS)}")
    if found := shutil.which(PROGRAMS[0]):
        folder = Path(found).parent
        return folder if (folder / PROGRAMS[1]).is_file() else None
    return None


def run_server(
    programs: Path, model: Path, items: list[Item], *, max_running: int, threads: int
) -> Figures:
    """Sends all requests at once to a server with continuous batching.

    Args:
        programs: Folder of llama.cpp's programs.
        model: Checkpoint directory; its Q8_0 form is made once and kept.
        items: The workload.
        max_running: The server's slots, which share one KV cache.
        threads: Compute threads.

    Returns:
        Figures by name; rates in tokens per second, times in seconds.
    """
    weights = q8_0_model(model, programs)
    port = free_port()
    longest = max(len(item.token_ids) + item.max_tokens for item in items)
    command = [
        *(str(programs / "llama-server"), "-m", str(weights)),
        *("--host", "127.0.0.1", "--port", str(port), "--no-ui", "--offline"),
        *("-np", str(max_running), "--kv-unified", "-c", str(max_running * longest)),
        *("-t", str(threads), "-tb", str(threads), "--cache-ram", "0"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        began = time.perf_counter()
        with child(command, log) as server:
            _wait_until_ready(server, port, log)
            load_s = time.perf_counter() - began
            _complete(port, Item("warm", items[0].token_ids, 4))
            began = time.perf_counter()
            with ThreadPoolExecutor(len(items)) as clients:
                produced = sum(clients.map(lambda item: _complete(port, item), items))
            seconds = time.perf_counter() - began
    if produced != output_tokens(items):
        raise SystemExit(f"llama.cpp sent {produced} of {output_tokens(items)} tokens")
    return {
        "output_tokens_per_s": produced / seconds,
        "seconds": seconds,
        "load_s": load_s,
        "output_tokens": produced,
    }


def _wait_until_ready(server: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end and server.poll() is None:
        if _is_ready(port):
            return
        time.sleep(0.1)
    tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
    raise SystemExit(f"llama-server was not ready in {READY_S:.0f} s:\n{tail}")


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except OSError:
        return False  # it does not listen yet
    finally:
        connection.close()


def _complete(port: int, item: Item) -> int:
    """Runs one request to its forced length, greedily; returns its output tokens."""
    body = {
        "prompt": list(item.token_ids),
        "n_predict": item.max_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "top_k": 1,
        "samplers": ["top_k"],
        "cache_prompt": False,
        "stream": False,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/completion", json.dumps(body))
    answer = json.loads(connection.getresponse().read())
    connection.close()
    if "tokens_predicted" not in answer:
        raise SystemExit(f"llama-server failed request {item.id}: {answer}")
    if answer["tokens_evaluated"] != len(item.token_ids):
        counts = f"{answer['tokens_evaluated']}, not {len(item.token_ids)}"
        raise SystemExit(f"llama-server saw another prompt of {item.id}: {counts}")
    return int(answer["tokens_predicted"])


def run_rates(programs: Path, model: Path, *, threads: int) -> Figures:
    """Measures decode at batch 1, 8 and 16, and prefill, with llama-batched-bench.

    Its decode rate counts the model's steps alone: no sampling, no text.
    """
    weights = q8_0_model(model, programs)
    decode = _batched_bench(programs, weights, threads, "128", "64", "1,8,16")
    prefill = _batched_bench(programs, weights, threads, "512", "1", "4")
    figures = {f"decode_{row['pl']}": float(row["speed_tg"]) for row in decode}
    return figures | {"prefill": float(prefill[0]["speed_pp"])}


def _batched_bench(
    programs: Path, weights: Path, threads: int, prompt: str, output: str, batch: str
) -> list[dict[str, float]]:
    command = [
        *(str(programs / "llama-batched-bench"), "-m", str(weights)),
        *("-t", str(threads), "-tb", str(threads), "-c", "4096"),
        *("-b", "2048", "-ub", "512", "--output-format", "jsonl"),
        *("-npp", prompt, "-ntg", output, "-npl", batch),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = parse_batched_bench(done.stdout)
    if done.returncode or len(rows) != len(batch.split(",")):
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return rows


def parse_batched_bench(output: str) -> list[dict[str, float]]:
    """Returns the rows that llama-batched-bench printed as JSON lines.

    Args:
        output: Its standard output, with other lines around them.

    Returns:
        One a batch size, with `pl` (the batch), `speed_pp` and `speed_tg`.
    """
    lines = [line.strip() for line in output.splitlines()]
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    return [row for row in rows if "speed_tg" in row]
