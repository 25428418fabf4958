"""Settings of one served model: a table `[[models]]`."""

from typing import Literal

import msgspec

from .messages import DEFAULT_MODEL, DEFAULT_VERSION


class ModelLimits(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """What the queue of one model accepts; None takes the value of `[limits]`."""

    max_waiting_jobs: int | None = None
    max_waiting_tokens: int | None = None
    max_waiting_bytes: int | None = None
    tenant_waiting_jobs: int | None = None
    tenant_waiting_tokens: int | None = None
    tenant_tokens_per_minute: int | None = None
    max_payload_bytes: int | None = None


class ModelConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """One served model."""

    name: str = DEFAULT_MODEL
    """Public name."""
    path: str | None = None
    """Directory or hub id; None resolves the public name."""
    version: str = DEFAULT_VERSION
    """Names these weights among those served under the same name (docs/models.md)."""
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
    tp: int = 1
    """Processes that one replica is split over (tensor parallelism)."""
    replicas: int = 1
    serves: tuple[Literal["any", "short", "long"], ...] = ()
    """`worker.serves` of each replica; none takes the setting for all."""
    devices: tuple[int, ...] = ()
    """CUDA devices of its replicas, `tp` for each in turn; fewer than replicas take are
    shared. None takes what is there."""
    share: float | None = None
    """Part of a device's or host's compute and memory for each of its processes, above
    0 and at most 1; None is not bounded."""
    buckets: tuple[int, ...] | None = None
    """Upper bounds of its length buckets in tokens; None takes `pool.buckets`."""
    limits: ModelLimits = ModelLimits()
    """Of its queue, where they differ from `[limits]`."""
