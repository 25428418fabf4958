"""Settings: frozen structs with their defaults. Reading them is `config_load.py`."""

from typing import Literal

import msgspec

from .config_model import ModelConfig as ModelConfig
from .config_mps import MpsConfig


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class RedisConfig(_Section, frozen=True, kw_only=True):
    """How to reach Redis."""

    url: str | None = None
    """redis:// or rediss://; None starts or finds an embedded server."""
    socket_timeout_s: float = 5.0
    max_connections: int = 64


class PoolConfig(_Section, frozen=True, kw_only=True):
    """What the whole pool shares; published to producers as `PoolCard`."""

    partitions: int = 1
    buckets: tuple[int, ...] = (128, 512, 2048, 8192)
    short_tokens: int = 2048
    """Buckets up to this bound are "short" for `worker.serves`, the others "long"."""
    state_dir: str | None = None
    """Redis data, connection file, logs; None is ~/.local/state/tokenmill."""


class LimitsConfig(_Section, frozen=True, kw_only=True):
    """What the queue of each model and partition accepts; the active scheduler writes
    it to Redis, where `enqueue` reads it.
    """

    max_waiting_jobs: int = 100_000
    max_waiting_tokens: int = 50_000_000
    """Prompt tokens."""
    max_waiting_bytes: int = 1024**3
    """Payloads of waiting jobs, all together."""
    tenant_waiting_jobs: int = 100_000
    tenant_waiting_tokens: int = 50_000_000
    """Prompt tokens."""
    tenant_tokens_per_minute: int = 0
    """Prompt and most output tokens of what a tenant enqueues; 0 is no limit."""
    max_payload_bytes: int = 4 * 1024 * 1024
    """Of one job."""


class TenantConfig(_Section, frozen=True, kw_only=True):
    """One tenant that differs from the others; None takes the limit of all."""

    weight: float = 1.0
    """Share of tokens against other tenants while both wait."""
    waiting_jobs: int | None = None
    waiting_tokens: int | None = None
    tokens_per_minute: int | None = None
    """0 is no limit."""


class RetentionConfig(_Section, frozen=True, kw_only=True):
    """How long things stay after a job's end, in seconds."""

    result_s: float = 3600.0
    """Results, token logs, inputs and idempotency keys."""
    dead_s: float = 604_800.0
    """Dead letters, with the record, input and result of the job; never less than
    `result_s`."""
    usage_days: int = 90
    """What tenants have used, by day; today counts."""


class StorageConfig(_Section, frozen=True, kw_only=True):
    """Where inputs go that are too large for Redis."""

    url: str | None = None
    """file:///directory, s3://bucket/prefix or another address that fsspec knows,
    without credentials; None: no store. Producers, schedulers and the janitor must
    all reach it."""
    offload_bytes: int | None = None
    """Inputs of more bytes than this go to the store; None is half of
    limits.max_payload_bytes."""
    max_input_bytes: int = 64 * 1024 * 1024
    """Largest input that the store takes."""
    keep_s: float = 86_400.0
    """An input is removed once it is older than this and no job's record names it;
    until then its job may still be on its way."""


class SchedulerConfig(_Section, frozen=True, kw_only=True):
    """The scheduler's clockwork."""

    tick_ms: int = 50
    """Longest time between two looks at the queues while jobs wait."""
    max_wait_ms: int = 200
    """Longest wait for a fuller batch."""
    leader_lease_ms: int = 2000
    """A standby takes over this long after the active scheduler's last renewal."""
    read_ahead: int = 256
    """Entries read per lane before they are dispatched."""
    max_attempts: int = 3
    """Runs that may end in a fault before the job fails."""
    isolate_after_losses: int = 2
    """Lost leases after which a job runs alone in a group, so that neighbours live."""
    max_losses_alone: int = 1
    """Leases lost while it ran alone before it goes to the dead letters."""


