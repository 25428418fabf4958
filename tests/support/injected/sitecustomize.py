"""Faults for worker processes under test. Python loads this at their start when this
directory is on PYTHONPATH; the product knows nothing of it.

STEP_DELAY_MS makes each step that much longer. POISON=1 makes a step hang, or end the
process, while a prompt with one of the marks below is in the engine. CRASH_AT_LOAD
names a version of a model whose workers are killed as they start. RANK_FAULT makes the
first step of every follower of a split model raise, or hang.
"""

import ctypes
import os
import signal
import sys
import time

HANGS = b"<hang>"
KILLS = b"<kill>"
CRASHES = b"<crash>"


class Injected:
    """An engine around the real one."""

    def __init__(self, engine):
        self._engine = engine
        self._prompts = {}
        self._delay_s = float(os.environ.get("STEP_DELAY_MS", "0")) / 1000.0
        self._poison = os.environ.get("POISON") == "1"

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def add(self, request):
        self._engine.add(request)
        ids = [one for one in request.token_ids if one < 256]
        self._prompts[request.id] = bytes(ids)

    def cancel(self, request_id):
        self._prompts.pop(request_id, None)
        return self._engine.cancel(request_id)

    def step(self):
        if self._poison:
            for prompt in self._prompts.values():
                _suffer(prompt)
        time.sleep(self._delay_s)
        output = self._engine.step()
        for finished in output.finished:
            self._prompts.pop(finished.request_id, None)
        return output


def _suffer(prompt):
    if HANGS in prompt:
        time.sleep(3600)
    elif KILLS in prompt:
        os.kill(os.getpid(), signal.SIGKILL)
    elif CRASHES in prompt:
        ctypes.string_at(0)


def _inject():
    from tokenmill.workers.engine_thread import EngineThread

    made = EngineThread.__init__

    def with_faults(self, engine, *arguments, **options):
        made(self, Injected(engine), *arguments, **options)

    EngineThread.__init__ = with_faults


def _inject_into_rank(fault):
    from tokenmill.workers.engine.parallel import runner

    def follow_badly(_runner, communicator):
        communicator.broadcast_bytes()
        if fault == "hang":
            time.sleep(3600)
        raise MemoryError(f"injected: {fault}")

    runner.follow = follow_badly


if any("rank_process" in one for one in sys.orig_argv) and "RANK_FAULT" in os.environ:
    _inject_into_rank(os.environ["RANK_FAULT"])
if "work" in sys.orig_argv and os.environ.get("CRASH_AT_LOAD") in sys.orig_argv:
    os.kill(os.getpid(), signal.SIGKILL)
if "work" in sys.orig_argv and {"STEP_DELAY_MS", "POISON"} & os.environ.keys():
    _inject()
