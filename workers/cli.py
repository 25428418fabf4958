"""Commands of the worker: work, inspect, fetch."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ..shared.cli_options import ConfigFile, EngineKind, PrintJson, RedisUrl
from ..shared.cli_support import handle_errors
from ..shared.pool.checks import register_check
from .cli_calibrate import register as register_calibrate
from .cli_inspect import inspect_model
from .cli_lora_merge import register as register_lora_merge
from .cli_mps import register as register_mps
from .cli_plan import plan_model
from .cli_profile import register as register_profile

if TYPE_CHECKING:
    from ..shared.config import Config
    from ..shared.redis import Finding
    from .loading import Loaded

_Model = Annotated[
    str | None, typer.Option(help="Directory, .gguf file, hub id or built-in name.")
]
_Name = Annotated[str | None, typer.Option(help="Public name that producers ask for.")]
_Weights = Annotated[
    str | None,
    typer.Option(help="int8, float32, bfloat16, float16, nf4, int8-a8 or int8-bnb."),
]
_Kv = Annotated[str | None, typer.Option(help="int8, int4 or float32.")]
_Threads = Annotated[int | None, typer.Option(help="Compute threads.")]
_Tp = Annotated[
    int | None,
    typer.Option(min=1, max=64, help="Processes to split the model over."),
]
_Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.")]
_Version = Annotated[
    str | None, typer.Option(help="Which version of the model (models add).")
]
_Partition = Annotated[int, typer.Option(help="Partition it serves.")]
_Serves = Annotated[
    str | None,
    typer.Option(help="any, short or long: prompts that it is kept for."),
]
_Profile = Annotated[
    Path | None,
    typer.Option(help="Time steps and kernels into this file or directory."),
]


def register(app: typer.Typer) -> None:
    """Adds the commands to `app`."""
    app.command("work")(handle_errors(work))
    app.command("inspect")(handle_errors(inspect_model))
    app.command("plan")(handle_errors(plan_model))
    app.command("fetch")(handle_errors(fetch))
    register_calibrate(app)
    register_lora_merge(app)
    register_mps(app)
    register_profile(app)
    register_check(_check_worker)


def _check_worker(config: "Config") -> list["Finding"]:
    from .health import findings

    return findings(config)


async def work(
    model: _Model = None,
    name: _Name = None,
    url: RedisUrl = None,
    config: ConfigFile = None,
    weights: _Weights = None,
    kv: _Kv = None,
    threads: _Threads = None,
    tp: _Tp = None,
    device: _Device = None,
    engine: EngineKind = "model",
    version: _Version = None,
    partition: _Partition = 0,
    serves: _Serves = None,
    profile: _Profile = None,
) -> None:
    """Serve one model: take jobs from the queue until a signal drains this worker."""
    from ..shared.config_load import load_config
    from ..shared.connection import find_pool
    from ..shared.logging import configure
    from ..shared.pool.placement import check_asked
    from ..shared.pool.plan import SUPERVISED_VARIABLE
    from .cli_overrides import chosen_model, with_worker
    from .loading import check_engine
    from .progress import lines
    from .service import WorkOptions, serve
    from .share import within_share

    settings = with_worker(
        load_config(config), threads=threads, device=device, serves=serves
    )
    chosen = chosen_model(settings, model, name, weights=weights, kv=kv, tp=tp)
    check_engine(engine, chosen.tp, profile)
    configure(settings.log, "worker")
    if SUPERVISED_VARIABLE not in os.environ:  # else who supervises has looked
        check_asked(settings, os.environ)
    where = find_pool(url or settings.redis.url)
    if version is not None:
        from .version_choice import model_of_version

        given = model is not None
        chosen = await model_of_version(where, chosen, version, given=given)
    settings = msgspec.structs.replace(
        settings, worker=within_share(settings.worker, chosen)
    )
    options = WorkOptions(
        url=where, model=chosen, engine=engine, partition=partition, profile=profile
    )
    code = await serve(options, settings, _print_ready, lines(chosen.name, sys.stdout))
    raise typer.Exit(code)


def _print_ready(loaded: "Loaded", group: str) -> None:
    card = loaded.card
    print(
        f"ready: model {card.model}, group {group}, context {card.max_context} tokens, "
        f"loaded in {loaded.load_s:.1f} s",
        flush=True,
    )


def fetch(
    model: Annotated[
        str | None, typer.Argument(help="Hub id or built-in name; else the settings'.")
    ] = None,
    config: ConfigFile = None,
    as_json: PrintJson = False,
) -> None:
    """Bring a model here ahead of time, converted and ready to load."""
    from ..shared.config_load import load_config
    from ..shared.logging import configure
    from .extras import model_stack
    from .progress import bar

    with model_stack():
        from .engine.model.resolve import resolve_model

    settings = load_config(config).config
    configure(settings.log, "fetch")
    models = settings.models
    wanted = [(model, None)] if model else [(one.name, one.path) for one in models]
    found: dict[str, str] = {}
    for name, path in wanted:
        with bar(name, silent=as_json) as report:
            found[name] = str(resolve_model(name, path, progress=report))
        if not as_json:
            print(f"{name}: {found[name]}")
    if as_json:
        print(msgspec.json.encode(found).decode())
