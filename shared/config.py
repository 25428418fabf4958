"""Settings: frozen structs with their defaults. Reading them is `config_load.py`."""

from typing import Literal

import msgspec

from .messages import DEFAULT_MODEL


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
    step_timeout_s: float = 120.0
    """A step longer than this ends the process; its jobs are redelivered."""


class ModelConfig(_Section, frozen=True, kw_only=True):
    """One served model."""

    name: str = DEFAULT_MODEL
    """Public name."""
    path: str | None = None
    """Directory or hub id; None resolves the public name."""
    weights: Literal[
        "int8", "float32", "bfloat16", "float16", "nf4", "int8-a8", "int8-bnb"
    ] = "int8"
    """int8-a8 has 8-bit activations as well and needs a GPU; int8-bnb is bitsandbytes'
    own INT8 layer. Both keep outlier columns in the attention's products and the head
    alone, as far as calibration knows them."""
    outlier_threshold: float = 0.0
    """With weights int8-bnb, bitsandbytes' dynamic threshold for outlier columns; above
    0 a job's tokens depend on what else is in its batch."""
    kv: Literal["int8", "int4", "float32"] = "int8"
    replicas: int = 1
    serves: tuple[Literal["any", "short", "long"], ...] = ()
    """`worker.serves` of each replica; none takes the setting for all."""


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
    tenants: dict[str, TenantConfig] = {}
    """By name, from the tables `[tenants.<name>]`."""
    log: LogConfig = LogConfig()
