"""What settings must satisfy beyond their types: ranges, order, uniqueness."""

import re
from collections.abc import Callable, Mapping
from typing import Final

from .config import Config, ModelConfig
from .config_placement import check_placement, is_rising
from .errors import ConfigError
from .input_refs import url_problem
from .keys import MODEL_NAME
from .redis import redact_url
from .routes import VERSION_NAME
from .validate import TENANT
from .webhook_signing import secret_problem

_Rule = tuple[Callable[[object], bool], str]


def _between(low: float, high: float) -> _Rule:
    def holds(value: object) -> bool:
        return isinstance(value, int | float) and low <= value <= high

    return holds, f"expected a value from {low:g} to {high:g}"


def _none_or(rule: _Rule) -> _Rule:
    holds, expected = rule
    return lambda value: value is None or holds(value), f"{expected}, or nothing"


def _is_url(value: object) -> bool:
    schemes = ("redis://", "rediss://", "unix://")
    return value is None or (isinstance(value, str) and value.startswith(schemes))


def _are_origins(value: object) -> bool:
    return isinstance(value, tuple) and all(_ORIGIN.fullmatch(one) for one in value)


_ORIGIN: Final = re.compile(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?")
_COUNT: Final = _between(1, 2**40)
_RULES: Final[Mapping[str, _Rule]] = {
    "redis.url": (_is_url, "expected redis://, rediss:// or unix://"),
    "redis.socket_timeout_s": _between(0.1, 600),
    "redis.max_connections": _between(4, 65536),
    "pool.partitions": _between(1, 999),
    "pool.buckets": (is_rising, "expected 1 to 16 rising numbers of tokens"),
    "limits.max_waiting_jobs": _COUNT,
    "limits.max_waiting_tokens": _COUNT,
    "limits.max_waiting_bytes": _COUNT,
    "limits.tenant_waiting_jobs": _COUNT,
    "limits.tenant_waiting_tokens": _COUNT,
    "limits.tenant_tokens_per_minute": _between(0, 2**40),
    "limits.max_payload_bytes": _between(1024, 512 * 1024 * 1024),
    "storage.offload_bytes": _none_or(_between(1024, 512 * 1024 * 1024)),
    "storage.max_input_bytes": _between(1024, 512 * 1024 * 1024),
    "storage.keep_s": _between(60, 10 * 365 * 86400),
    "retention.result_s": _between(1, 10 * 365 * 86400),
    "retention.dead_s": _between(1, 10 * 365 * 86400),
    "retention.usage_days": _between(1, 3660),
    "scheduler.tick_ms": _between(1, 10_000),
    "scheduler.max_wait_ms": _between(0, 60_000),
    "scheduler.leader_lease_ms": _between(200, 600_000),
    "scheduler.read_ahead": _between(1, 100_000),
    "scheduler.max_attempts": _between(1, 1000),
    "scheduler.isolate_after_losses": _between(1, 1000),
    "scheduler.max_losses_alone": _between(1, 1000),
    "pool.short_tokens": _COUNT,
    "worker.block_size": _between(1, 1024),
    "worker.num_blocks": _none_or(_COUNT),
    "worker.kv_memory_mb": _between(1, 2**24),
    "worker.max_running": _between(1, 65536),
    "worker.prefill_chunk": _between(1, 65536),
    "worker.step_target_ms": _none_or(_between(0, 60_000)),
    "worker.kv_overcommit": _between(1.0, 16.0),
    "worker.batch_tokens": _COUNT,
    "worker.max_context": _none_or(_between(2, 2**24)),
    # Three renewals must fit in a lease with room for a slow server between them.
    "worker.lease_ms": _between(300, 3_600_000),
    "worker.emit_ms": _between(0, 10_000),
    "worker.drain_s": _between(0, 86_400),
    "worker.threads": _none_or(_between(1, 4096)),
    "worker.offload_layers": _none_or(_between(0, 4096)),
    "worker.load_timeout_s": _between(1, 86_400),
    "worker.step_timeout_s": _between(1, 86_400),
    "worker.rank_timeout_s": _between(1, 3600),
    "worker.adapters_memory_mb": _between(0, 2**24),
    "worker.max_adapter_rank": _between(1, 256),
    "mps.thread_factor": _between(1, 64),
    "mps.start_s": _between(0.1, 600),
    "mps.check_s": _between(0.05, 600),
    "webhooks.timeout_s": _between(0.1, 300),
    "webhooks.max_attempts": _between(1, 20),
    "bulk.window_tokens": _between(64, 2**20),
    "bulk.overlap_tokens": _between(0, 2**19),
    "bulk.max_open_jobs": _between(1, 100_000),
    "bulk.keep_s": _between(60, 10 * 365 * 86400),
    "metrics.port": _between(0, 65_535),
    "gateway.port": _between(0, 65_535),
    "gateway.cors_origins": (_are_origins, "expected https://host or http://host"),
    "gateway.max_body_bytes": _between(1024, 512 * 1024 * 1024),
    "gateway.request_timeout_s": _between(1, 86_400),
    "gateway.keepalive_s": _between(0.1, 3600),
    "gateway.slow_client_s": _between(0.1, 3600),
    "gateway.drain_s": _between(0, 3600),
    "gateway.stalled_s": _between(1, 3600),
    "gateway.unready_s": _between(0, 3600),
    "gateway.max_requests": _between(1, 1_000_000),
    "gateway.max_requests_per_key": _between(1, 1_000_000),
    "gateway.max_file_bytes": _between(1024, 2**40),
    "gateway.max_batch_lines": _between(1, 60_000_000),
    "gateway.max_batch_bytes": _between(1024, 2**44),
    "gateway.max_tenant_files": _between(1, 1_000_000),
    "gateway.max_tenant_bytes": _between(1024, 2**60),
    "gateway.max_tenant_batches": _between(1, 100_000),
    "gateway.batch_lease_s": _between(0.3, 3600),
    "gateway.files_keep_s": _between(60, 10 * 365 * 86400),
}


def check(config: Config, origins: Mapping[str, str]) -> None:
    """Raises on the first setting that is out of range.

    Args:
        config: Settings of the right types.
        origins: Dotted key -> where its value came from, for the message.

    Raises:
        ConfigError: Names the key, the value, what was expected and the origin.
    """
    for key, (holds, expected) in _RULES.items():
        section, _, field = key.partition(".")
        value = getattr(getattr(config, section), field)
        if not holds(value):
            shown = redact_url(value) if isinstance(value, str) else value
            raise ConfigError(key, f"value {shown!r}; {expected}", origins.get(key))
    _check_secrets(config, origins)
    _check_storage(config, origins)
    _check_tenants(config, origins)
    if not config.models:
        raise ConfigError("models", "expected at least one model")
    seen: set[str] = set()
    for index, model in enumerate(config.models):
        _check_model(f"models[{index}]", model, seen, origins)
    check_placement(config, origins, _limit_problem)


def _limit_problem(field: str, value: object) -> str | None:
    """Returns what is wrong with a value of `[limits]`, or None."""
    holds, expected = _RULES[f"limits.{field}"]
    return None if holds(value) else f"value {value!r}; {expected}"


def _check_secrets(config: Config, origins: Mapping[str, str]) -> None:
    """A secret is never shown, a wrong one neither."""
    for field in ("secret", "previous_secret"):
        secret: str | None = getattr(config.webhooks, field)
        problem = None if secret is None else secret_problem(secret)
        if problem is not None:
            key = f"webhooks.{field}"
            raise ConfigError(key, problem, origins.get(key))


def _check_storage(config: Config, origins: Mapping[str, str]) -> None:
    """The address is never shown: a wrong one may have credentials anywhere in it."""
    urls = {
        "storage.url": config.storage.url,
        "gateway.files_url": config.gateway.files_url,
    }
    for key, url in urls.items():
        problem = None if url is None else url_problem(url)
        if problem is not None:
            raise ConfigError(key, problem, origins.get(key))
    offload, most = config.storage.offload_bytes, config.limits.max_payload_bytes
    if offload is not None and offload > most:
        raise ConfigError(
            "storage.offload_bytes",
            f"value {offload}; expected at most limits.max_payload_bytes ({most}): "
            "what lies between could go neither way",
            origins.get("storage.offload_bytes"),
        )


_TENANT_RULES: Final[Mapping[str, _Rule]] = {
    "weight": _between(0.001, 1000),
    "waiting_jobs": _none_or(_COUNT),
    "waiting_tokens": _none_or(_COUNT),
    "tokens_per_minute": _none_or(_between(0, 2**40)),
}


def _check_tenants(config: Config, origins: Mapping[str, str]) -> None:
    for name, tenant in config.tenants.items():
        if not TENANT.fullmatch(name):
            raise ConfigError(
                "tenants",
                f"'{name[:80]}' cannot be a tenant; expected 1 to 64 letters, digits "
                "and . _ @ + -, beginning with a letter, a digit or _",
            )
        for field, (holds, expected) in _TENANT_RULES.items():
            key, value = f"tenants.{name}.{field}", getattr(tenant, field)
            if not holds(value):
                raise ConfigError(key, f"value {value!r}; {expected}", origins.get(key))


def _check_model(
    key: str, model: ModelConfig, seen: set[str], origins: Mapping[str, str]
) -> None:
    def wrong(field: str, problem: str) -> ConfigError:
        name = f"{key}.{field}"
        return ConfigError(name, problem, origins.get(name))

    if not MODEL_NAME.fullmatch(model.name):
        raise wrong(
            "name",
            f"value {model.name!r}; expected 1 to 96 of letters, digits, . _ / - "
            "(give the directory or hub id as models.path)",
        )
    if model.name in seen:
        raise wrong("name", f"'{model.name}' is listed twice; use replicas")
    seen.add(model.name)
    if not VERSION_NAME.fullmatch(model.version):
        raise wrong(
            "version",
            f"value {model.version!r}; expected 1 to 32 letters, digits and . _ + -, "
            "beginning with a letter, a digit or _",
        )
    if not 0 <= model.outlier_threshold <= 1000:
        raise wrong(
            "outlier_threshold",
            f"value {model.outlier_threshold}; expected 0 (none) to 1000",
        )
    if model.outlier_threshold and model.weights != "int8-bnb":
        raise wrong(
            "outlier_threshold",
            f"value {model.outlier_threshold} with weights '{model.weights}'; only "
            "'int8-bnb' has a threshold",
        )
    if not 0 <= model.replicas <= 1024:
        raise wrong("replicas", f"value {model.replicas}; expected 0 to 1024")
    if model.serves and len(model.serves) != model.replicas:
        raise wrong(
            "serves",
            f"has {len(model.serves)} entries; expected one for each of the "
            f"{model.replicas} replicas, or none",
        )
