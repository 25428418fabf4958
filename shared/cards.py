"""What pool and workers say of themselves: cards in Redis. Frozen structs, JSON."""

from typing import Literal

import msgspec


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of its model, in the hash `tm:models`."""

    v: int = 1
    model: str
    max_context: int
    """Most tokens of prompt plus output."""
    vocab_size: int
    tokenizer: str
    """Fingerprint of the bundle at `tm:tokenizer:<fingerprint>`, or `bytes`."""
    has_chat_template: bool
    bytes_per_token: float = 3.5
    """For a producer's estimate; learned by the scheduler."""
    weights_version: str


class ModelTerms(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where one model differs from its pool; None: it does not."""

    buckets: tuple[int, ...] | None = None
    max_payload_bytes: int | None = None


class PoolCard(msgspec.Struct, frozen=True, kw_only=True):
    """What producers need to know of a pool, JSON in the string `tm:pool`."""

    v: int = 1
    partitions: int = 1
    buckets: tuple[int, ...] = (128, 512, 2048, 8192)
    """Upper bounds in prompt tokens; longer prompts go to `beyond`."""
    max_payload_bytes: int = 4 * 1024 * 1024
    retention_ms: int = 3_600_000
    """How long results, logs and inputs stay after a job's end."""
    models: tuple[str, ...] = ()
    """Models the pool is configured to serve, alive or not."""
    storage_url: str | None = None
    """Where producers put inputs too large for Redis; None: nowhere. It never holds
    a secret: credentials come from each process's environment."""
    offload_bytes: int = 0
    """Inputs of more bytes than this go to the store."""
    max_input_bytes: int = 0
    """Largest input that the store takes."""
    webhooks: Literal["none", "public", "any"] = "none"
    """Which addresses the pool delivers webhooks to; `none` where it has no secret to
    sign them with."""
    by_model: dict[str, ModelTerms] = {}
    """Of models that differ. Who does not read it names buckets of the pool, which the
    scheduler counts anew."""

    def all_buckets(self) -> list[int]:
        """Returns the bounds that the pool and its models have, rising."""
        own = (bound for one in self.by_model.values() for bound in one.buckets or ())
        return sorted({*self.buckets, *own})

    def of_model(self, model: str) -> "PoolCard":
        """Returns the card as it is for one model's jobs."""
        terms = self.by_model.get(model)
        if terms is None:
            return self
        most = terms.max_payload_bytes or self.max_payload_bytes
        return msgspec.structs.replace(
            self,
            buckets=terms.buckets or self.buckets,
            max_payload_bytes=most,
            offload_bytes=min(self.offload_bytes, most),
        )
