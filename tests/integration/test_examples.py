"""Everything in examples/ runs as its first lines say, against a pool and a gateway."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright
from support.browser_pages import ARGUMENTS, chromium
from support.example_pool import MODEL, ExamplePool, answers, example_pool, process
from support.servers import free_port
from support.waiting import wait_until_sync

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExamplePool]:
    with example_pool(tmp_path_factory.mktemp("examples")) as made:
        yield made


def run(
    pool: ExamplePool,
    *command: str,
    cwd: Path = EXAMPLES,
    status: tuple[int, ...] = (0,),
    **env: str,
) -> str:
    """Runs a program to its end and returns what it printed."""
    done = subprocess.run(
        command,
        env={**pool.env, **env},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode in status, done.stdout + done.stderr
    return done.stdout


def fetch(address: str, body: bytes | None = None, kind: str = "text/plain") -> bytes:
    request = urllib.request.Request(address, body, {"Content-Type": kind})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read()


def refused(address: str, body: bytes | None = None) -> int:
    """The status of an answer that is an error."""
    try:
        fetch(address, body)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    return 200


def assert_asked(question: str, echoed: str) -> None:
    """It came as a user's turn for an assistant to answer, not as a text to go on."""
    assert echoed == f"user: {question}\nassistant: "


def test_every_example_is_run_here():
    run_here = [name for name in globals() if name.startswith("test_")]
    listed = (EXAMPLES / "README.md").read_text("utf-8")
    for path in EXAMPLES.iterdir():
        if path.suffix == ".py" or (path.is_dir() and path.name != "__pycache__"):
            assert any(n.startswith(f"test_{path.stem}") for n in run_here), path.name
            assert f"`{path.name}" in listed, path.name


def test_submit(pool):
    printed = run(pool, sys.executable, "submit.py")
    assert "Name three colours of the sky." in printed
    assert "tokens" in printed


def test_stream(pool):
    printed = run(pool, sys.executable, "stream.py")
    assert printed == "Once upon a time\n[succeeded]\n"


def test_bulk(pool):
    printed = run(pool, sys.executable, "bulk.py")
    assert len(printed.splitlines()) == 8
    assert "moss: A short fact about moss:" in printed


def test_notebook(pool, tmp_path):
    printed = run(pool, sys.executable, "notebook.py", FOLDER=str(tmp_path))
    assert "exit code 0" in printed
    for n in range(4):
        assert f"doc-{n}" in printed
        assert f"One word for doc-{n}:"[:8] in printed
    assert len((tmp_path / "summaries.jsonl").read_text().splitlines()) == 4


def test_openai_client(pool):
    printed = run(pool, sys.executable, "openai_client.py", pool.gateway)
    assert "Name three rivers." in printed
    assert "The mill by the " in printed


def test_fastapi_app(pool, tmp_path):
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "uvicorn", "fastapi_app:app", "--port", str(port)]
    command += ["--app-dir", str(EXAMPLES)]
    with process(command, pool.env, tmp_path / "log"):
        wait_until_sync(lambda: answers(f"{base}/openapi.json"))
        body = json.dumps({"text": "round and round"}).encode()
        made = json.loads(fetch(f"{base}/answers", body, "application/json"))
        address = f"{base}/answers/{made['id']}"
        first = fetch(f"{address}/text").decode()
        assert_asked("round and round", first)
        assert fetch(f"{address}/text").decode() == first  # and again, from its log
        assert json.loads(fetch(address))["text"] == first
        for unknown in (f"{MODEL}.0.{'0' * 31}", "nothing"):
            assert refused(f"{base}/answers/{unknown}") == 404
            assert refused(f"{base}/answers/{unknown}/text") == 404


def test_sync_app(pool, tmp_path):
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    command = [sys.executable, str(EXAMPLES / "sync_app.py"), str(port)]
    with process(command, pool.env, tmp_path / "log"):

        def enqueued() -> dict[str, str] | None:
            try:
                return json.loads(fetch(base, b"to and fro"))
            except urllib.error.HTTPError:
                raise
            except urllib.error.URLError:
                return None  # it does not listen yet

        made = wait_until_sync(enqueued)
        address = f"{base}/{made['id']}"
        wait_until_sync(lambda: json.loads(fetch(address))["state"] == "succeeded")
        assert_asked("to and fro", json.loads(fetch(address))["text"])
        assert refused(base, b"") == 400
        for unknown in (f"{MODEL}.0.{'0' * 31}", "nothing"):
            assert refused(f"{base}/{unknown}") == 404


