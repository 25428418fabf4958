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
    state_dir: str | None = None
    """Redis data, connection file, logs; None is ~/.local/state/tokenmill."""


class LimitsConfig(_Section, frozen=True, kw_only=True):
    """What the queue accepts."""

    max_waiting_jobs: int = 100_000
    max_waiting_tokens: int = 50_000_000
    tenant_waiting_jobs: int = 100_000
    max_payload_bytes: int = 4 * 1024 * 1024


class RetentionConfig(_Section, frozen=True, kw_only=True):
    """How long things stay after a job's end, in seconds."""

    result_s: float = 3600.0
    """Results, token logs, inputs and idempotency keys."""


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
    max_lease_losses: int = 5
    """Lost leases before the job goes to the dead letters."""


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
    scheduler: SchedulerConfig = SchedulerConfig()
    worker: WorkerConfig = WorkerConfig()
    models: tuple[ModelConfig, ...] = (ModelConfig(),)
    log: LogConfig = LogConfig()
