"""The command `tokenmill inspect`: a model's budget, and advice on its precision."""

from typing import TYPE_CHECKING, Annotated, Final, get_args

import msgspec
import typer

from ..shared.cli_options import ConfigFile, PrintJson

if TYPE_CHECKING:
    from ..shared.config import Config, ModelConfig
    from .engine.model.inspection import Question

NOTHING_FITS: Final = 1
"""Exit code where advice was asked and there is none."""

_Model = Annotated[
    str, typer.Argument(help="Directory, .gguf file, hub id or built-in name.")
]
_Weights = Annotated[
    str | None, typer.Option(help="Precision of weights; else the settings'.")
]
_Kv = Annotated[
    str | None, typer.Option(help="Precision of the KV pool; else the settings'.")
]
_Device = Annotated[str, typer.Option(help="cpu or cuda.")]
_Typical = Annotated[
    int, typer.Option(min=1, help="Prompt and output of a typical request.")
]
_Slo = Annotated[
    float | None,
    typer.Option(min=0, help="Advise a precision for this time between tokens."),
]
_Memory = Annotated[
    float | None, typer.Option(min=0, help="Advise for a device with so many GiB.")
]
_Bandwidth = Annotated[
    float | None,
    typer.Option(min=0.001, help="Of the device's memory; else asked or measured."),
]
_Step = Annotated[
    float | None,
    typer.Option(min=0.001, help="A full decode step as measured (see doctor)."),
]
_Running = Annotated[
    int | None, typer.Option(min=1, help="Sequences that run at once.")
]


def inspect_model(
    model: _Model,
    config: ConfigFile = None,
    weights: _Weights = None,
    kv: _Kv = None,
    device: _Device = "cpu",
    typical_tokens: _Typical = 512,
    slo_ms_per_token: _Slo = None,
    memory_gb: _Memory = None,
    bandwidth_gb_s: _Bandwidth = None,
    step_ms: _Step = None,
    running: _Running = None,
    as_json: PrintJson = False,
) -> None:
    """Tell what a model would take here, without loading it, and what to run it in."""
    from ..shared.config_load import load_config
    from ..shared.logging import configure
    from .extras import model_stack

    with model_stack():
        from .engine.model.inspection import describe
        from .engine.model.resolve import resolve_model
        from .inspect_advice import AdviceOptions, advise_for
    settings = load_config(config).config
    configure(settings.log, "inspect")
    chosen = _model_of(settings, model)
    question = _question(
        settings, chosen, weights, kv, device, typical_tokens, memory_gb
    )
    facts = describe(resolve_model(chosen.name, chosen.path), question)
    advice = None
    if any(one is not None for one in (slo_ms_per_token, memory_gb, step_ms)):
        options = AdviceOptions(
            slo_ms=slo_ms_per_token,
            bandwidth=bandwidth_gb_s and bandwidth_gb_s * 1e9,
            step_ms=step_ms,
            running=running or settings.worker.max_running,
            threads=settings.worker.threads,
        )
        advice = advise_for(facts, question, options)
        facts["advice"] = msgspec.to_builtins(advice)
    if as_json:
        print(msgspec.json.encode(facts).decode())
    else:
        from .inspect_view import show

        show(facts, advice)
    if advice is not None and advice.chosen is None:
        raise typer.Exit(NOTHING_FITS)


def _model_of(settings: "Config", wanted: str) -> "ModelConfig":
    """A model of the settings by its name, else whatever the name stands for."""
    from ..shared.config import ModelConfig

    found = next((one for one in settings.models if one.name == wanted), None)
    return found or ModelConfig(name=wanted)


def _question(
    settings: "Config",
    model: "ModelConfig",
    weights: str | None,
    kv: str | None,
    device: str,
    typical_tokens: int,
    memory_gb: float | None,
) -> "Question":
    from ..shared.errors import ConfigError
    from .engine.model.inspection import KINDS, Question
    from .engine.model.quantize import Weights

    worker = settings.worker
    values = {
        "weights": weights or model.weights,
        "kv": kv or model.kv,
        "block_size": worker.block_size,
        "num_blocks": worker.num_blocks,
        "kv_memory_mb": worker.kv_memory_mb,
        "max_context": worker.max_context,
        "typical_tokens": typical_tokens,
        "device": device,
        "memory_bytes": None if memory_gb is None else int(memory_gb * 1024**3),
    }
    known = {"kv": KINDS, "device": ("cpu", "cuda")}
    if weights is not None:
        known["weights"] = get_args(Weights)
    for key, names in known.items():
        if values[key] not in names:
            problem = f"value {values[key]!r}; expected one of {', '.join(names)}"
            raise ConfigError(key, problem, "command line")
    return msgspec.convert(values, Question)