@pytest.fixture(scope="module")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of examples/node with its packages, from npm's cache where it has them."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        if os.environ.get("TOKENMILL_REQUIRE_NODE") == "1":
            pytest.fail("node and npm are required here and are not installed")
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("node") / "node"
    shutil.copytree(
        EXAMPLES / "node", folder, ignore=shutil.ignore_patterns("node_modules")
    )
    done = subprocess.run(
        ["npm", "install", "--prefer-offline", "--no-audit", "--no-fund", "--silent"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_node_speaks_the_protocol(pool, node_folder):
    text = "Füße über die Brücke, there and back"
    command = ("node", "client.mjs", pool.url, MODEL, text)
    printed = run(pool, *command, cwd=node_folder)
    assert printed == f"{text}\n[succeeded]\n"


def test_browser_page_follows_a_job(pool, tmp_path):
    """The page is of another origin than the gateway, which allows this one alone."""
    port = pool.origin.rpartition(":")[2]
    serve = [sys.executable, "-m", "http.server", port, "--bind", "127.0.0.1"]
    folder = ["-d", str(EXAMPLES / "browser")]
    with (
        process([*serve, *folder], pool.env, tmp_path / "log"),
        sync_playwright() as playwright,
    ):
        wait_until_sync(lambda: answers(pool.origin))
        browser = playwright.chromium.launch(
            executable_path=chromium(), args=list(ARGUMENTS)
        )
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{pool.origin}/?gateway={pool.gateway}&model={MODEL}")
        page.get_by_label("Prompt").fill("word after word after word")
        page.get_by_role("button", name="Send").click()
        status = page.get_by_role("status").filter(has_text="succeeded")
        status.wait_for(timeout=60_000)
        assert page.locator("output").inner_text() == "word after word after word"
        page.goto(f"{pool.origin}/?gateway={pool.gateway}&model=nobody")
        page.get_by_role("button", name="Send").click()
        page.get_by_role("status").filter(has_text="nobody").wait_for(timeout=60_000)
        browser.close()
    assert errors == []


def test_a_load_test_of_a_pool_that_runs(pool, tmp_path):
    """bench/load.py: both ways in, open and closed, with a report."""
    report = tmp_path / "load.md"
    printed = run(
        pool,
        *(sys.executable, str(ROOT / "bench/load.py"), "--output", str(report)),
        *("--url", pool.url, "--gateway", pool.gateway, "--model", MODEL),
        *("--rates", "8", "--users", "2", "--duration", "1", "--limit-tokens", "8"),
        status=(0, 1),
    )
    found = json.loads(printed.splitlines()[-1])
    # On a busy machine it may send late, and says so.
    assert all(" late" in problem for problem in found["problems"])
    seen = {(step["side"], step["mode"]) for step in found["steps"]}
    assert seen == {(s, m) for s in ("client", "gateway") for m in ("open", "closed")}
    for step in found["steps"]:
        figures = step["figures"]
        assert figures["requests"] >= 2
        assert figures["failed"] == 0
        assert 0 < figures["ttft_ms_p50"] <= figures["ttft_ms_p99"]
        assert figures["ttft_ms_p50"] <= figures["total_ms_p50"]
    text = report.read_text("utf-8")
    assert "## Open loop" in text
    assert "Not measured: the pool is not this run's own." in text
    plots = {path.name for path in tmp_path.glob("*.svg")}
    kinds = [f"{m}-{p}" for m in ("open", "closed") for p in ("ttft", "rate")]
    assert {f"load-{kind}.svg" for kind in kinds} <= plots
    assert all(f"]({name})" in text for name in plots)
    # Problems stand in the report, too, for whoever reads nothing else.
    assert all(f"- {problem}" in text for problem in found["problems"])


def test_locust_drives_a_gateway(pool, tmp_path):
    if importlib.util.find_spec("locust") is None:  # importing it patches sockets
        pytest.skip("locust is not installed: extra [bench]")
    stem, users = tmp_path / "users", 4
    done = subprocess.run(
        [
            *(sys.executable, "-m", "locust", "-f", str(ROOT / "bench/locustfile.py")),
            *("--headless", "-u", str(users), "-r", str(users), "-t", "4s"),
            *("-H", pool.gateway),
            *("--csv", str(stem), "--exit-code-on-error", "1"),
        ],
        env={
            **pool.env,
            "TOKENMILL_BENCH_MODEL": MODEL,
            "TOKENMILL_BENCH_MAX_TOKENS": "8",
            "TOKENMILL_BENCH_PAUSE_S": "0.4",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = (tmp_path / "users_stats.csv").read_text("utf-8").splitlines()[1:]
    counts = {tuple(row.split(",")[:2]): int(row.split(",")[2]) for row in rows}
    streamed = counts["POST", "/v1/completions (stream)"]
    assert streamed >= 2
    # The end of the run may cut each user's stream after its first text.
    assert streamed <= counts["TTFT", "/v1/completions"] <= streamed + users
    failed = {row.split(",")[3] for row in rows}
    assert failed == {"0"}, rows
