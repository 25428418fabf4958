"""What must hold in Redis between any two script calls, recomputed from the jobs."""

import json
from collections import Counter
from typing import Any

from tokenmill.shared.keys import Keys
from tokenmill.shared.lifecycle import ACTIVE, TERMINAL, TRANSITIONS, WAITING, State
from tokenmill.shared.permanent_keys import is_permanent
from tokenmill.shared.script_types import DEAD_MS

from .shard_model import prefill_held

ALLOWED = {(before, after) for (before, _), after in TRANSITIONS.items()}
NOT_STORED = dict.fromkeys(("deadline", "idem", "entry", "entry_key"), "") | {
    "epoch": "0"
}
"""What a record leaves out where it has its default."""
PER_JOB = ("job", "in", "ids", "out", "tok")
SIZES = {
    "blocks": "total_blocks",
    "running": "max_running",
    "tokens": "batch_tokens",
}
HOUR_MS = 3_600_000
ENDINGS = ("succeeded", "failed", "cancelled", "expired")


class ShardTruth:
    """Reads a whole shard with a synchronous client and checks it.

    Args:
        client: A `redis.Redis` with decoded replies.
        keys: The shard's names.
    """

    def __init__(self, client: Any, keys: Keys) -> None:
        self.client = client
        self.keys = keys
        self.names: list[str] = []
        self.states: dict[str, State] = {}
        self.results: dict[str, str] = {}
        """Of ended jobs, as first seen: each has one, and it never changes."""

    def named(self, start: str) -> list[str]:
        """Keys of this check whose names begin so."""
        return [name for name in self.names if name.startswith(start)]

    def jobs(self) -> dict[str, dict[str, str]]:
        prefix = self.keys.prefix
        self.names = sorted(self.client.scan_iter(f"{prefix}*", count=10_000))
        start, names = len(self.keys.job("")), self.named(self.keys.job(""))
        pipe = self.client.pipeline(transaction=False)
        for name in names:
            pipe.hgetall(name)
        rows = zip(names, pipe.execute(), strict=True)
        return {name[start:]: NOT_STORED | row for name, row in rows}

    def check(self) -> dict[str, dict[str, str]]:
        """Asserts everything; returns the jobs' records."""
        jobs = self.jobs()
        self._transitions(jobs)
        self._load(jobs)
        self._credits(jobs)
        self._sets(jobs)
        self._entries(jobs)
        self._ends(jobs)
        self._logs(jobs)
        self._letters(jobs)
        self._usage(jobs)
        self._webhooks(jobs)
        self._lifetimes(jobs)
        return jobs

    def _transitions(self, jobs: dict[str, dict[str, str]]) -> None:
        for job_id, job in jobs.items():
            after = State(job["state"])
            before = self.states.get(job_id)
            if before is None:
                assert after in (State.QUEUED, State.DELAYED)
            else:
                assert before == after or (before, after) in ALLOWED, (before, after)
            self.states[job_id] = after

    def _load(self, jobs: dict[str, dict[str, str]]) -> None:
        truth: Counter[str] = Counter()
        for job in jobs.values():
            if job["state"] in WAITING:
                tokens, tenant = int(job["tokens"]), job["tenant"]
                is_later = job["state"] in (State.DELAYED, State.RETRYING)
                head = "later:" if is_later else ""
                truth.update(
                    {
                        f"{head}jobs": 1,
                        f"{head}tokens": tokens,
                        f"{head}bytes": int(job["bytes"]),
                        f"{head}class:{job['class']}:jobs": 1,
                        f"{head}class:{job['class']}:tokens": tokens,
                        f"{head}tenant:{tenant}:jobs": 1,
                        f"{head}tenant:{tenant}:tokens": tokens,
                    }
                )
        tenants = sum(name.startswith("tenant:") for name in truth) // 2
        truth.update({"tenants": tenants} if tenants else {})
        load = self.client.hgetall(self.keys.load)
        kept = {k: int(v) for k, v in load.items() if not k.startswith(("rate", "dra"))}
        assert kept == dict(truth)

    def _credits(self, jobs: dict[str, dict[str, str]]) -> None:
        for name in self.named(self.keys.group("")):
            group = self.client.hgetall(name)
            mine = [
                job
                for job in jobs.values()
                if job["state"] in ACTIVE and job["owner"] == group["group"]
            ]
            self._books(group, mine, "credit", -1)
            bulk = [job for job in mine if job["class"] == "bulk"]
            self._books(group, bulk, "bulk", 1)
            alone = [j for j, job in jobs.items() if job in mine and is_alone(job)]
            assert group["alone"] == "".join(alone)
            assert len(mine) == 1 or not alone
            self._overdrawn(group, [j for j in mine if j["class"] == "interactive"])
            assert self.client.pttl(name) > 0

    def _books(
        self, group: dict[str, str], jobs: list[dict[str, str]], kind: str, sign: int
    ) -> None:
        """Credit is the whole less what jobs hold; books of bulk what bulk holds."""
        for name, size in SIZES.items():
            whole = int(group[size]) if sign < 0 else 0
            amount = sum(held_of(job)[name] for job in jobs)
            assert int(group[f"{kind}_{name}"]) == whole + sign * amount, name

    def _overdrawn(self, group: dict[str, str], jobs: list[dict[str, str]]) -> None:
        """Interactive work takes no more than there is, as if there were no bulk; only
        what is larger than the whole does, while nothing else holds any of it.
        """
        for name, size in SIZES.items():
            amounts = [held_of(job)[name] for job in jobs if held_of(job)[name]]
            assert sum(amounts) <= int(group[size]) or len(amounts) == 1, name

    def _sets(self, jobs: dict[str, dict[str, str]]) -> None:
        def having(*states: State) -> set[str]:
            return {j for j, job in jobs.items() if job["state"] in states}

        members = {
            name: set(self.client.zrange(getattr(self.keys, name), 0, -1))
            for name in ("lease", "delayed", "deadline")
        }
        assert members["lease"] == having(*ACTIVE)
        assert members["delayed"] == having(State.DELAYED, State.RETRYING)
        assert members["deadline"] == {
            j
            for j, job in jobs.items()
            if job["deadline"] and job["state"] not in TERMINAL
        }

    def _entries(self, jobs: dict[str, dict[str, str]]) -> None:
        waiting: list[tuple[str, str, str]] = []
        filled = set()
        lanes = f"{self.keys.prefix}q:"
        for name in self.named(lanes):
            entries = self.client.xrange(name)
            waiting += [(name, entry, fields["id"]) for entry, fields in entries]
            if entries:
                filled.add(name.removeprefix(lanes))
        waiting += [
            (self.keys.resume, entry, fields["id"])
            for entry, fields in self.client.xrange(self.keys.resume)
        ]
        for _, fields in self.client.xrange(self.keys.resume):
            job = jobs[fields["id"]]
            assert fields["weights"] == job.get("weights", "")
            assert bool(fields["weights"]) == (fields["started"] == "1")
            assert ("served" in job) == ("first_ms" in job)
        assert sorted(waiting) == sorted(
            (job["entry_key"], job["entry"], j)
            for j, job in jobs.items()
            if job["state"] == State.QUEUED
        )
        assert set(self.client.zrange(self.keys.lanes, 0, -1)) == filled
        for name in self.named(self.keys.work("")):
            for entry, fields in self.client.xrange(name):
                job = jobs[fields["id"]]
                assert job["state"] == State.DISPATCHED
                assert (job["entry_key"], job["entry"]) == (name, entry)
            assert self.client.pttl(name) > 0

    def _ends(self, jobs: dict[str, dict[str, str]]) -> None:
        """Terminal jobs have one event, a result, and only keys that expire."""
        ended = Counter(f["id"] for _, f in self.client.xrange(self.keys.done))
        pipe = self.client.pipeline(transaction=False)
        for job_id, job in jobs.items():
            names = [f"{self.keys.prefix}{kind}:{job_id}" for kind in PER_JOB]
            if job["idem"]:
                names.append(self.keys.idempotency(job["tenant"], job["idem"]))
            pipe.get(self.keys.output(job_id))
            for name in names:
                pipe.pttl(name)
        replies = iter(pipe.execute())
        for job_id, job in jobs.items():
            over = job["state"] in TERMINAL
            assert ended[job_id] == (1 if over else 0)
            out = next(replies)
            assert (out is not None) == over
            if over:
                assert json.loads(out)["state"] == job["state"]
                assert self.results.setdefault(job_id, out) == out
            for _ in range(len(PER_JOB) + bool(job["idem"])):
                ttl = next(replies)
                assert ttl == -2 or (ttl > 0) == over, job_id

    def _logs(self, jobs: dict[str, dict[str, str]]) -> None:
        """Ids rise strictly, offsets have no gap or repeat, the end stands last."""
        pipe = self.client.pipeline(transaction=False)
        for job_id in jobs:
            pipe.xrange(self.keys.log(job_id))
        for (job_id, job), log in zip(jobs.items(), pipe.execute(), strict=True):
            assert log or job["state"] != State.RUNNING, job_id
            last, ended = (0, -1), False
            offsets: Counter[int] = Counter()
            for entry, fields in log:
                epoch, seq = map(int, entry.split("-"))
                assert last < (epoch, seq)
                assert epoch <= int(job["epoch"])
                assert not ended
                last = (epoch, seq)
                delta = json.loads(fields.get("d", "{}"))
                ended = "end" in delta
                if "token_ids" in delta:
                    choice = delta.get("choice", 0)
                    assert delta.get("offset", 0) == offsets[choice]
                    offsets[choice] += len(delta["token_ids"])
            if log and job["state"] in WAITING:
                assert last == (int(job["epoch"]), 0), "taken away without a fence"
            assert ended == (bool(log) and job["state"] in TERMINAL), job_id

    def _letters(self, jobs: dict[str, dict[str, str]]) -> None:
        """A dead letter's job failed, is told of once, and is kept as long as it."""
        letters = self.client.xrange(self.keys.dead)
        named = [fields["id"] for _, fields in letters]
        assert len(named) == len(set(named))
        pipe = self.client.pipeline(transaction=False)
        for job_id in named:
            assert jobs[job_id]["state"] == State.FAILED
            for kind in ("job", "in", "out"):
                pipe.pttl(f"{self.keys.prefix}{kind}:{job_id}")
        assert all(left > DEAD_MS - HOUR_MS for left in pipe.execute())

    def _usage(self, jobs: dict[str, dict[str, str]]) -> None:
        """Each ended job is counted once: what its owner told, else what was seen."""
        truth: dict[str, list[int]] = {}
        for job_id, job in jobs.items():
            if job["state"] not in TERMINAL:
                continue
            told = json.loads(self.results[job_id]).get("usage", {})
            prompt, output = int(job["tokens"]), self._tokens_in_log(job_id)
            if any(told.values()):
                prompt, output = told["prompt_tokens"], told["completion_tokens"]
            elif "started_ms" not in job:
                prompt = output = 0
            mine = truth.setdefault(job["tenant"], [0] * 6)
            mine[ENDINGS.index(job["state"])] += 1
            mine[4] += prompt
            mine[5] += output
        found: dict[str, list[int]] = {}
        for name, value in self.client.hgetall(self.keys.usage).items():
            tenant = name.partition(":")[2]
            numbers = [int(part) for part in value.split()]
            before = found.get(tenant, [0] * 6)  # a run may go on over midnight
            found[tenant] = [a + b for a, b in zip(before, numbers, strict=True)]
        assert found == truth

    def _tokens_in_log(self, job_id: str) -> int:
        reached: Counter[int] = Counter()
        for _, fields in self.client.xrange(self.keys.log(job_id)):
            delta = json.loads(fields.get("d", "{}"))
            ids = delta.get("token_ids", [])
            choice = delta.get("choice", 0)
            reached[choice] = max(reached[choice], delta.get("offset", 0) + len(ids))
        return sum(reached.values())

    def _webhooks(self, jobs: dict[str, dict[str, str]]) -> None:
        """Jobs with a webhook are noted until it is settled; their events say so."""
        wanted = {job_id for job_id, job in jobs.items() if job.get("webhook")}
        assert set(self.client.zrange(self.keys.webhooks, 0, -1)) == wanted
        for _, fields in self.client.xrange(self.keys.done):
            assert (fields.get("webhook") == "1") == (fields["id"] in wanted)

    def _lifetimes(self, jobs: dict[str, dict[str, str]]) -> None:
        """Only what is documented as permanent, and jobs that go on, never expire."""
        pipe = self.client.pipeline(transaction=False)
        for name in self.names:
            pipe.pttl(name)
        for name, left in zip(self.names, pipe.execute(), strict=True):
            if left == -1 and not is_permanent(name):
                kind, _, rest = name.removeprefix(self.keys.prefix).partition(":")
                job_id = self.client.get(name).split()[0] if kind == "idem" else rest
                assert kind in ("job", "in", "ids", "tok", "idem"), name
                assert jobs[job_id]["state"] not in TERMINAL, name


def held_of(job: dict[str, str]) -> dict[str, int]:
    """What an active job holds of its group."""
    return {
        "blocks": int(job["cost_blocks"]),
        "running": int(job["cost_running"]),
        "tokens": prefill_held(job),
    }


def is_alone(job: dict[str, str]) -> bool:
    """Whether an active job was dispatched to be alone."""
    return job["alone"] == "1"