class WorkerConfig(_Section, frozen=True, kw_only=True):
    """One worker process and its engine's limits."""

    block_size: int = 8
    """Tokens per KV block."""
    num_blocks: int | None = None
    """KV blocks; None sizes the pool from free memory."""
    kv_memory_mb: int = 1024
    """Upper bound of the KV pool when it is sized from free memory."""
    max_running: int = 16
    """Sequences in a step at most."""
    prefill_chunk: int = 512
    """Prompt tokens in a step at most."""
    step_target_ms: float | None = None
    """Bounds a step's time by its prompt tokens while interactive jobs decode; None is
    twice a decode step's time, 0 no bound."""
    prefix_cache: bool = True
    """Jobs of one tenant that begin alike share what was computed of it."""
    kv_overcommit: float = 1.0
    """Announced KV credit as a multiple of the pool; above 1 jobs may be preempted."""
    batch_tokens: int = 4096
    """Prompt tokens that may be dispatched here and not yet prefilled."""
    max_context: int | None = None
    """Cap on prompt plus output; None is the model's own."""
    serves: Literal["any", "short", "long"] = "any"
    """Prompts that it is kept for by their length (`pool.short_tokens`); it takes
    others while none of its own wait."""
    lease_ms: int = 10_000
    emit_ms: int = 30
    """Deltas are coalesced for this long; the first and the last never wait."""
    drain_s: float = 30.0
    """On SIGTERM, how long running jobs may go on before they are handed back."""
    threads: int | None = None
    """Compute threads; None is the number of cores this process may use."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    cuda_graphs: bool = True
    """On a GPU, decode steps are recorded at start and replayed."""
    offload_layers: int | None = None
    """On a GPU, how many of the last layers stay in host memory; None is as many as do
    not fit."""
    load_timeout_s: float = 1800.0
    """A model that takes longer to load ends the process; `up` tries it again twice."""
    step_timeout_s: float = 120.0
    """A step longer than this ends the process; its jobs are redelivered."""
    rank_timeout_s: float = 10.0
    """With models.tp above 1: a rank that keeps the others waiting for this long, or
    gives no sign of life for half of it, ends the worker; its jobs are redelivered."""
    adapters_memory_mb: int = 256
    """Memory for LoRA adapters, on each rank of a split model; the least recently used
    leave it first; 0 serves none."""
    max_adapter_rank: int = 64
    """Adapters of a higher rank are refused."""


class GatewayConfig(_Section, frozen=True, kw_only=True):
    """The HTTP gateway (docs/gateway.md)."""

    host: str = "127.0.0.1"
    """Address that it listens on. Beyond this host it needs keys, unless `auth` is
    none."""
    port: int = 8080
    """0 takes a free one."""
    auth: Literal["auto", "keys", "none"] = "auto"
    """auto asks for keys unless it listens on this host alone and no key was ever
    made."""
    cors_origins: tuple[str, ...] = ()
    """Origins of pages that may call it from a browser, as https://app.example."""
    max_body_bytes: int = 8 * 1024 * 1024
    """Of one request; files have `max_file_bytes`."""
    request_timeout_s: float = 600.0
    """Longest that a request may wait for its end, streamed or not."""
    keepalive_s: float = 15.0
    """A stream without news sends a comment this often, so that no proxy ends it."""
    slow_client_s: float = 30.0
    """A client that takes nothing of a stream for this long is cut off."""
    drain_s: float = 20.0
    """On SIGTERM, how long open requests may go on before they are told to leave."""
    unready_s: float = 0.0
    """On SIGTERM, how long it serves on as ever while /readyz says that it is to go:
    as long as a balancer takes to find out."""
    stalled_s: float = 20.0
    """Jobs that wait beside room in a worker for this long make it unhealthy."""
    max_requests: int = 10_000
    """Open requests, streams included; more are turned away with 503."""
    max_requests_per_key: int = 2_500
    """Of these, by one API key; more are turned away with 429."""
    files_url: str | None = None
    """Where files and the output of batches lie: file:///directory, s3://bucket/prefix
    or another address that fsspec knows, without credentials. None is `files` in
    pool.state_dir. Gateways of one pool need the same."""
    max_file_bytes: int = 512 * 1024 * 1024
    """Of one uploaded file."""
    files_keep_s: float = 2_592_000.0
    """Files and the records of batches stay for so long."""
    max_batch_lines: int = 2_000_000
    """Of the input of a batch, blank ones included."""
    max_batch_bytes: int = 4 * 1024 * 1024 * 1024
    """Of the input of a batch, unpacked."""
    max_tenant_files: int = 10_000
    """Files of one tenant; output of batches counts, and is never refused."""
    max_tenant_bytes: int = 100 * 1024 * 1024 * 1024
    """In all files of one tenant, likewise."""
    max_tenant_batches: int = 100
    """Batches of one tenant that have not ended."""
    batch_lease_s: float = 15.0
    """Another gateway goes on with a batch after this long without a sign of life of
    the one that worked on it."""


class BulkConfig(_Section, frozen=True, kw_only=True):
    """Bulk runs (docs/bulk.md)."""

    window_tokens: int = 2048
    """Most tokens of a document's text in one job, where a run says nothing else."""
    overlap_tokens: int = 128
    """Most tokens that a window repeats of the one before, likewise."""
    max_open_jobs: int = 1000
    """Jobs of one run in the queue and running at a time."""
    keep_s: float = 604_800.0
    """How long a run and its outcomes stay after the last thing that happened to it."""


class MetricsConfig(_Section, frozen=True, kw_only=True):
    """What each process tells Prometheus (docs/watching.md)."""

    enabled: bool = True
    host: str = "127.0.0.1"
    """Address that each process listens on; 0.0.0.0 lets other hosts read."""
    port: int = 0
    """0 takes a free one, which the process's card and log name. A fixed one is for
    one process a host, as in a container."""


class WebhooksConfig(_Section, frozen=True, kw_only=True):
    """Telling addresses of the end of jobs, runs and batches (docs/webhooks.md)."""

    secret: str | None = None
    """Signs every delivery: `whsec_` and base64, or text of 16 characters at least.
    None: the pool sends none, and refuses jobs that ask for one."""
    previous_secret: str | None = None
    """Signs as well, while receivers change over from it to `secret`."""
    allow_private: bool = False
    """Deliver to addresses beyond the public internet as well, and to any port."""
    timeout_s: float = 10.0
    """Of one attempt, from the look-up of the name to the status of the answer."""
    max_attempts: int = 8
    """Attempts before a delivery is given up."""


class LogConfig(_Section, frozen=True, kw_only=True):
    """Logging."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"
    """auto is console on a terminal, JSON off it."""


class Config(_Section, frozen=True, kw_only=True):
    """Everything; one TOML file, `TOKENMILL_*` variables over it."""

    redis: RedisConfig = RedisConfig()
    pool: PoolConfig = PoolConfig()
    limits: LimitsConfig = LimitsConfig()
    retention: RetentionConfig = RetentionConfig()
    storage: StorageConfig = StorageConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    worker: WorkerConfig = WorkerConfig()
    models: tuple[ModelConfig, ...] = (ModelConfig(),)
    mps: MpsConfig = MpsConfig()
    tenants: dict[str, TenantConfig] = {}
    """By name, from the tables `[tenants.<name>]`."""
    gateway: GatewayConfig = GatewayConfig()
    bulk: BulkConfig = BulkConfig()
    metrics: MetricsConfig = MetricsConfig()
    webhooks: WebhooksConfig = WebhooksConfig()
    log: LogConfig = LogConfig()
