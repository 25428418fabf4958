"""Runs every command and every Python block of README.md against a pool of its own.

Each `sh` block is read command by command. `make …`, `source …` and `tokenmill up` are
run by stages of their own (the last one here, as a process); any other must exit 0.
They run in a directory with copies of the files that they name, and the gateway is
asked at a free port.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ELSEWHERE = ("make demo", "make test", "source .venv/bin/activate")
UP = "tokenmill up --gateway"
NAMED = ("README.md", "SECURITY.md")
ADDRESS = "127.0.0.1:8080"
COMMAND_S = 120
TABLE = re.compile(r'"num_groups":[1-9]')


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language in the README."""
    text = (ROOT / "README.md").read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[str]:
    """The commands of a block; one may be several lines long."""
    found: list[str] = []
    open_lines: list[str] = []
    for line in block.splitlines():
        open_lines.append(line)
        text = "\n".join(open_lines)
        checked = subprocess.run(
            ["bash", "-n", "-c", text], capture_output=True, check=False
        )
        if checked.returncode == 0 and not line.endswith("\\"):
            found.append(text)
            open_lines = []
    assert not open_lines, f"an unfinished command: {open_lines}"
    return [text for text in found if text.strip()]


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_pool(
    environment: dict[str, str], pool: "subprocess.Popen[bytes]", port: int
) -> None:
    """Returns once the gateway answers and a model is served."""
    end = time.monotonic() + 90
    while time.monotonic() < end:
        if pool.poll() is not None:
            raise SystemExit(f"tokenmill up ended with status {pool.returncode}")
        listed = subprocess.run(
            ["tokenmill", "models", "--json"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if listed.returncode == 0 and TABLE.search(listed.stdout):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
        time.sleep(0.5)
    raise SystemExit("the pool and its gateway did not serve within 90 s")


def run_all(environment: dict[str, str], work: Path, lines: list[str]) -> int:
    """Runs the commands, then the Python blocks; returns how many of the latter."""
    here = f"127.0.0.1:{environment['TOKENMILL_GATEWAY_PORT']}"
    for line in lines:
        if line in ELSEWHERE or line == UP:
            continue
        print(f"$ {line}", flush=True)
        command = ["bash", "-c", line.replace(ADDRESS, here)]
        subprocess.run(
            command, env=environment, check=True, cwd=work, timeout=COMMAND_S
        )
    scripts = blocks("python")
    assert scripts
    for number, script in enumerate(scripts, 1):
        print(f"$ python (block {number})", flush=True)
        command = [sys.executable, "-c", script.replace(ADDRESS, here)]
        subprocess.run(
            command, env=environment, check=True, cwd=work, timeout=COMMAND_S
        )
    return len(scripts)


def main() -> None:
    """Starts the pool, runs what the README shows, stops the pool."""
    lines = [command for block in blocks("sh") for command in commands(block)]
    assert UP in lines, f"the README no longer shows `{UP}`"
    assert len(lines) > 10, lines
    with tempfile.TemporaryDirectory() as state, tempfile.TemporaryDirectory() as work:
        for name in NAMED:
            shutil.copy(ROOT / name, work)
        port = free_port()
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TOKENMILL_POOL_STATE_DIR": state,
            "TOKENMILL_GATEWAY_PORT": str(port),
        }
        environment.pop("TOKENMILL_URL", None)
        with (Path(state) / "up.log").open("wb") as log:
            pool = subprocess.Popen(
                UP.split(), env=environment, stdout=log, stderr=log, cwd=ROOT
            )
        try:
            wait_for_pool(environment, pool, port)
            scripts = run_all(environment, Path(work), lines)
        except BaseException:
            print((Path(state) / "up.log").read_text(errors="replace")[-4000:])
            raise
        finally:
            pool.terminate()
            pool.wait(timeout=60)
    print(f"{len(lines)} commands and {scripts} Python blocks of the README ran")


if __name__ == "__main__":
    main()
