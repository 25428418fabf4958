"""Runs every command and every Python block of README.md against a pool of its own.

Each `sh` block is read line by line. `make …`, `source …` and `tokenmill up` are run
by stages of their own (the last one here, as a process); any other line must exit 0.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ELSEWHERE = ("make demo", "make test", "source .venv/bin/activate")


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language in the README."""
    text = (ROOT / "README.md").read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def wait_for_pool(environment: dict[str, str], pool: "subprocess.Popen[bytes]") -> None:
    """Returns once `tokenmill models` lists a served model."""
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
        if listed.returncode == 0 and re.search(r'"num_groups":[1-9]', listed.stdout):
            return
        time.sleep(0.5)
    raise SystemExit("the pool served no model within 90 s")


def main() -> None:
    """Starts the pool, runs what the README shows, stops the pool."""
    lines = [ln for block in blocks("sh") for ln in block.splitlines() if ln.strip()]
    scripts = blocks("python")
    assert "tokenmill up" in lines, "the README no longer shows `tokenmill up`"
    assert len(lines) > 10, lines
    assert scripts
    with tempfile.TemporaryDirectory() as state:
        environment = {
            **os.environ,
            "PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}",
            "TOKENMILL_POOL_STATE_DIR": state,
        }
        environment.pop("TOKENMILL_URL", None)
        with (Path(state) / "up.log").open("wb") as log:
            pool = subprocess.Popen(
                ["tokenmill", "up"], env=environment, stdout=log, stderr=log, cwd=ROOT
            )
        try:
            wait_for_pool(environment, pool)
            for line in lines:
                if line in ELSEWHERE or line == "tokenmill up":
                    continue
                print(f"$ {line}", flush=True)
                subprocess.run(
                    ["bash", "-c", line], env=environment, check=True, cwd=ROOT,
                    timeout=90,
                )  # fmt: skip
            for number, script in enumerate(scripts, 1):
                print(f"$ python (block {number})", flush=True)
                subprocess.run(
                    [sys.executable, "-c", script], env=environment, check=True,
                    timeout=90,
                )  # fmt: skip
        except BaseException:
            print((Path(state) / "up.log").read_text(errors="replace")[-4000:])
            raise
        finally:
            pool.terminate()
            pool.wait(timeout=60)
    print(f"{len(lines)} lines and {len(scripts)} Python blocks of the README ran")


if __name__ == "__main__":
    main()
