"""Everything that is counted, and where. docs/watching.md explains each.

Names follow Prometheus: base units, `_total` for what only rises. Those without
`tokenmill_` are names that dashboards of inference servers already know.
"""

from typing import Final

from .bounds import JOBS, SECONDS, TOKEN_SECONDS, TOKENS
from .instruments import Counter, Gauge, Histogram, Instrument

SCHEDULER: Final = ("scheduler",)
WORKER: Final = ("worker",)
JANITOR: Final = ("janitor",)
GATEWAY: Final = ("gateway",)
ENDING: Final = ("scheduler", "worker")
"""Both see jobs end, never the same job: as with its log line, the worker that ran it
tells of it, and for all others the active scheduler does."""
ALL: Final = ("scheduler", "worker", "janitor", "gateway")

# --- jobs that ended -----------------------------------------------------------------
REQUESTS: Final = Counter(
    "inference_requests", "Jobs that ended, by state.", "model", "status", kinds=ENDING
)
LATENCY: Final = Histogram(
    "inference_latency_seconds",
    "From enqueue to end, of jobs that succeeded.",
    "model",
    bounds=SECONDS,
    kinds=ENDING,
)
FIRST_TOKEN: Final = Histogram(
    "tokenmill_time_to_first_token_seconds",
    "From enqueue to the first token, of jobs that made one.",
    *("model", "job_class"),
    bounds=SECONDS,
    kinds=ENDING,
)
QUEUE_WAIT: Final = Histogram(
    "tokenmill_queue_wait_seconds",
    "From enqueue to the first start on a worker.",
    *("model", "job_class"),
    bounds=SECONDS,
    kinds=ENDING,
)
PROMPT_TOKENS: Final = Counter(
    "tokenmill_prompt_tokens",
    "Prompt tokens of jobs that ended after a start.",
    *("model", "job_class"),
    kinds=ENDING,
)

# --- scheduler -----------------------------------------------------------------------
DISPATCHED: Final = Counter(
    "tokenmill_dispatched_jobs",
    "Jobs given to a worker; one that is redelivered counts again.",
    *("model", "job_class"),
    kinds=SCHEDULER,
)
BATCH_TOKENS: Final = Histogram(
    "tokenmill_batch_tokens",
    "Prompt tokens of the batches that were dispatched.",
    *("model", "job_class"),
    bounds=TOKENS,
    kinds=SCHEDULER,
)
BATCH_JOBS: Final = Histogram(
    "tokenmill_batch_jobs",
    "Jobs of the batches that were dispatched.",
    *("model", "job_class"),
    bounds=JOBS,
    kinds=SCHEDULER,
)
LEASES_LOST: Final = Counter(
    "tokenmill_leases_lost",
    "Jobs taken from a worker whose lease had ended, or that was seen to die.",
    "model",
    kinds=SCHEDULER,
)
DEAD: Final = Counter(
    "tokenmill_jobs_given_up",
    "Jobs that went to the dead letters after losing workers.",
    "model",
    kinds=SCHEDULER,
)
QUEUE_JOBS: Final = Gauge(
    "tokenmill_queue_jobs",
    "Waiting jobs by class and length bucket (upper bound in tokens).",
    *("model", "job_class", "bucket"),
    kinds=SCHEDULER,
)
QUEUE_TOKENS: Final = Gauge(
    "tokenmill_queue_tokens",
    "Prompt tokens of waiting jobs, estimated.",
    "job_class",
    kinds=SCHEDULER,
)
QUEUE_OLDEST: Final = Gauge(
    "tokenmill_queue_oldest_seconds",
    "Age of the job that has waited longest.",
    *("model", "job_class"),
    kinds=SCHEDULER,
)
TENANT_JOBS: Final = Gauge(
    "tokenmill_tenant_waiting_jobs",
    "Waiting jobs of tenants that the settings name, and of all others together.",
    "tenant",
    kinds=SCHEDULER,
)
DELAYED: Final = Gauge(
    "tokenmill_delayed_jobs",
    "Jobs that wait for their time or for another attempt.",
    kinds=SCHEDULER,
)
LEASED: Final = Gauge(
    "tokenmill_leased_jobs", "Jobs that some worker holds.", kinds=SCHEDULER
)
DEAD_LETTERS: Final = Gauge(
    "tokenmill_dead_letters", "Dead letters that are kept now.", kinds=SCHEDULER
)
GROUPS: Final = Gauge(
    "tokenmill_worker_groups",
    "Worker groups that the scheduler sees.",
    *("model", "state"),
    kinds=SCHEDULER,
)
ACTIVE: Final = Gauge(
    "tokenmill_scheduler_active",
    "Whether this process schedules the shard (1) or stands by (0).",
    *("model", "partition"),
    kinds=SCHEDULER,
)

LEFT_OUT: Final = Gauge(
    "tokenmill_gauges_left_out",
    "Whether there is more of something than the queue gauges count (1).",
    "what",
    kinds=SCHEDULER,
)

