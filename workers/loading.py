"""From settings to an engine with its model, and to what the worker says of both."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from ..shared.config import ModelConfig, WorkerConfig
from ..shared.errors import ConfigError
from ..shared.messages import ModelCard
from . import echo
from .engine_thread import EngineLike
from .extras import model_stack

if TYPE_CHECKING:
    from .engine.detokenizer import TokenTable
    from .engine.model.runner import TransformersRunner

REAL: Final = "model"
"""Name of the engine that runs a model."""
_ECHO_BATCH_TOKENS: Final = 100_000_000
"""Nothing is prefilled, so the prefill budget must not be what limits."""

Progress = Callable[[str, float], None]
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


def load(
    kind: str,
    model: ModelConfig,
    worker: WorkerConfig,
    progress: Progress | None = None,
    on_tokenizer: OnTokenizer | None = None,
    profile: Path | None = None,
) -> Loaded:
    """Builds the engine; takes seconds, so call it off the event loop.

    Args:
        kind: `model`, `echo` or `echo:<ms per step>`.
        model: Which model, and in what precision.
        worker: Limits.
        progress: Called with a stage and its fraction done.
        on_tokenizer: Told of a model's tokenizer as soon as it is known.
        profile: Where its steps and kernels are timed to.

    Raises:
        ModelLoadError: The model cannot be found, read or held in memory.
        ConfigError: `kind` is no engine, or the profile cannot be written.
    """
    began = time.monotonic()
    name = kind.partition(":")[0]
    if profile is not None and name != REAL:
        raise ConfigError("profile", f"the engine {name} has no kernels to time")
    if name == "echo":
        return _load_echo(kind, model, worker, began)
    if name != REAL:
        problem = f"value {kind!r}; expected model, echo or echo:<ms per step>"
        raise ConfigError("engine", problem)
    with model_stack():
        return _load_model(model, worker, progress, on_tokenizer, began, profile)


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
        weights_version=echo.WEIGHTS_VERSION,
    )
    return Loaded(
        engine=echo.EchoEngine.from_name(kind, worker.max_running),
        card=card,
        bundle=None,
        block_size=worker.block_size,
        batch_tokens=_ECHO_BATCH_TOKENS,
        load_s=time.monotonic() - began,
    )


def _load_model(
    model: ModelConfig,
    worker: WorkerConfig,
    progress: Progress | None,
    on_tokenizer: OnTokenizer | None,
    began: float,
    profile: Path | None,
) -> Loaded:
    from .engine.model.resolve import resolve_model

    # Before the imports that take seconds: a wrong name is said at once.
    path = resolve_model(model.name, model.path, progress=progress)
    fingerprint, bundle, has_template = _tokenizer(path)
    if on_tokenizer is not None:
        on_tokenizer(fingerprint, bundle)
    with ThreadPoolExecutor(1) as beside:
        # Its parsing is native code, which runs while the weights are read.
        table = beside.submit(_read_table, path)
        runner = _load_runner(path, model, worker, _unless_failed(table, progress))
        tokens = table.result()
    engine = _engine(profile, runner, model, worker, tokens)
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
    )


def _engine(
    profile: Path | None,
    runner: "TransformersRunner",
    model: ModelConfig,
    worker: WorkerConfig,
    tokens: "TokenTable",
) -> EngineLike:
    options = {
        "max_running": worker.max_running,
        "prefill_chunk": worker.prefill_chunk,
        "prefix_cache": worker.prefix_cache,
        "step_target_ms": worker.step_target_ms,
        "kv_overcommit": worker.kv_overcommit,
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


def _unless_failed(table: "Future[TokenTable]", progress: Progress | None) -> Progress:
    """Returns a progress that ends the load of weights when the tokenizer is bad."""

    def report(stage: str, fraction: float) -> None:
        if table.done():
            table.result()
        if progress is not None:
            progress(stage, fraction)

    return report


def _load_runner(
    path: Path, model: ModelConfig, worker: WorkerConfig, progress: Progress | None
) -> "TransformersRunner":
    from .engine.model.gpu.graph_start import GraphWish
    from .engine.model.load import load_runner

    return load_runner(
        path,
        weights=model.weights,
        kv=model.kv,
        block_size=worker.block_size,
        num_blocks=worker.num_blocks,
        kv_memory_mb=worker.kv_memory_mb,
        max_context=worker.max_context,
        threads=worker.threads,
        device=worker.device,
        outlier_threshold=model.outlier_threshold,
        offload_layers=worker.offload_layers,
        graphs=GraphWish(
            max_running=worker.max_running,
            step_tokens=worker.max_running + worker.prefill_chunk,
            enabled=worker.cuda_graphs,
        ),
        progress=progress,
    )


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
