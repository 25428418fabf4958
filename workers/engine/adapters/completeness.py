"""Whether an adapter has weights for all that its settings name, in all layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from ....shared.errors import ModelLoadError
from .checkpoint import of_another_base
from .config import AdapterConfig

if TYPE_CHECKING:
    from .targets import BaseLinears

_NAMED_IN_MESSAGE: Final = 5


def check_complete(
    config: AdapterConfig, found: Mapping[str, str], base: BaseLinears
) -> None:
    """Refuses an adapter whose weights are not those of the layers that it names.

    Args:
        config: Its settings.
        found: Layers that have weights, by name in the model -> as the adapter spells
            them.
        base: Where it is to be applied.

    Raises:
        ModelLoadError: Weights are there that the settings do not name, or the other
            way round, or it was made for a base with fewer layers.
    """
    _check_named(config, found)
    _check_all(config, found, base)
    _check_depth(config, found, base)


def trained_on(config: AdapterConfig) -> str:
    """Returns what an adapter says of its base, for the end of a message."""
    return f" (it was trained on {config.base!r})" if config.base else ""


def _check_named(config: AdapterConfig, found: Mapping[str, str]) -> None:
    """Refuses weights that the settings do not name: peft would leave them out, and
    nobody can tell which of the two was meant.
    """
    beyond = [
        module for module, name in found.items() if not config.selection.names(name)
    ]
    if beyond:
        raise ModelLoadError(
            f"{config.path} has weights for {len(beyond)} layers that its settings "
            f"(target_modules, exclude_modules, layers_to_transform) do not name "
            f"({', '.join(beyond[:_NAMED_IN_MESSAGE])}); peft would leave them out. "
            "Name them, or save the adapter again without them"
        )


def _check_all(
    config: AdapterConfig, found: Mapping[str, str], base: BaseLinears
) -> None:
    """Refuses an adapter of which layers have got lost."""
    if not config.selection.is_exact:
        return
    prefix = f"{base.prefix}."
    bare = not any(name.startswith(prefix) for name in found.values())
    missing = [
        module
        for module in base.shapes
        if module not in found
        and config.selection.names(module.removeprefix(prefix) if bare else module)
    ]
    if missing:
        some = ", ".join(missing[:_NAMED_IN_MESSAGE])
        raise ModelLoadError(
            f"{config.path} has no weights for {len(missing)} of the layers that its "
            f"settings name ({some}); it is damaged, or an adapter of another "
            f"base{trained_on(config)}"
        )


def _check_depth(
    config: AdapterConfig, found: Mapping[str, str], base: BaseLinears
) -> None:
    """Refuses an adapter of a base with fewer layers, which names all of them in full.

    Its shapes fit. Whoever means the first layers alone can say so.
    """
    selection = config.selection
    if not isinstance(selection.targets, tuple) or selection.layers is not None:
        return
    depth, whole = _depth_of(found, base), _depth_of(base.shapes, base)
    some = {module for module in base.shapes if _layer_of(module, base) < depth}
    if depth == whole or some != set(found):
        return
    if of_another_base(config.base, base.origin):
        raise ModelLoadError(
            f"{config.path} changes all linear layers of the first {depth} decoder "
            f"layers, and {base.origin} has {whole}: it is an adapter of another "
            f"base{trained_on(config)}. If these layers alone are meant, say so with "
            f"layers_to_transform 0 to {depth - 1} in its settings"
        )


def _depth_of(modules: Iterable[str], base: BaseLinears) -> int:
    """Decoder layers up to the last that one of these is in."""
    return 1 + max(_layer_of(module, base) for module in modules)


def _layer_of(module: str, base: BaseLinears) -> int:
    return int(module.removeprefix(f"{base.layers}.").partition(".")[0])
