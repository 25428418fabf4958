"""Which layers an adapter's settings name, matched as peft matches them. Pure.

peft adapts what `target_modules` and the rest name, and leaves out every other tensor
of the file without a word: settings and tensors have to agree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from ....shared.errors import ModelLoadError
from ....shared.typed import shown

_ALL_LINEAR: Final = "all-linear"
_MOST_REPEATS: Final = 3
"""Parts of a pattern that may be repeated: with n of them, and names of m characters,
a pattern that fits nowhere takes about m ** (n + 1) steps."""
Names = str | tuple[str, ...]
"""A pattern of whole names, or ends of names."""


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """What an adapter's settings say of the layers that it changes."""

    targets: Names | None
    """None: they do not say, or in a pattern that may take too long to match."""
    excluded: Names
    layers: frozenset[int] | None
    """Indices of decoder layers; None: all."""
    layer_lists: tuple[str, ...]
    """Patterns of the names of lists of layers; empty: any."""
    notes: tuple[str, ...]
    """What could not be checked."""

    @property
    def is_exact(self) -> bool:
        """Whether each layer that is named has to have weights."""
        return self.targets is not None

    def names(self, module: str) -> bool:
        """Returns whether a layer is named.

        Args:
            module: Its dotted name, spelled as in the adapter.
        """
        if self.targets is None:
            return True
        if _fits(self.excluded, module):
            return False
        if self.targets == _ALL_LINEAR:
            return True
        return _fits(self.targets, module) and self._in_layers(module)

    def _in_layers(self, module: str) -> bool:
        if self.layers is None:
            return True
        for pattern in self.layer_lists or ("[^.]*",):
            found = re.match(rf"(?:^|.*?\.)(?:{pattern})\.(?P<at>\d+)\.", module)
            if found is not None:
                return int(found["at"]) in self.layers
        return False


def _fits(names: Names, module: str) -> bool:
    if isinstance(names, str):
        return bool(names) and re.fullmatch(names, module) is not None
    return any(f".{module}".endswith(f".{end}") for end in names)


def parse_selection(file: Path, content: Mapping[str, object]) -> Selection:
    """Checks the settings that name layers.

    Args:
        file: Of the settings, for messages.
        content: What it says.

    Raises:
        ModelLoadError: One of them is of the wrong form.
    """
    targets = _names(file, content, "target_modules")
    excluded = _names(file, content, "exclude_modules") or ()
    layers = _layers(file, content.get("layers_to_transform"))
    lists = _names(file, content, "layers_pattern") or ()
    lists = (lists,) if isinstance(lists, str) else lists
    if layers is not None and isinstance(targets, str):
        raise ModelLoadError(
            f"{file}: layers_to_transform stands beside a target_modules that is no "
            "list, which peft refuses as well; say the layers in one of them"
        )
    for pattern in lists:
        require_pattern(file, "layers_pattern", pattern)
        if not is_quick(pattern):
            raise slow_pattern(file, "layers_pattern", pattern)
    if isinstance(targets, str) and targets.lower() == _ALL_LINEAR:
        targets = _ALL_LINEAR
    notes = []
    for name, value in (("target_modules", targets), ("exclude_modules", excluded)):
        if not isinstance(value, str):
            continue
        require_pattern(file, name, value)
        if not is_quick(value):
            targets = None
            notes.append(
                f"{name} is a pattern that may take too long to match, so the layers "
                "that have weights were not compared with it: all of them are served"
            )
    return Selection(
        targets=targets,
        excluded=excluded,
        layers=layers,
        layer_lists=lists,
        notes=tuple(notes),
    )


def require_pattern(file: Path, name: str, pattern: str) -> None:
    """Refuses what is no regular expression.

    Raises:
        ModelLoadError: Names the setting.
    """
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ModelLoadError(
            f"{file}: {name} has {shown(pattern)}, which is no pattern ({error})"
        ) from error


def is_quick(pattern: str) -> bool:
    """Returns whether a pattern is sure to be matched soon.

    A repeated group may take for ever to fit nowhere, and nothing else runs then.
    """
    repeats = len(re.findall(r"[*+{]", pattern))
    return repeats <= _MOST_REPEATS and not re.search(r"\)[*+{]", pattern)


def slow_pattern(file: Path, name: str, pattern: str) -> ModelLoadError:
    """Returns the error of a pattern that is not tried."""
    return ModelLoadError(
        f"{file}: {name} has {shown(pattern)}, which may take too long to match; name "
        "the layers in full"
    )


def _names(file: Path, content: Mapping[str, object], name: str) -> Names | None:
    value = content.get(name)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return tuple(value)
    raise ModelLoadError(
        f"{file}: {name} is {shown(value)}; expected a list of names, or a pattern"
    )


def _layers(file: Path, value: object) -> frozenset[int] | None:
    if value is None or value == []:
        return None
    given = value if isinstance(value, list) else [value]
    if all(isinstance(one, int) and not isinstance(one, bool) for one in given):
        return frozenset(given)
    raise ModelLoadError(
        f"{file}: layers_to_transform is {shown(value)}; expected indices of layers"
    )
