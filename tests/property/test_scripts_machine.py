"""Random interleavings of every script by several owners, zombies included.

A longer run, by steps and examples: `TOKENMILL_TEST_LONG=1`.
"""

import json
import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.loop_machine import LoopMachine
from support.servers import RedisServer
from support.shard_client import HOUR_MS, KEYS, Shard, delta, group_info, new_job
from support.shard_model import Grant, LossCount, fits, held_by, waiting
from support.shard_truth import ShardTruth

from tokenmill import Client
from tokenmill.shared.errors import QueueFull
from tokenmill.shared.keys import JobId
from tokenmill.shared.lifecycle import TERMINAL
from tokenmill.shared.messages import Usage
from tokenmill.shared.scripts import EmitItem, Limits, NewJob

GROUPS = ("g1", "g2")
ROOM = {"total_blocks": 8, "max_running": 3, "batch_tokens": 100}
MOST_WAITING, MOST_OF_TENANT = 12, 8
LONG = os.environ.get("TOKENMILL_TEST_LONG") == "1"
picks = st.integers(0, 1000)


class ScriptMachine(LoopMachine):
    def __init__(self) -> None:
        super().__init__()
        self.shard = Shard(self.client)
        self.truth = ShardTruth(self.reader, KEYS)
        self.mill = Client(self.url)
        self.made: list[NewJob] = []
        self.ids: list[str] = []
        self.jobs: dict[str, dict[str, str]] = {}
        self.grants: list[Grant] = []
        self.by_key: dict[str, str] = {}
        self.losses = LossCount()

    def teardown(self) -> None:
        self.do(self.mill.close())
        super().teardown()

    def new_id(self) -> JobId:
        # Counted, not random: Hypothesis replays examples and must see the same.
        return JobId(KEYS.model, KEYS.partition, f"{len(self.made):016d}")

    def add(self, job: NewJob) -> None:
        self.made.append(job)
        self.ids.append(str(job.id))

    def pick(self, number: int) -> str:
        return self.ids[number % len(self.ids)]

    def grant(self, number: int) -> Grant:
        # Live ones most of the time: interleavings should get somewhere.
        live = [grant for grant in self.grants if grant.is_held(self.jobs)]
        among = live if live and number % 4 else self.grants
        return among[number % len(among)]

    def holds(self, grant: Grant) -> bool:
        return grant.is_held(self.jobs)

    @initialize(most_alone=st.sampled_from([1, 2]))
    def begin(self, most_alone) -> None:
        self.most_alone = most_alone
        self.do(self.shard.open(*GROUPS, **ROOM))
        self.do(self.mill.open())
        limits = Limits(
            max_waiting_jobs=MOST_WAITING, tenant_waiting_jobs=MOST_OF_TENANT
        )
        self.do(self.shard.scripts.write_limits(limits))
        self.jobs = self.truth.check()

    @invariant()
    def everything_holds(self) -> None:
        self.jobs = self.truth.check()
        self.losses.check(self.jobs)
        for job in self.made:
            assert self.jobs[str(job.id)].get("version") == job.version

    @rule(
        job_class=st.sampled_from(["interactive", "bulk"]),
        tenant=st.sampled_from(["default", "other"]),
        deadline_ms=st.sampled_from([None, 2 * HOUR_MS]),
        delay_ms=st.sampled_from([0, 0, HOUR_MS]),
        key=st.sampled_from([None, None, "k1", "k2"]),
        tokens=st.integers(1, 40),
        webhook=st.sampled_from([None, None, "https://example.com/hook"]),
        version=st.sampled_from([None, None, "v2"]),
    )
    def enqueue(self, job_class, tenant, deadline_ms, delay_ms, key, **more) -> None:
        job = new_job(
            id=self.new_id(),
            job_class=job_class,
            tenant=tenant,
            deadline_ms=deadline_ms,
            delay_ms=delay_ms,
            idempotency_key=key,
            **more,
        )
        full = self.is_full(tenant, job_class)
        replies = self.do(self.shard.scripts.enqueue([job, job]))
        first = self.by_key.get(f"{tenant} {key}") if key else None
        statuses = [reply.status for reply in replies]
        if first is None and full:
            assert statuses == ["full", "full"]
            return
        expected = first or str(job.id)
        assert [reply.job_id for reply in replies] == [expected, expected]
        assert statuses == ["duplicate" if first else "queued", "duplicate"]
        if not first:
            self.add(job)
            if key:
                self.by_key[f"{tenant} {key}"] = expected
                name = KEYS.idempotency(tenant, key)
                assert self.reader.get(name).split()[0] == expected

    def is_full(self, tenant: str, job_class: str) -> bool:
        """Whether a limit is reached, of which bulk leaves a quarter to others."""
        share = 0.75 if job_class == "bulk" else 1.0
        return (
            waiting(self.jobs) >= share * MOST_WAITING
            or waiting(self.jobs, tenant) >= share * MOST_OF_TENANT
        )

    @rule(
        group=st.sampled_from(GROUPS),
        emits=st.integers(0, 2),
        key=st.booleans(),
        alone=st.booleans(),
        choices=st.sampled_from([1, 2]),
        job_class=st.sampled_from(["interactive", "bulk"]),
    )
    def run_new(self, group, emits, key, job_class, **how) -> None:
        job = new_job(
            id=self.new_id(),
            job_class=job_class,
            idempotency_key=f"run{len(self.made)}" if key else None,
        )
        full = self.is_full("default", job_class)
        (reply,) = self.do(self.shard.scripts.enqueue([job]))
        assert reply.status == ("full" if full else "queued")
        if full:
            return
        self.add(job)
        self.jobs = self.truth.check()
        item = {"tokens": 12, "cost_blocks": 1, **how}
        goes = fits(ROOM, self.jobs, group, item, job_class)
        dispatched = self.do(self.shard.dispatch(str(job.id), group, **item))
        self.jobs = self.truth.check()
        if goes:
            assert dispatched.status == "dispatched"
            grant = Grant(str(job.id), group, dispatched.epoch, how["choices"])
            self.grants.append(grant)
            self.start_one(grant)
            for number in range(emits):
                self.jobs = self.truth.check()
                self.emit_one(grant, False, number)
        else:
            assert dispatched.status == "no_credit"

    @precondition(lambda self: self.made)
    @rule(number=picks, kind=st.sampled_from(["cancel", "reject", "again"]))
    def ask(self, number, kind) -> None:
        if kind == "cancel":
            self.cancel(number)
        elif kind == "reject":
            self.reject(number, ("failed", "expired")[number % 2])
        else:
            self.enqueue_again(number)

    def enqueue_again(self, number) -> None:
        job = self.made[number % len(self.made)]
        (reply,) = self.do(self.shard.scripts.enqueue([job]))
        assert (reply.status, reply.job_id) == ("duplicate", str(job.id))

    @precondition(lambda self: self.made)
    @rule(
        number=picks,
        group=st.sampled_from(GROUPS),
        tokens=st.integers(1, 150),
        cost_blocks=st.integers(1, 4),
        choices=st.sampled_from([1, 1, 1, 2, 5]),
        alone=st.sampled_from([False, False, True]),
        stale=st.sampled_from([False, False, False, True]),
        starts=st.booleans(),
    )
    def dispatch(self, number, group, stale, starts, **item) -> None:
        ready = [j for j, job in self.jobs.items() if job["state"] == "queued"]
        job_id = ready[number % len(ready)] if ready else self.pick(number)
        job = self.jobs[job_id]
        goes = fits(ROOM, self.jobs, group, item, job["class"])
        self.shard.fence -= stale
        reply = self.do(self.shard.dispatch(job_id, group, **item))
        self.shard.fence += stale
        if stale:
            assert reply.status == "fenced"
        elif not ready:
            assert reply.status in ("gone", "cancelled", "expired")
        elif not goes:
            assert reply.status == "no_credit"
        else:
            assert reply.status == "dispatched"
            assert reply.epoch > int(job["epoch"])
            self.grants.append(Grant(job_id, group, reply.epoch, item["choices"]))
            if starts:
                self.jobs = self.truth.check()
                self.start_one(self.grants[-1])

    @precondition(lambda self: self.grants)
    @rule(number=picks)
    def start(self, number) -> None:
        self.start_one(self.grant(number))

    def start_one(self, grant: Grant) -> None:
        held, job = self.holds(grant), self.jobs[grant.job_id]
        started = self.do(self.shard.start(grant.job_id, grant.epoch, grant.group))
        if not held:
            assert started.status in ("lost", "cancelled")
        elif job.get("cancel") == "1":
            assert started.status == "cancelled"
        else:
            assert started.status == "started"
            assert started.payload == b'{"text":"hello"}'
            assert started.seed == 2**63 - 1
            said: dict[int, list[int]] = {}
            for line in map(json.loads, started.log):
                said.setdefault(line.get("choice", 0), []).extend(line["token_ids"])
            assert all(ids == list(range(len(ids))) for ids in said.values())
            if grant.seq == 0:
                numbers = range(max(grant.choices, *said, 0) + 1)
                grant.offsets = [len(said.get(c, ())) for c in numbers]

    @precondition(lambda self: self.grants)
    @rule(number=picks, repeat=st.booleans())
    def emit(self, number, repeat) -> None:
        self.emit_one(self.grant(number), repeat, number)

    def emit_one(self, grant: Grant, repeat: bool, number: int = 0) -> None:
        running = self.holds(grant) and self.jobs[grant.job_id]["state"] == "running"
        repeat = repeat and grant.seq > 0
        seq = grant.seq if repeat else grant.seq + 1
        # Two deltas in one call: the second must see what the first has changed.
        choice = number % grant.choices
        offset = grant.offsets[choice]
        items = [
            EmitItem(grant.job_id, grant.epoch, seq + i, delta(offset + i, 1, choice))
            for i in range(1 if repeat else 2)
        ]
        statuses = self.do(self.shard.scripts.emit(group=grant.group, items=items))
        if not running:
            assert set(statuses) == {"lost"}
        elif repeat:
            assert statuses == ["duplicate"]
        else:
            cancelled = self.jobs[grant.job_id].get("cancel") == "1"
            assert statuses == ["cancelled" if cancelled else "written"] * 2
            grant.seq = seq + 1
            grant.offsets[choice] += 2

    @precondition(lambda self: self.grants)
    @rule(
        number=picks,
        way=st.sampled_from(["finish", "fail", "renew", "release"]),
        state=st.sampled_from(["succeeded", "failed", "cancelled", "expired"]),
        max_attempts=st.integers(1, 3),
        tells=st.booleans(),
    )
    def owner_sends(self, number, way, state, max_attempts, tells) -> None:
        # One rule for all: jobs should live long enough to meet something.
        grant = self.grant(number)
        if way == "finish":
            self.finish(grant, state, self.usage(grant) if tells else None)
        elif way == "fail":
            self.fail(grant, max_attempts, self.usage(grant) if tells else None)
        elif way == "renew":
            self.renew(grant)
        else:
            self.release(grant)

    def usage(self, grant) -> Usage:
        """What an owner tells; more than the log holds, as what it holds back."""
        return Usage(prompt_tokens=7, completion_tokens=sum(grant.offsets) + 3)

    def finish(self, grant, state, usage) -> None:
        held, before = self.holds(grant), self.jobs[grant.job_id]["state"]
        status = self.do(
            self.shard.finish(
                grant.job_id, grant.epoch, grant.seq + 1, state, grant.group, usage
            )
        )
        if held and not (before == "dispatched" and state == "succeeded"):
            assert status == "recorded"
            grant.finished = True
        else:
            assert status == ("duplicate" if grant.finished else "lost")

    def fail(self, grant, max_attempts, usage) -> None:
        job = self.jobs[grant.job_id]
        running = self.holds(grant) and job["state"] == "running"
        status = self.do(
            self.shard.fail(grant.job_id, grant.epoch, max_attempts, grant.group, usage)
        )
        if not running:
            assert status == "lost"
        elif job.get("cancel") == "1":
            assert status == "cancelled"
        else:
            last = int(job.get("attempts", 0)) + 1 >= max_attempts
            assert status == ("failed" if last else "retrying")

    def renew(self, grant) -> None:
        (status,) = self.do(
            self.shard.scripts.renew(
                group=grant.group,
                lease_ms=HOUR_MS,
                jobs=[(grant.job_id, grant.epoch)],
            )
        )
        assert (status != "lost") == self.holds(grant)

    def release(self, grant) -> None:
        held = self.holds(grant)
        found = self.do(
            self.shard.scripts.release(
                group=grant.group, jobs=[(grant.job_id, grant.epoch)]
            )
        )
        assert found == [held]

    def cancel(self, number) -> None:
        job_id = self.pick(number)
        before = self.jobs[job_id]["state"]
        status = self.do(self.shard.scripts.cancel(job_id))
        if before in TERMINAL:
            assert status == before
        else:
            assert status == ("cancelling" if before == "running" else "cancelled")

    def reject(self, number, state) -> None:
        job_id = self.pick(number)
        queued = self.jobs[job_id]["state"] == "queued"
        result = json.dumps({"id": job_id, "state": state}).encode()
        done = self.do(
            self.shard.scripts.reject(
                fence=self.shard.fence,
                job_id=job_id,
                state=state,
                result=result,
                end=json.dumps({"end": {"state": state}}).encode(),
            )
        )
        assert done == queued

    @precondition(lambda self: self.made)
    @rule(
        number=picks,
        which=st.sampled_from(["lease", "lease", "lease", "delayed", "deadline"]),
    )
    def time_passes(self, number, which) -> None:
        zset = getattr(KEYS, which)
        members = sorted(self.reader.zrange(zset, 0, -1))
        running = [j for j in members if self.jobs[j]["state"] == "running"]
        members = running if running and number % 4 else members
        if members:
            job_id = members[number % len(members)]
            self.do(self.shard.overdue(zset, job_id))
            if which == "lease" and self.jobs[job_id].get("cancel") != "1":
                self.losses.note(job_id, self.jobs[job_id])
        self.do(self.shard.reap(self.most_alone))
        assert not self.reader.zrangebyscore(zset, 0, 1)

    @rule(
        group=st.sampled_from(GROUPS),
        kind=st.sampled_from(["heartbeat", "comes_back", "dies", "is_stopped"]),
    )
    def group_changes(self, group, kind) -> None:
        if kind in ("dies", "is_stopped"):
            self.group_ends(group, counts=kind == "dies")
        self.heartbeat(group, expired=kind == "comes_back")

    def group_ends(self, group, counts) -> None:
        held = held_by(self.jobs, group)
        ended = self.do(self.shard.scripts.forfeit(group, "a test", counts=counts))
        assert ended == len(held)
        assert not self.reader.exists(KEYS.group(group))
        report = self.do(self.shard.reap(self.most_alone))
        assert report.redelivered + report.dead + report.cancelled == len(held)
        for job_id in held:
            if counts and self.jobs[job_id].get("cancel") != "1":
                self.losses.note(job_id, self.jobs[job_id])

    @precondition(lambda self: self.reader.xlen(KEYS.dead))
    @rule(number=picks, purges=st.booleans())
    def dead(self, number, purges) -> None:
        letters = self.do(self.mill.dead_letters())
        letter = letters[number % len(letters)]
        if purges:
            assert self.do(self.mill.purge(letter.id)) == 1
            return
        dead = self.jobs[letter.id]
        is_full = self.is_full(dead["tenant"], dead["class"])
        if letter.requeued_as is None and is_full:
            with pytest.raises(QueueFull):
                self.do(self.mill.requeue(letter.id))
            return
        (made,) = self.do(self.mill.requeue(letter.id))
        assert letter.requeued_as in (None, made.job)
        if letter.requeued_as is None:
            assert made.job not in self.ids
            self.ids.append(made.job)

    def heartbeat(self, group, expired) -> None:
        if expired:
            self.reader.delete(KEYS.group(group))
        info = group_info(group, **ROOM)
        assert self.do(self.shard.scripts.heartbeat(group, info, HOUR_MS)) > 0
        assert self.reader.exists(KEYS.group(group))


@pytest.mark.timeout(3600 if LONG else 300)
def test_every_interleaving_keeps_the_shard_consistent(
    redis_server: RedisServer,
) -> None:
    ScriptMachine.url = redis_server.url
    run_state_machine_as_test(
        ScriptMachine,
        settings=settings(
            max_examples=400 if LONG else 14,
            stateful_step_count=120 if LONG else 50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
