"""The command `tokenmill plan`: how to run a model on devices that are given."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from ..shared.cli_options import ConfigFile, PrintJson

if TYPE_CHECKING:
    from ..shared.config import ModelConfig
    from .planning.ask import Ask
    from .planning.cards import Fleet
    from .planning.plan import Plan

NOTHING_DOES: Final = 1
"""Exit code where nothing keeps the target or the rate."""

_Model = Annotated[
    str,
    typer.Option(help="Directory, config.json, .gguf file, hub id or built-in name."),
]
_Gpus = Annotated[
    str, typer.Option(help="How many of which card, as 8xA100-80G, 4xL4, cpu, 2xcpu.")
]
_Slo = Annotated[
    str | None,
    typer.Option(
        "--slo-p99", help="Target for 99 % of requests, as 800ms or 1.5s; else none."
    ),
]
_Prompt = Annotated[int, typer.Option(min=1, help="Prompt tokens of a request.")]
_Output = Annotated[int, typer.Option(min=1, help="Output tokens of a request.")]
_Rate = Annotated[
    float | None, typer.Option(min=0.0001, help="Requests a second, at random times.")
]
_Weights = Annotated[str | None, typer.Option(help="Look at this precision alone.")]
_Kv = Annotated[str | None, typer.Option(help="Precision of the KV pool: int8.")]
_Tp = Annotated[int | None, typer.Option(min=1, help="Look at this degree alone.")]
_Running = Annotated[
    int | None, typer.Option(min=1, max=65536, help="Sequences at once, of a replica.")
]
_PerNode = Annotated[int, typer.Option(min=1, help="Cards that one host has.")]
_Memory = Annotated[float | None, typer.Option(help="GiB of a card, or of a host.")]
_Bandwidth = Annotated[
    float | None, typer.Option(help="Of a card's memory; a host's is measured.")
]
_Tflops = Annotated[
    float | None, typer.Option(help="Dense 16-bit rate; a host's is measured.")
]
_Link = Annotated[float | None, typer.Option(help="One way between cards of a host.")]
_Out = Annotated[
    Path | None, typer.Option(help="Write settings for `tokenmill up --config`.")
]


def plan_model(
    model: _Model,
    gpus: _Gpus,
    slo_p99: _Slo = None,
    prompt: _Prompt = 256,
    output: _Output = 128,
    rate: _Rate = None,
    weights: _Weights = None,
    kv: _Kv = None,
    tp: _Tp = None,
    running: _Running = None,
    gpus_per_node: _PerNode = 8,
    card_memory_gb: _Memory = None,
    bandwidth_gb_s: _Bandwidth = None,
    tflops: _Tflops = None,
    link_gb_s: _Link = None,
    config: ConfigFile = None,
    config_out: _Out = None,
    as_json: PrintJson = False,
) -> None:
    """Advise precision, tp, replicas, KV blocks and batch for devices, here or not."""
    from ..shared.config_load import load_config
    from ..shared.logging import configure
    from .planning.ask import parse_target
    from .planning.plan import make_plan
    from .planning.service import Request

    settings = load_config(config).config
    configure(settings.log, "plan")
    figures = (card_memory_gb, bandwidth_gb_s, tflops, link_gb_s)
    threads = settings.worker.threads
    named = _model_of(settings.models, model)
    ask = _ask(
        named,
        request=Request(prompt=prompt, output=output),
        slo_ms=None if slo_p99 is None else parse_target(slo_p99),
        rate=rate,
        weights=_one_of("weights", weights),
        kv=_one_of("kv", kv),
        tp=tp,
        running=running,
        block_size=settings.worker.block_size,
        fleet=_fleet(gpus, figures, threads, gpus_per_node),
    )
    plan = make_plan(ask)
    if config_out is not None and plan.chosen is not None:
        _write(config_out, ask, plan, named)
    _print(ask, plan, as_json=as_json)
    if plan.chosen is None:
        raise typer.Exit(NOTHING_DOES)


def _fleet(
    gpus: str, figures: tuple[float | None, ...], threads: int | None, per_node: int
) -> "Fleet":
    """Reads how many of which card, with the figures that go over the table's."""
    from .plan_host import Given, checked, find_card
    from .planning.cards import HOST, Fleet, parse_fleet

    names = ("memory_gb", "bandwidth_gb_s", "tflops", "link_gb_s")
    given = dict(zip(names, figures, strict=True))
    for name, value in given.items():
        checked("card_memory_gb" if name == "memory_gb" else name, value)
    count, card = parse_fleet(gpus)
    return Fleet(
        card=find_card(card, Given(**given), threads),
        count=count,
        per_node=1 if card.lower() == HOST else per_node,
    )