# --- worker ---------------------------------------------------------------------------
INTER_TOKEN: Final = Histogram(
    "tokenmill_inter_token_seconds",
    "Between two tokens of one output, as the engine delivered them.",
    *("model", "job_class"),
    bounds=TOKEN_SECONDS,
    kinds=WORKER,
)
OUTPUT_TOKENS: Final = Counter(
    "tokenmill_output_tokens",
    "Output tokens made here, of whatever became of their jobs.",
    *("model", "job_class"),
    kinds=WORKER,
)
STEP_SECONDS: Final = Histogram(
    "tokenmill_step_seconds",
    "Time of an engine step.",
    "model",
    bounds=TOKEN_SECONDS,
    kinds=WORKER,
)
STEPS: Final = Counter("tokenmill_steps", "Engine steps.", "model", kinds=WORKER)
STEP_TOKENS: Final = Counter(
    "tokenmill_step_tokens",
    "Tokens computed in engine steps, of prompts and of outputs.",
    "model",
    kinds=WORKER,
)
KV_BLOCKS: Final = Gauge(
    "tokenmill_kv_blocks",
    "KV blocks by state: used by a sequence, cached for a prefix, free.",
    *("model", "state"),
    kinds=WORKER,
)
PREFIX_TOKENS: Final = Counter(
    "tokenmill_prefix_tokens",
    "Tokens of sequences as they began to run: found in the prefix cache, or not.",
    *("model", "result"),
    kinds=WORKER,
)
PREEMPTIONS: Final = Counter(
    "tokenmill_preemptions",
    "Times a sequence yielded its KV blocks and was computed again.",
    "model",
    kinds=WORKER,
)
HALVINGS: Final = Counter(
    "tokenmill_step_halvings",
    "Steps halved for want of memory.",
    "model",
    kinds=WORKER,
)
OVERRUNS: Final = Counter(
    "tokenmill_overruns",
    "Requests that came beyond what was promised; zero while all is right.",
    "model",
    kinds=WORKER,
)
RUNNING: Final = Gauge(
    "tokenmill_running_sequences", "Sequences in the engine.", "model", kinds=WORKER
)
PREFILL_BACKLOG: Final = Gauge(
    "tokenmill_prefill_backlog_tokens",
    "Prompt tokens accepted and not yet computed.",
    "model",
    kinds=WORKER,
)
ADAPTERS: Final = Gauge(
    "tokenmill_adapters_loaded", "Adapters in memory.", "model", kinds=WORKER
)
ADAPTER_BYTES: Final = Gauge(
    "tokenmill_adapters_bytes", "Memory that adapters take.", "model", kinds=WORKER
)
ADAPTER_LOADS: Final = Counter(
    "tokenmill_adapter_loads", "Adapters read into memory.", "model", kinds=WORKER
)
ADAPTER_EVICTIONS: Final = Counter(
    "tokenmill_adapter_evictions",
    "Adapters that left memory to make room for others.",
    "model",
    kinds=WORKER,
)
JOBS_LOST: Final = Counter(
    "tokenmill_worker_jobs_lost",
    "Jobs that this worker had to drop, since others own them by now.",
    kinds=WORKER,
)
GPU_MEMORY: Final = Gauge(
    "gpu_memory_usage_bytes",
    "Memory of the device that this worker has reserved; absent without CUDA.",
    "device_id",
    kinds=WORKER,
)
RESIDENT: Final = Gauge(
    "tokenmill_worker_resident_bytes",
    "Host memory of this worker that is in RAM, mapped weights included.",
    "model",
    kinds=WORKER,
)

# --- janitor --------------------------------------------------------------------------
HISTORY_SAMPLES: Final = Counter(
    "tokenmill_history_samples", "Samples written to tm:history.", kinds=JANITOR
)
WEBHOOKS: Final = Counter(
    "tokenmill_webhooks",
    "Webhook deliveries by outcome: delivered, retried, given_up.",
    "outcome",
    kinds=JANITOR,
)
BULK_RUNS: Final = Gauge(
    "tokenmill_bulk_runs", "Bulk runs that are kept, by state.", "state", kinds=JANITOR
)

# --- gateway --------------------------------------------------------------------------
HTTP_REQUESTS: Final = Counter(
    "tokenmill_http_requests",
    "HTTP requests by route and status code.",
    *("method", "route", "status"),
    kinds=GATEWAY,
)
HTTP_SECONDS: Final = Histogram(
    "tokenmill_http_request_seconds",
    "From the request to the first byte of its answer.",
    *("method", "route"),
    bounds=SECONDS,
    kinds=GATEWAY,
)
HTTP_OPEN: Final = Gauge(
    "tokenmill_http_open_requests",
    "Requests that are being answered, streams included.",
    kinds=GATEWAY,
)

# --- every process --------------------------------------------------------------------
REDIS_OUTAGES: Final = Counter(
    "tokenmill_redis_reconnects",
    "Times a part of this process lost Redis and had it back.",
    kinds=ALL,
)
REDIS_AWAY: Final = Gauge(
    "tokenmill_redis_away",
    "Parts of this process that cannot reach Redis now; 0 while all is well.",
    kinds=ALL,
)

CATALOG: Final[tuple[Instrument, ...]] = tuple(
    found for found in list(globals().values()) if isinstance(found, Instrument)
)


def shown_by(kind: str) -> tuple[Instrument, ...]:
    """Returns what a process of this kind shows."""
    return tuple(one for one in CATALOG if kind in one.kinds)
