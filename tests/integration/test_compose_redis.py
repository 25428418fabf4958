"""deploy/redis: users by role on real servers, what each may and must not do."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis
import redis.asyncio
from support import compose
from support.composed import MODEL, Composition, composed, redis_start
from support.servers import SERVERS

from tokenmill.producer.gateway.progress import Progress
from tokenmill.scheduler.books import mend_books
from tokenmill.scheduler.housekeeping import forget_groups, mend_orphans, trim
from tokenmill.shared.config import Config
from tokenmill.shared.keys import SHARDS, JobId, Keys, new_unique
from tokenmill.shared.script_sources import load_script, script_names

ROLES = ("metrics", "producer", "gateway", "scheduler", "worker", "janitor")
FORBIDDEN_TO_ALL = (
    ("FLUSHALL",), ("FLUSHDB",), ("KEYS", "*"), ("CONFIG", "GET", "*"),
    ("CONFIG", "SET", "appendonly", "no"), ("ACL", "LIST"), ("DEBUG", "SLEEP", "0"),
    ("SHUTDOWN",), ("REPLICAOF", "NO", "ONE"), ("MONITOR",), ("SCRIPT", "FLUSH"),
    ("SWAPDB", "0", "1"), ("MIGRATE", "127.0.0.1", "1", "k", "0", "10"),
    ("CLIENT", "KILL", "ID", "1"), ("GET", "someone:elses"), ("PUBLISH", "others", "x"),
)  # fmt: skip
FORBIDDEN = {
    "metrics": [("GET", "tm:pool"), ("EVAL", "return 1", "0")],
    "producer": [
        ("HGETALL", "tm:api-keys"),
        ("GET", "tm:session:x"),
        ("XRANGE", "tm:{m:0}:work:g", "-", "+"),
        ("DEL", "tm:arq:janitor"),
        ("EVAL", "return redis.call('HGETALL', KEYS[1])", "1", "tm:api-keys"),
        ("EVAL", "return redis.call('KEYS', '*')", "0"),
        ("SCAN", "0"),
    ],
    "gateway": [
        ("SET", "arq:job:x", "y"),
        ("EVAL", "return redis.call('FLUSHALL')", "0"),
    ],
    "scheduler": [
        ("HGETALL", "tm:api-keys"),
        ("GET", "tm:session:x"),
        ("KEYS", "tm:*"),
        ("SCAN", "0"),
        ("HGETALL", "tm:bulk:{r}:run"),
    ],
    "worker": [
        ("HGETALL", "tm:api-keys"),
        ("GET", "tm:session:x"),
        ("GET", "tm:pool"),
        ("SET", "tm:pool", "{}"),
        ("XRANGE", "tm:{m:0}:q:interactive:128:0", "-", "+"),
        ("XADD", "tm:{m:0}:q:interactive:128:0", "*", "id", "x"),
        ("HGETALL", "tm:bulk:{r}:run"),
        ("HGETALL", "tm:scripts"),
        ("SCAN", "0"),
    ],
    "janitor": [("HGETALL", "tm:api-keys"), ("GET", "tm:session:x")],
}
READ_ONLY = [
    ("HSET", "tm:scripts", "enqueue", "return 1"),
    ("SET", "tm:pool", "{}"),
    ("HSET", "tm:models", "m", "{}"),
]
SCRIPTS_OF = {
    "producer": ("enqueue", "cancel", "mark_requeued", "purge_dead"),
    "scheduler": (
        "acquire_scheduler", "release_scheduler", "dispatch", "reject", "reap",
        "overdue", "leave", "dead_letter", "forfeit",
    ),
    "worker": (
        "register", "heartbeat", "leave", "start", "renew", "emit", "finish", "fail",
        "release", "forfeit",
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=SERVERS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Composition]]:
    version = request.param
    with composed(tmp_path_factory.mktemp("redis"), version) as whole:
        yield version, whole


def refusal(whole: Composition, role: str, *words: str) -> str:
    """What the server says to a role, or nothing when it obeys."""
    with redis.Redis.from_url(whole.url(role)) as client:
        try:
            client.execute_command(*words)
        except redis.RedisError as error:
            return str(error)
    return ""


def is_denied(said: str) -> bool:
    return bool(
        re.search(r"(?i)no permissions|NOPERM|can't (access|run)|not allowed", said)
    )


def test_nobody_gets_in_without_a_role(server):
    _, whole = server
    for options in ({}, {"username": "producer", "password": "wrong"}):
        client = redis.Redis(port=whole.redis_port, **options)
        with client, pytest.raises(redis.RedisError):
            client.ping()


@pytest.mark.parametrize("role", ROLES)
def test_a_role_cannot_do_what_it_must_not(server, role):
    _, whole = server
    for words in (*FORBIDDEN_TO_ALL, *FORBIDDEN[role]):
        assert is_denied(refusal(whole, role, *words)), (role, words)
    assert refusal(whole, role, "PING") == ""


@pytest.mark.parametrize("role", ["producer", "gateway"])
def test_what_a_role_only_reads_is_read_only_since_redis_7(server, role):
    version, whole = server
    for words in READ_ONLY:
        assert is_denied(refusal(whole, role, *words)) is (version != "6.2")
    for words in (("HGETALL", "tm:scripts"), ("GET", "tm:pool")):
        with whole.admin() as admin:
            admin.delete(words[1])
        assert refusal(whole, role, *words) == ""


def test_the_gateway_does_not_write_a_group_s_work_since_redis_7(server):
    version, whole = server
    words = ("XADD", "tm:{m:0}:work:g", "*", "id", "x")
    assert is_denied(refusal(whole, "gateway", *words)) is (version != "6.2")


@pytest.mark.parametrize("role", ROLES[1:])
def test_a_role_may_use_every_command_of_its_scripts(server, role):
    _, whole = server
    own = scripts_of(role)
    assert set(own) <= set(script_names())
    for name in own:
        source = re.sub(r"--.*", "", load_script(name).source)
        used = set(re.findall(r"redis\.p?call\(\s*'(\w+)'", source))
        missing = {c for c in used if f"+{c.lower()}" not in rules(whole, role)}
        assert not missing, (role, name, missing)


async def test_the_janitor_mends_and_trims_as_its_role(server):
    """On what there is to do: with nothing to mend, half of the commands never run."""
    _, whole = server
    keys, old = Keys(MODEL, 7), {"state": "running", "owner": "g", "attempt": "1"}
    waiting = {"state": "queued", "class": "interactive", "tenant": "t"}
    jobs = [str(JobId(MODEL, 7, new_unique())) for _ in range(2)]
    with whole.admin() as admin:
        admin.acl_log_reset()
        for job, record in zip(jobs, (old, waiting), strict=True):
            admin.hset(keys.job(job), mapping=record)
        admin.xadd(keys.resume, {"id": "other"})
        admin.xadd(keys.dead, {"id": jobs[0], "reason": "old"}, id="1000-0")
        admin.zadd(keys.groups, {"gone": 1, "g": 2**50})
        admin.hset(keys.group("g"), mapping={"running": "9"})
    async with redis.asyncio.Redis.from_url(whole.url("janitor")) as client:
        assert await mend_orphans(client, keys) == {"running": 1, "queued": 1}
        await mend_books(client, keys)
        assert await forget_groups(client, keys) == 1
        assert (await trim(client, keys))["dead_letters"] == 1
        assert await client.xlen(keys.resume) == 2
    assert whole.denied() == []


async def test_the_gateway_sees_whether_a_queue_moves_as_its_role(server):
    _, whole = server
    keys = Keys(MODEL, 8)
    with whole.admin() as admin:
        admin.acl_log_reset()
        admin.sadd(SHARDS, keys.shard)
        admin.zadd(keys.lanes, {"interactive:128:0": 1})
        admin.zadd(keys.groups, {"g": 2**50})
        room = {"running": 0, "max_running": 8, "credit_blocks": 9, "total_blocks": 9}
        admin.hset(keys.group("g"), mapping={"state": "ready", **room})
        admin.xadd(keys.work("g"), {"batch": "b"})
    async with redis.asyncio.Redis.from_url(whole.url("gateway")) as client:
        owner = SimpleNamespace(redis=client, config=Config())
        look = await Progress(owner).look()
    assert look.num_groups == 1
    assert look.problems == ()
    assert whole.denied() == []


def scripts_of(role: str) -> tuple[str, ...]:
    """Bulk scripts are those of drivers and of the janitor, who calls any other too."""
    if role == "janitor":
        return script_names()
    bulk = tuple(name for name in script_names() if name.startswith("bulk_"))
    if role in ("producer", "gateway"):
        return (*SCRIPTS_OF["producer"], *bulk)
    return SCRIPTS_OF[role]


def rules(whole: Composition, role: str) -> list[str]:
    """What start.sh made of a role's rules."""
    (users,) = whole.directory.glob("tmp.*")
    lines = [line.split() for line in users.read_text("utf-8").splitlines()]
    return next(words for words in lines if words[1] == role)


def test_a_missing_or_short_password_is_refused_before_the_server_starts(tmp_path):
    command, extra = redis_start(tmp_path, SERVERS[-1])
    names = {f"REDIS_{r.upper()}_PASSWORD": "long enough, quite" for r in ROLES}
    for changed in ({"REDIS_WORKER_PASSWORD": "short"}, {"REDIS_WORKER_PASSWORD": ""}):
        done = subprocess.run(
            command,
            env={**extra, **names, **changed},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 1
        assert "REDIS_WORKER_PASSWORD must have 16 characters" in done.stderr
        assert "short" not in done.stderr


def test_no_password_stands_in_the_command_or_in_clear_in_a_file(server):
    _, whole = server
    process = whole.services["redis"].process
    assert process is not None
    line = Path(f"/proc/{process.pid}/cmdline").read_text()
    files = [p.read_text() for p in whole.directory.glob("tmp.*") if p.is_file()]
    assert any("user producer #" in text for text in files)
    for password in compose.passwords().values():
        if len(password) > 8:
            assert password not in line
            assert not any(password in text for text in files)