def _model_of(models: "tuple[ModelConfig, ...]", wanted: str) -> "ModelConfig":
    """A model of the settings by its name, else whatever the name stands for."""
    from ..shared.model_choice import model_named

    found = next((one for one in models if one.name == wanted), None)
    if found is not None:
        return found
    file = Path(wanted).expanduser()
    # A config.json is named after its directory, which `up` would be given.
    return model_named(str(file.parent) if file.name == "config.json" else wanted)


def _ask(named: "ModelConfig", **values: object) -> "Ask":
    """Reads the model's configuration and joins it with what is wanted."""
    from .engine.parallel.shard import check_degree, degrees
    from .plan_source import find_config
    from .planning.ask import Ask
    from .planning.refusal import check_served
    from .planning.shape import read_shape

    content, source = find_config(named.path or named.name)
    check_served(content, source)
    shape = read_shape(content, source)
    heads = {
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
    }
    tp = values["tp"]
    if isinstance(tp, int):
        check_degree(heads, tp)
        _check_fits_host(tp, values["fleet"])
    return msgspec.convert(
        {"model": named.name, "shape": shape, "degrees": degrees(heads), **values},
        Ask,
    )


def _check_fits_host(tp: int, fleet: object) -> None:
    """Refuses a degree that no host has the cards for; ranks of a CPU share it."""
    from ..shared.errors import ConfigError
    from .planning.cards import Fleet

    if not isinstance(fleet, Fleet) or fleet.card.is_host or fleet.replicas(tp):
        return
    most = min(fleet.count, fleet.per_node)
    raise ConfigError(
        "tp",
        f"value {tp}; a replica stays within one host, and a host has {most} of the "
        f"{fleet.count} {fleet.card.name}: give at most {most} (or --gpus-per-node)",
        "command line",
    )


def _one_of(key: str, value: str | None) -> str | None:
    """Refuses a precision that is not advised."""
    from ..shared.errors import ConfigError
    from .engine.model.sizes import PRECISIONS
    from .planning.parameters import KV_KINDS

    known = PRECISIONS if key == "weights" else KV_KINDS
    if value is not None and value not in known:
        problem = f"value {value!r}; expected one of {', '.join(known)}"
        raise ConfigError(key, problem, "command line")
    return value


def _write(file: Path, ask: "Ask", plan: "Plan", named: "ModelConfig") -> None:
    """Writes the settings and reads them back, as `tokenmill up` will."""
    from ..shared.config_load import load_config
    from ..shared.errors import ConfigError
    from .planning.settings import settings_toml

    if plan.chosen is None:
        return
    text = settings_toml(ask, plan.chosen, name=named.name, path=named.path)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        problem = f"{file} cannot be written: {error.strerror}"
        raise ConfigError("config-out", problem, "command line") from error
    load_config(file, {})


def _print(ask: "Ask", plan: "Plan", *, as_json: bool) -> None:
    from .planning.parameters import count_parameters
    from .planning.view import facts, shown
    from .tables import write_out

    counts = count_parameters(ask.shape)
    if as_json:
        print(msgspec.json.encode(facts(ask, counts, plan)).decode())
    else:
        write_out(shown(ask, counts, plan))
