"""From settings to an engine with its model, and to what the worker says of both."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from ..shared.config import LogConfig, ModelConfig, WorkerConfig
from ..shared.errors import ConfigError
from ..shared.messages import ModelCard
from . import echo
from .adapters_loader import AdapterLoader, NoAdapters
from .adapters_model import model_adapters, stand_in_adapters
from .engine_thread import EngineLike
from .extras import model_stack
from .runner_loading import Progress, load_beside, other_ranks

if TYPE_CHECKING:
    from .engine.adapters.cache import AdapterCache
    from .engine.batch import ModelRunner
    from .engine.detokenizer import TokenTable
    from .engine.model.runner import TransformersRunner
    from .rank_group import RankGroup

REAL: Final = "model"
"""Name of the engine that runs a model."""
_ECHO_BATCH_TOKENS: Final = 100_000_000
"""Nothing is prefilled, so the prefill budget must not be what limits."""

OnTokenizer = Callable[[str, bytes], None]
"""Called with fingerprint and bundle, long before the weights are read."""


class Loaded(msgspec.Struct, frozen=True):
    """An engine and the facts about it."""

    engine: EngineLike
    card: ModelCard
    bundle: bytes | None
    """The tokenizer, packed; None for the `bytes` tokenizer."""
    block_size: int
    batch_tokens: int
    load_s: float
    device: str = "none"
    """Where it runs, "cuda:0" for example, for the ready line."""
    kernels: str = "none"
    """What computes; workers of one pool should have the same."""
    adapters: AdapterLoader | None = None
    """Holds its adapters, or says why it serves none."""
    group: "RankGroup | None" = None
    """The ranks, where the model is split over several processes."""
    runner: "ModelRunner | None" = None
    """The model itself, for the health run; None: the engine has none."""

    @property
    def tp(self) -> int:
        """Processes that the model is split over."""
        return 1 if self.group is None else self.group.size


def load(
    kind: str,
    model: ModelConfig,
    worker: WorkerConfig,
    progress: Progress | None = None,
    on_tokenizer: OnTokenizer | None = None,
    profile: Path | None = None,
    log: LogConfig | None = None,
) -> Loaded:
    """Builds the engine; takes seconds, so call it off the event loop.

    Args:
        kind: `model`, `echo` or `echo:<ms per step>`.
        model: Which model, and in what precision.
        worker: Limits.
        progress: Called with a stage and its fraction done.
        on_tokenizer: Told of a model's tokenizer as soon as it is known.
        profile: Where its steps and kernels are timed to.
        log: How the other ranks of a split model log.

    Raises:
        ModelLoadError: The model cannot be found, read or held in memory.
        ConfigError: `kind` is no engine, the profile cannot be written, or the model
            cannot be split over so many processes.
    """
    began = time.monotonic()
    check_engine(kind, model.tp, profile)
    if kind != REAL:
        if model.tp > 1:
            structlog.get_logger().info("tp_ignored", tp=model.tp, engine="echo")
        return _load_echo(kind, model, worker, began)
    with model_stack():
        return _load_model(model, worker, progress, on_tokenizer, began, profile, log)


def check_engine(kind: str, tp: int, profile: Path | None) -> None:
    """Refuses an engine that there is not, or a profile that it cannot make.

    Args:
        kind: As for `load`.
        tp: Processes that the model is split over.
        profile: Where its steps and kernels are to be timed to.

    Raises:
        ConfigError: It is one of those.
    """
    name = kind.partition(":")[0]
    if kind != REAL and name != "echo":
        problem = f"value {kind!r}; expected model, echo or echo:<ms per step>"
        raise ConfigError("engine", problem)
    if profile is None:
        return
    if kind != REAL:
        raise ConfigError("profile", f"the engine {name} has no kernels to time")
    if tp > 1:
        problem = "ranks of a split model are not timed; profile it with tp = 1"
        raise ConfigError("profile", problem)


def _load_echo(
    kind: str, model: ModelConfig, worker: WorkerConfig, began: float
) -> Loaded:
    card = ModelCard(
        model=model.name,
        max_context=worker.max_context or echo.MAX_CONTEXT,
        vocab_size=echo.VOCABULARY,
        tokenizer=echo.TOKENIZER,
        has_chat_template=True,
        bytes_per_token=1.0,
        weights_version=echo.weights_of(model.version),
    )
    return Loaded(
        engine=echo.EchoEngine.from_name(kind, worker.max_running),
        card=card,
        bundle=None,
        block_size=worker.block_size,
        batch_tokens=_ECHO_BATCH_TOKENS,
        load_s=time.monotonic() - began,
        adapters=stand_in_adapters(worker),
    )


def _load_model(
    model: ModelConfig,
    worker: WorkerConfig,
    progress: Progress | None,
    on_tokenizer: OnTokenizer | None,
    began: float,
    profile: Path | None,
    log: LogConfig | None,
) -> Loaded:
    from .engine.model.resolve import resolve_model

    # Before the imports that take seconds: a wrong name is said at once.
    path = resolve_model(model.name, model.path, progress=progress)
    fingerprint, bundle, has_template = _tokenizer(path)
    with (
        other_ranks(path, model, worker, progress, log) as group,
        ThreadPoolExecutor(1) as beside,
    ):
        if on_tokenizer is not None:
            on_tokenizer(fingerprint, bundle)
        # Its parsing is native code, which runs while the weights are read.
        table = beside.submit(_read_table, path)
        runner = load_beside(table, group, path, model, worker, progress)
        adapters = model_adapters(runner, worker, group)
        tokens = table.result()
        engine = _engine(profile, runner, model, worker, tokens, adapters)
    card = ModelCard(
        model=model.name,
        max_context=_max_context(runner),
        vocab_size=runner.vocab_size,
        tokenizer=fingerprint,
        has_chat_template=has_template,
        weights_version=runner.weights_version,
    )
    return Loaded(
        engine=engine,
        card=card,
        bundle=bundle,
        block_size=runner.block_size,
        batch_tokens=worker.batch_tokens,
        load_s=time.monotonic() - began,
        device=runner.target.name,
        kernels=runner.target.ops.backend_report()["backend"],
        runner=runner,
        adapters=adapters,
        group=group,
    )


def _engine(
    profile: Path | None,
    runner: "TransformersRunner",
    model: ModelConfig,
    worker: WorkerConfig,
    tokens: "TokenTable",
    adapters: "AdapterCache | NoAdapters",
) -> EngineLike:
    options = {
        "max_running": worker.max_running,
        "prefill_chunk": worker.prefill_chunk,
        "prefix_cache": worker.prefix_cache,
        "step_target_ms": worker.step_target_ms,
        "kv_overcommit": worker.kv_overcommit,
        "adapters": None if isinstance(adapters, NoAdapters) else adapters,
    }
    if profile is not None:
        from .profiling import profiled_engine

        return profiled_engine(profile, runner, model, worker, tokens, options)
    from .engine.engine import Engine

    return Engine(runner, tokens, **options)  # type: ignore[arg-type]


def _read_table(path: Path) -> "TokenTable":
    from .engine.detokenizer import TokenTable
    from .engine.model.vocabulary import read_tokenizer

    return TokenTable.from_tokenizer(read_tokenizer(path))


def _max_context(runner: "TransformersRunner") -> int:
    """What one sequence can hold: the model's limit, bounded by the whole pool."""
    pool_tokens = runner.num_blocks * runner.block_size
    if pool_tokens < runner.max_context:
        structlog.get_logger().warning(
            "context_limited_by_kv_pool",
            model_context=runner.max_context,
            pool_tokens=pool_tokens,
        )
    return min(runner.max_context, pool_tokens)


def _tokenizer(path: Path) -> tuple[str, bytes, bool]:
    """Returns fingerprint, bundle and whether there is a chat template."""
    from ..shared.tokens import collect_tokenizer, pack_tokenizer

    files = collect_tokenizer(path)
    fingerprint, bundle = pack_tokenizer(files)
    has_template = "chat_template.jinja" in files or (
        b'"chat_template"' in files.get("tokenizer_config.json", b"")
    )
    return fingerprint, bundle, has_template
