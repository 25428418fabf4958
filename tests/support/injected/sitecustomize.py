"""Faults for worker processes under test. Python loads this at their start when this
directory is on PYTHONPATH; the product knows nothing of it.

STEP_DELAY_MS makes each step that much longer. HOLD_FILE names a file that, while it is
there, lets nobody go on once a prompt has its tokens (`FaultPool.held`). POISON=1 makes
a step hang, or end the process, while a prompt with one of the marks below is in the
engine. CRASH_AT_LOAD names a version of a model whose workers are killed as they start.
RANK_FAULT makes the first step of every follower of a split model raise, or hang.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

HANGS = b"<hang>"
KILLS = b"<kill>"
CRASHES = b"<crash>"


class Injected:
    """An engine around the real one."""

    def __init__(self, engine):
        self._engine = engine
        self._prompts = {}
        self._made = {}
        self._hold_file = Path(os.environ.get("HOLD_FILE", "/dev/null"))
        self._delay_s = float(os.environ.get("STEP_DELAY_MS", "0")) / 1000.0
        self._poison = os.environ.get("POISON") == "1"

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def add(self, request):
        self._engine.add(request)
        ids = [one for one in request.token_ids if one < 256]
        self._prompts[request.id] = bytes(ids)

    def cancel(self, request_id):
        self._forget(request_id)
        return self._engine.cancel(request_id)

    def step(self):
        if self._poison:
            for prompt in self._prompts.values():
                _suffer(prompt)
        while self._is_held():
            time.sleep(0.005)
        time.sleep(self._delay_s)
        output = self._engine.step()
        for delta in output.deltas:
            if delta.choice == 0 and delta.request_id in self._prompts:
                self._made[delta.request_id] = delta.offset + len(delta.token_ids)
        for finished in output.finished:
            self._forget(finished.request_id)
        return output

    def _forget(self, request_id):
        self._prompts.pop(request_id, None)
        self._made.pop(request_id, None)

    def _is_held(self):
        try:
            words = self._hold_file.read_text().split()
        except FileNotFoundError:
            return False
        if not words:
            return False
        mark, tokens, requests = words[0].encode(), int(words[1]), int(words[2])
        made = [n for name, n in self._made.items() if mark in self._prompts[name]]
        return len(self._prompts) >= requests and max(made, default=0) >= tokens


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
