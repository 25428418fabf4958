"""Random interleavings of every script by several owners, zombies included."""

import asyncio
import json

import pytest
import redis
import redis.asyncio
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.servers import RedisServer
from support.shard_client import (
    HOUR_MS,
    KEYS,
    Shard,
    delta,
    group_info,
    new_job,
)
from support.shard_truth import ShardTruth

from tokenmill.shared.keys import JobId
from tokenmill.shared.lifecycle import ACTIVE, TERMINAL
from tokenmill.shared.scripts import EmitItem, NewJob

GROUPS = ("g1", "g2")
ROOM = {"total_blocks": 8, "max_running": 3, "batch_tokens": 100}
MOST_LOSSES = 3
picks = st.integers(0, 1000)


class Grant:
    """A dispatch that some group once received; it may long be out of date."""

    def __init__(self, job_id: str, group: str, epoch: int) -> None:
        self.job_id, self.group, self.epoch = job_id, group, epoch
        self.seq, self.offset = 0, 0
        self.finished = False


class ScriptMachine(RuleBasedStateMachine):
    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.client = redis.asyncio.Redis.from_url(self.url)
        self.reader = redis.Redis.from_url(self.url, decode_responses=True)
        self.reader.flushall()
        self.shard = Shard(self.client)
        self.truth = ShardTruth(self.reader, KEYS)
        self.made: list[NewJob] = []
        self.jobs: dict[str, dict[str, str]] = {}
        self.grants: list[Grant] = []
        self.by_key: dict[str, str] = {}

    def teardown(self) -> None:
        self.loop.run_until_complete(self.client.aclose())
        self.loop.close()
        self.reader.close()

    def new_id(self) -> JobId:
        # Counted, not random: Hypothesis replays examples and must see the same.
        return JobId(KEYS.model, KEYS.partition, f"{len(self.made):016d}")

    def do(self, call):
        return self.loop.run_until_complete(call)

    def pick(self, number: int) -> str:
        return str(self.made[number % len(self.made)].id)

    def grant(self, number: int) -> Grant:
        # Live ones most of the time: interleavings should get somewhere.
        live = [grant for grant in self.grants if self.holds(grant)]
        among = live if live and number % 4 else self.grants
        return among[number % len(among)]

    def holds(self, grant: Grant) -> bool:
        job = self.jobs[grant.job_id]
        return (
            job["state"] in ACTIVE
            and job["owner"] == grant.group
            and job["epoch"] == str(grant.epoch)
        )

    @initialize()
    def begin(self) -> None:
        self.do(self.shard.open(*GROUPS, **ROOM))
        self.jobs = self.truth.check()

    @invariant()
    def everything_holds(self) -> None:
        self.jobs = self.truth.check()

    @rule(
        job_class=st.sampled_from(["interactive", "bulk"]),
        tenant=st.sampled_from(["default", "other"]),
        deadline_ms=st.sampled_from([None, HOUR_MS]),
        delay_ms=st.sampled_from([0, 0, HOUR_MS]),
        key=st.sampled_from([None, None, "k1", "k2"]),
        tokens=st.integers(1, 40),
    )
    def enqueue(self, job_class, tenant, deadline_ms, delay_ms, key, tokens) -> None:
        job = new_job(
            id=self.new_id(),
            job_class=job_class,
            tenant=tenant,
            deadline_ms=deadline_ms,
            delay_ms=delay_ms,
            idempotency_key=key,
            tokens=tokens,
        )
        replies = self.do(self.shard.scripts.enqueue([job, job]))
        first = self.by_key.get(f"{tenant} {key}") if key else None
        expected = first or str(job.id)
        assert [r.job_id for r in replies] == [expected, expected]
        assert [r.status for r in replies] == [
            "duplicate" if first else "queued",
            "duplicate",
        ]
        if not first:
            self.made.append(job)
            self.by_key[f"{tenant} {key}"] = expected

    @rule(group=st.sampled_from(GROUPS), emits=st.integers(0, 2), key=st.booleans())
    def run_new(self, group, emits, key) -> None:
        job = new_job(
            id=self.new_id(), idempotency_key=f"run{len(self.made)}" if key else None
        )
        (reply,) = self.do(self.shard.scripts.enqueue([job]))
        assert reply.status == "queued"
        self.made.append(job)
        self.jobs = self.truth.check()
        dispatched = self.do(self.shard.dispatch(str(job.id), group, cost_blocks=1))
        self.jobs = self.truth.check()
        if dispatched.status == "dispatched":
            self.grants.append(Grant(str(job.id), group, dispatched.epoch))
            self.start_one(self.grants[-1])
            for _ in range(emits):
                self.jobs = self.truth.check()
                self.emit_one(self.grants[-1], repeat=False)
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
        stale=st.sampled_from([False, False, False, True]),
    )
    def dispatch(self, number, group, tokens, cost_blocks, choices, stale) -> None:
        waiting = [j for j, job in self.jobs.items() if job["state"] == "queued"]
        job_id = waiting[number % len(waiting)] if waiting else self.pick(number)
        self.shard.fence -= stale
        reply = self.do(
            self.shard.dispatch(
                job_id,
                group,
                tokens=tokens,
                cost_blocks=cost_blocks,
                choices=choices,
            )
        )
        self.shard.fence += stale
        if stale:
            assert reply.status == "fenced"
        elif not waiting:
            assert reply.status in ("gone", "cancelled", "expired")
        elif reply.status == "dispatched":
            assert reply.epoch > int(self.jobs[job_id]["epoch"])
            self.grants.append(Grant(job_id, group, reply.epoch))
        else:
            assert reply.status in ("no_credit", "expired")

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
            tokens = [t for d in started.log for t in json.loads(d)["token_ids"]]
            assert tokens == list(range(len(tokens)))
            if grant.seq == 0:
                grant.offset = len(tokens)

    @precondition(lambda self: self.grants)
    @rule(number=picks, repeat=st.booleans())
    def emit(self, number, repeat) -> None:
        self.emit_one(self.grant(number), repeat)

    def emit_one(self, grant: Grant, repeat: bool) -> None:
        running = self.holds(grant) and self.jobs[grant.job_id]["state"] == "running"
        repeat = repeat and grant.seq > 0
        seq = grant.seq if repeat else grant.seq + 1
        # Two deltas in one call: the second must see what the first has changed.
        items = [
            EmitItem(grant.job_id, grant.epoch, seq + i, delta(grant.offset + i))
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
            grant.seq, grant.offset = seq + 1, grant.offset + 2

    @precondition(lambda self: self.grants)
    @rule(
        number=picks,
        state=st.sampled_from(["succeeded", "failed", "cancelled", "expired"]),
    )
    def finish(self, number, state) -> None:
        grant = self.grant(number)
        held, before = self.holds(grant), self.jobs[grant.job_id]["state"]
        status = self.do(
            self.shard.finish(
                grant.job_id, grant.epoch, grant.seq + 1, state, grant.group
            )
        )
        if held and not (before == "dispatched" and state == "succeeded"):
            assert status == "recorded"
            grant.finished = True
        else:
            assert status == ("duplicate" if grant.finished else "lost")

    @precondition(lambda self: self.grants)
    @rule(number=picks, max_attempts=st.integers(1, 3))
    def fail(self, number, max_attempts) -> None:
        grant = self.grant(number)
        job = self.jobs[grant.job_id]
        running = self.holds(grant) and job["state"] == "running"
        status = self.do(
            self.shard.fail(grant.job_id, grant.epoch, max_attempts, grant.group)
        )
        if not running:
            assert status == "lost"
        elif job.get("cancel") == "1":
            assert status == "cancelled"
        else:
            last = int(job.get("attempts", 0)) + 1 >= max_attempts
            assert status == ("failed" if last else "retrying")

    @precondition(lambda self: self.grants)
    @rule(number=picks)
    def renew(self, number) -> None:
        grant = self.grant(number)
        (status,) = self.do(
            self.shard.scripts.renew(
                group=grant.group,
                lease_ms=HOUR_MS,
                jobs=[(grant.job_id, grant.epoch)],
            )
        )
        assert (status != "lost") == self.holds(grant)

    @precondition(lambda self: self.grants)
    @rule(number=picks)
    def release(self, number) -> None:
        grant = self.grant(number)
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
        which=st.sampled_from(["lease", "lease", "delayed", "delayed", "deadline"]),
    )
    def time_passes(self, number, which) -> None:
        zset = getattr(KEYS, which)
        members = sorted(self.reader.zrange(zset, 0, -1))
        if members:
            job_id = members[number % len(members)]
            self.do(self.shard.overdue(zset, job_id))
        self.do(self.shard.reap(MOST_LOSSES))
        assert not self.reader.zrangebyscore(zset, 0, 1)

    @rule(
        group=st.sampled_from(GROUPS),
        kind=st.sampled_from(["heartbeat", "comes_back", "dies"]),
    )
    def group_changes(self, group, kind) -> None:
        if kind == "dies":
            self.group_dies(group)
        self.heartbeat(group, expired=kind == "comes_back")

    def group_dies(self, group) -> None:
        held = [
            j
            for j, job in self.jobs.items()
            if job["state"] in ACTIVE and job["owner"] == group
        ]
        assert self.do(self.shard.scripts.forfeit(group)) == len(held)
        assert not self.reader.exists(KEYS.group(group))
        report = self.do(self.shard.reap(MOST_LOSSES))
        taken = report.redelivered + report.dead + report.cancelled
        assert taken == len(held)

    def heartbeat(self, group, expired) -> None:
        if expired:
            self.reader.delete(KEYS.group(group))
        info = group_info(group, **ROOM)
        assert self.do(self.shard.scripts.heartbeat(group, info, HOUR_MS)) > 0
        assert self.reader.exists(KEYS.group(group))


@pytest.mark.timeout(300)
def test_every_interleaving_keeps_the_shard_consistent(
    redis_server: RedisServer,
) -> None:
    ScriptMachine.url = redis_server.url
    run_state_machine_as_test(
        ScriptMachine,
        settings=settings(
            max_examples=12,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
