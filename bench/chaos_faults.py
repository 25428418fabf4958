"""Does to a pool what the plan says."""

import random
import time

import redis
from chaos_ledger import Blow, Ledger
from chaos_plan import Fault
from chaos_pool import Part
from chaos_run import Pool
from chaos_truth import KEYS, connect

PATIENCE_S = 1.5
"""Longest wait for a worker to have jobs before it is hit."""
_ERRORS = (redis.RedisError, OSError)


class Injector:
    """Applies faults and writes them into the ledger.

    Args:
        pool: What is hurt.
        ledger: What was done.
    """

    def __init__(self, pool: Pool, ledger: Ledger) -> None:
        self._pool = pool
        self._ledger = ledger

    def apply(self, fault: Fault) -> None:
        """Does one fault, or notes that there was nothing to do it to."""
        what, _, how = fault.kind.partition(".")
        if what == "proxy":
            self._pool.proxy.drop() if how == "drop" else self._pool.proxy.freeze(
                fault.for_s
            )
            self._note(Blow(fault.kind, time.time()))
        elif what == "connections":
            self._cut(fault)
        else:
            self._hit(fault, what, how)

    def _hit(self, fault: Fault, what: str, how: str) -> None:
        part, index = self._part(what, fault.target)
        if what == "worker" and not self._pool.serves(index):
            # It still loads: hit again and again, it would never work.
            self._ledger.skipped[fault.kind] += 1
            return
        held = self._held_soon(index) if what == "worker" else ()
        away_s = fault.for_s if what == "redis" else 0.5
        done = (
            part.stop(fault.for_s)
            if how == "stop"
            else part.kill(away_s)
            if how == "kill"
            else part.term(away_s)
        )
        if not done:
            self._ledger.skipped[fault.kind] += 1
            return
        subscriber = index if what == "subscriber" else None
        self._note(Blow(fault.kind, time.time(), subscriber, held))

    def _note(self, blow: Blow) -> None:
        self._ledger.blows.append(blow)
        held = f", {len(blow.held)} jobs held" if blow.held else ""
        print(f"{time.strftime('%H:%M:%S')}  {blow.kind}{held}", flush=True)

    def _part(self, what: str, target: int) -> tuple[Part, int]:
        if what in ("scheduler", "standby"):
            index = self._pool.active_scheduler()
            if what == "standby":
                index = (index + 1) % len(self._pool.schedulers)
            return self._pool.schedulers[index], index
        group = {
            "worker": self._pool.workers,
            "subscriber": self._pool.subscribers,
            "producer": self._pool.producers[1:],  # those with idempotency keys
            "redis": [self._pool.redis],
        }[what]
        index = target % len(group)
        if what == "worker" and not self._pool.serves(index):
            index = (index + 1) % len(group)
        return group[index], index

    def _held_soon(self, worker: int) -> tuple[str, ...]:
        """The same, once there are some: a worker is best hit while it works."""
        end = time.monotonic() + PATIENCE_S
        while not (held := self._held(worker)) and time.monotonic() < end:
            self._pool.tick()
            time.sleep(0.05)
        return held

    def _held(self, worker: int) -> tuple[str, ...]:
        """Ids of the jobs that a worker's present incarnation holds."""
        group = self._pool.group_of(worker)
        try:
            with connect(self._pool.port) as client:
                ids = client.zrange(KEYS.lease, 0, -1)
                pipe = client.pipeline(transaction=False)
                for job_id in ids:
                    pipe.hget(KEYS.job(job_id), "owner")
                owners = pipe.execute()
        except _ERRORS:
            return ()  # Redis is away as well: nobody can say
        return tuple(i for i, o in zip(ids, owners, strict=True) if o == group)

    def _cut(self, fault: Fault) -> None:
        """CLIENT KILL of a third of all connections."""
        rng = random.Random(fault.target)
        killed = 0
        try:
            with connect(self._pool.port) as client:
                mine = client.client_id()
                ids = [int(c["id"]) for c in client.client_list()]
                for number in sorted(set(ids) - {mine}):
                    if rng.random() < 1 / 3:
                        killed += int(client.client_kill_filter(_id=str(number)) or 0)
        except _ERRORS:
            killed = 0
        if killed:
            self._note(Blow(fault.kind, time.time()))
        else:
            self._ledger.skipped[fault.kind] += 1
