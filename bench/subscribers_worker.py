"""The worker of bench/subscribers.py: echo, and the time at which each step ended.

    subscribers_worker.py URL STEP_MS FILE

It is the worker as `tokenmill work --engine echo:STEP_MS` runs it; only its engine is
wrapped. On SIGTERM it writes, by job, the monotonic time of each token to FILE.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

from tokenmill.shared.config import ModelConfig
from tokenmill.shared.config_load import load_config
from tokenmill.shared.logging import configure
from tokenmill.workers import echo
from tokenmill.workers.echo import EchoEngine
from tokenmill.workers.engine.request import StepOutput
from tokenmill.workers.service import WorkOptions, serve

TIMES: dict[str, list[float]] = {}


class TimedEcho(EchoEngine):
    """Echo that remembers when it had each token."""

    def step(self) -> StepOutput:
        """One step, and the time of its end."""
        output = super().step()
        now = time.monotonic()
        for delta in output.deltas:
            # The engine's id of a job is its id and epoch.
            times = TIMES.setdefault(delta.request_id.partition("@")[0], [])
            times += [now] * len(delta.token_ids)
        return output


def main() -> int:
    """Serves until SIGTERM, then writes the times."""
    url, step_ms, file = sys.argv[1:]
    vars(echo)["EchoEngine"] = TimedEcho
    options = WorkOptions(
        url=url, model=ModelConfig(name="echo"), engine=f"echo:{step_ms}"
    )
    config = load_config().config
    configure(config.log, "worker")
    code = asyncio.run(serve(options, config, lambda *_: None, lambda *_: None))
    Path(file).write_text(json.dumps(TIMES), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
