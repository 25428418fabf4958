"""What an adapter says of itself: peft's adapter_config.json, read strictly.

A field that changes what the adapter computes is either followed or refused by name:
an adapter that is served without it would answer wrongly and say nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from ....shared.errors import ModelLoadError
from ....shared.typed import shown
from .files import CONFIG_FILE
from .selection import (
    Selection,
    is_quick,
    parse_selection,
    require_pattern,
    slow_pattern,
)

MAX_RANK: Final = 256
"""Largest rank that is taken where nothing else is set."""
_READ: Final = frozenset(
    {
        "alpha_pattern",
        "base_model_name_or_path",
        "bias",
        "exclude_modules",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "use_rslora",
    }
)
"""Fields that are looked at."""
_WITHOUT_EFFECT: Final = frozenset(
    {
        "auto_mapping",
        "corda_config",
        "eva_config",
        "fan_in_fan_out",  # the base's own layout says it
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
"""Fields of training and of where it came from."""
_PLAIN_STARTS: Final = (None, True, False, "gaussian", "eva", "orthogonal")
"""Ways to draw the first weights that leave those of the base alone."""


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA's settings."""

    path: Path
    """The adapter's directory."""
    rank: int
    alpha: float
    use_rslora: bool
    base: str
    """What it was trained on, as its trainer named it; paths move, so a remark."""
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    selection: Selection
    """The layers that it names."""

    def rank_of(self, module: str) -> int:
        """Returns the rank of a module by its dotted name in the base model."""
        return int(self._by_pattern(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Returns the factor on B @ A of a module."""
        alpha = self._by_pattern(self.alpha_pattern, module, self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    @staticmethod
    def _by_pattern(
        patterns: Mapping[str, int] | Mapping[str, float], module: str, default: float
    ) -> float:
        for pattern, value in patterns.items():
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                return value
        return default


def parse_config(path: Path, raw: bytes) -> AdapterConfig:
    """Checks an adapter's settings.

    Args:
        path: The adapter's directory.
        raw: What its adapter_config.json says.

    Raises:
        ModelLoadError: It is no LoRA, or one with parts that are not served.
    """
    file = path / CONFIG_FILE
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(
            f"{file} is no JSON ({error}); expected what peft's save_pretrained wrote"
        ) from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} is no JSON object")
    _check_kind(file, content)
    return AdapterConfig(
        path=path,
        rank=_whole(file, "r", content.get("r", 8)),
        alpha=_number(file, "lora_alpha", content.get("lora_alpha", 8)),
        use_rslora=_flag(file, "use_rslora", content.get("use_rslora")),
        base=str(content.get("base_model_name_or_path") or ""),
        rank_pattern={
            key: _whole(file, f"rank_pattern[{key}]", value)
            for key, value in _patterns(file, content, "rank_pattern").items()
        },
        alpha_pattern={
            key: _number(file, f"alpha_pattern[{key}]", value)
            for key, value in _patterns(file, content, "alpha_pattern").items()
        },
        selection=parse_selection(file, content),
    )


def _check_kind(file: Path, content: Mapping[str, object]) -> None:
    kind = content.get("peft_type")
    if kind != "LORA":
        raise ModelLoadError(
            f"{file}: peft_type is {shown(kind)}; only LORA adapters are served"
        )
    if content.get("bias") not in (None, "none"):
        raise ModelLoadError(
            f"{file}: bias is {shown(content['bias'])}; adapters that change biases "
            "are not served: train with bias='none', or merge it with peft"
        )
    start = content.get("init_lora_weights")
    if start not in _PLAIN_STARTS:
        raise ModelLoadError(
            f"{file}: init_lora_weights is {shown(start)}, which changes the base's "
            "weights before training, so the adapter fits no other base; save it again "
            "with path_initial_model_for_weight_conversion, which makes it a plain LoRA"
        )
    for name, value in content.items():
        if value and name not in _READ and name not in _WITHOUT_EFFECT:
            raise ModelLoadError(
                f"{file}: {name} is {shown(value)}, which is not served; merge the "
                "adapter with peft and serve the result, or, if the field changes "
                "nothing of what it computes, remove it"
            )


def _patterns(
    file: Path, content: Mapping[str, object], name: str
) -> dict[str, object]:
    patterns = content.get(name) or {}
    if not isinstance(patterns, dict):
        raise ModelLoadError(f"{file}: {name} is {shown(patterns)}; expected an object")
    for pattern in patterns:
        require_pattern(file, name, pattern)
        if not is_quick(pattern):
            raise slow_pattern(file, name, pattern)
    return patterns


def _flag(file: Path, name: str, value: object) -> bool:
    if value is not None and not isinstance(value, bool):
        raise ModelLoadError(
            f"{file}: {name} is {shown(value)}; expected true or false"
        )
    return bool(value)


def _whole(file: Path, name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelLoadError(
            f"{file}: {name} is {shown(value)}; expected a whole number from 1"
        )
    return value


def _number(file: Path, name: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # of an integer of hundreds of digits
            number = math.inf
        if math.isfinite(number):
            return number
    raise ModelLoadError(f"{file}: {name} is {shown(value)}; expected a finite number")
