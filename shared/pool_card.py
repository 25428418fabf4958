"""What a pool tells its producers, from its settings."""

from typing import Literal

from .config import Config
from .messages import ModelTerms, PoolCard


def pool_card(config: Config) -> PoolCard:
    """Returns what producers are told of a pool with these settings."""
    limits, storage = config.limits, config.storage
    is_stored = storage.url is not None
    reach: Literal["any", "public"] = (
        "any" if config.webhooks.allow_private else "public"
    )
    offload_bytes = storage.offload_bytes or limits.max_payload_bytes // 2
    return PoolCard(
        partitions=config.pool.partitions,
        buckets=config.pool.buckets,
        max_payload_bytes=limits.max_payload_bytes,
        retention_ms=round(config.retention.result_s * 1000),
        models=tuple(model.name for model in config.models),
        storage_url=storage.url,
        offload_bytes=offload_bytes if is_stored else 0,
        max_input_bytes=storage.max_input_bytes if is_stored else 0,
        webhooks="none" if config.webhooks.secret is None else reach,
        by_model=_terms(config),
    )


def _terms(config: Config) -> dict[str, ModelTerms]:
    """Returns what models have of their own, by name."""
    found = {
        model.name: ModelTerms(
            buckets=model.buckets, max_payload_bytes=model.limits.max_payload_bytes
        )
        for model in config.models
    }
    return {name: terms for name, terms in found.items() if terms != ModelTerms()}
