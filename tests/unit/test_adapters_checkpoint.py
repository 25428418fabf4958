"""Adapters are checked by name, shape, setting and value before anyone sees them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_adapters import save_tiny_adapter
from support.tiny_models import save_tiny_model

from tokenmill.shared.errors import ModelLoadError
from tokenmill.workers.engine.adapters.checkpoint import (
    AdapterFacts,
    AdapterFiles,
    adapter_digest,
    open_adapter,
)
from tokenmill.workers.engine.adapters.config import MAX_RANK
from tokenmill.workers.engine.adapters.targets import base_linears
from tokenmill.workers.engine.adapters.weights import read_adapter

FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
SECOND = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
Change = Callable[[dict[str, object], dict[str, torch.Tensor]], None]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("adapted"))


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return save_tiny_adapter(base, tmp_path / "good", rank=4, alpha=8)


def check(adapter: Path, base: Path, max_rank: int = MAX_RANK) -> AdapterFacts:
    return read_adapter(adapter, base_linears(base), max_rank=max_rank).facts


def changed(adapter: Path, change: Change) -> Path:
    config, file = (
        adapter / "adapter_config.json",
        adapter / "adapter_model.safetensors",
    )
    settings, tensors = json.loads(config.read_bytes()), load_file(file)
    change(settings, tensors)
    config.write_text(json.dumps(settings))
    save_file(tensors, file)
    return adapter


def setting(**values: object) -> Change:
    return lambda settings, _tensors: settings.update(values)


def tensor(name: str, value: torch.Tensor) -> Change:
    return lambda _settings, tensors: tensors.update({name: value})


def without(name: str) -> Change:
    return lambda _settings, tensors: tensors.pop(name)


def moved(old: str, new: str) -> Change:
    def change(_settings: object, tensors: dict[str, torch.Tensor]) -> None:
        for name in [one for one in tensors if old in one]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def test_a_good_adapter_is_described(adapter: Path, base: Path) -> None:
    facts = check(adapter, base)
    assert (facts.rank, facts.alpha) == (4, 8.0)
    assert facts.targets == (
        "down_proj",
        "gate_proj",
        "k_proj",
        "o_proj",
        "q_proj",
        "up_proj",
        "v_proj",
    )
    assert facts.bytes == (adapter / "adapter_model.safetensors").stat().st_size
    assert facts.base == str(base)
    weights = read_adapter(adapter, base_linears(base))
    assert weights.facts == facts
    assert len(weights.pairs) == 14
    pair = weights.pairs["model.layers.1.mlp.down_proj"]
    assert pair.a.shape == (4, 80)
    assert pair.b.shape == (48, 4)
    assert pair.scale == 2.0


def test_the_digest_is_that_of_the_content(adapter: Path, base: Path) -> None:
    before = adapter_digest(adapter)
    assert len(before) == 64
    assert adapter_digest(adapter) == before
    changed(adapter, setting(lora_alpha=9))
    after = adapter_digest(adapter)
    changed(adapter, tensor(FIRST, torch.zeros(4, 48)))
    assert len({before, after, adapter_digest(adapter)}) == 3


REFUSED: dict[str, tuple[Change, str]] = {
    "another method": (setting(peft_type="IA3"), "'IA3'; only LORA"),
    "DoRA": (setting(use_dora=True), "use_dora is true, which is not served"),
    "biases": (setting(bias="all"), "bias is 'all'"),
    "whole modules": (setting(modules_to_save=["lm_head"]), "modules_to_save"),
    "a start that changes the base": (
        setting(init_lora_weights="pissa_niter_4"),
        "path_initial_model_for_weight_conversion",
    ),
    "an unknown setting": (setting(use_spirals=3), "use_spirals is 3"),
    "no rank": (setting(r=0), "r is 0; expected a whole number from 1"),
    "no alpha": (setting(lora_alpha="much"), "lora_alpha is 'much'"),
    "no pattern": (setting(rank_pattern={"(": 2}), "which is no pattern"),
    "a pattern that never ends": (
        setting(rank_pattern={r"(\w*)*x": 2}),
        "may take too long to match",
    ),
    "a pattern of many repeats": (
        setting(alpha_pattern={".*.*.*.*x": 2}),
        "may take too long to match",
    ),
    "a flag that is none": (setting(use_rslora="no"), "use_rslora is 'no'"),
    "an endless alpha": (setting(lora_alpha=10**400), "expected a finite number"),
    "an endless rank": (setting(r=10**400), "has rank 1000.*at most 256 is served"),
    "an infinite alpha": (setting(lora_alpha=1e400), "expected a finite number"),
    "another rank": (
        setting(r=5),
        r"\(r, rank_pattern\) give .*down_proj rank 5, and tensor .* has rank 4",
    ),
    "another rank by a pattern": (
        setting(rank_pattern={"q_proj": 16}),
        r"q_proj rank 16, and tensor .* has rank 4",
    ),
    "layers that are not named": (
        setting(target_modules=["q_proj", "v_proj", "mlp.up_proj"]),
        r"weights for 8 layers that its settings .* do not name .*peft would leave",
    ),
    "modules beyond a pattern": (
        setting(target_modules=r".*self_attn\..*"),
        r"weights for 6 layers .*layers\.0\.mlp\.down_proj",
    ),
    "excluded layers": (
        setting(exclude_modules=["k_proj"]),
        r"weights for 2 layers .*k_proj",
    ),
    "layers beyond the indices": (
        setting(layers_to_transform=1, layers_pattern=["layers"]),
        r"weights for 7 layers .*layers\.0\.",
    ),
    "names that are none": (setting(target_modules={"a": 1}), "expected a list of n"),
    "indices that are none": (setting(layers_to_transform=["1"]), "expected indices"),
    "indices beside a pattern": (
        setting(target_modules=".*proj", layers_to_transform=[0]),
        "which peft refuses as well",
    ),
    "a pattern of names that is none": (
        setting(target_modules="("),
        "which is no pattern",
    ),
    "the head": (
        moved("model.layers.0.self_attn.q_proj", "lm_head"),
        "targets lm_head, outside of the decoder layers",
    ),
    "an embedding": (
        tensor("base_model.model.model.embed_tokens.lora_embedding_A", torch.ones(1)),
        "adapts an embedding",
    ),
    "a magnitude": (
        tensor(f"{FIRST[:-14]}lora_magnitude_vector.weight", torch.ones(48)),
        "belongs to DoRA",
    ),
    "a whole weight": (
        tensor("base_model.model.lm_head.weight", torch.ones(1)),
        "replaces a whole weight",
    ),
    "an unknown layer": (
        moved("layers.1.mlp", "layers.7.mlp"),
        "targets model.layers.7.mlp.down_proj, which .* does not have",
    ),
    "another base": (
        tensor(FIRST, torch.ones(4, 64)),
        "is an adapter of another base .it was trained on",
    ),
    "half a pair": (without(SECOND), "lacks lora_B of model.layers.0.self_attn.q_proj"),
    "lost layers": (
        moved("model.layers.1.mlp.up_proj.lora", "model.layers.1.mlp.up_proj.gone"),
        "gone_A",
    ),
    "integers": (
        tensor(FIRST, torch.ones(4, 48, dtype=torch.int8)),
        "is of type",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_bad_adapter_is_refused_by_name(what: str, adapter: Path, base: Path) -> None:
    change, message = REFUSED[what]
    changed(adapter, change)
    with pytest.raises(ModelLoadError, match=message):
        check(adapter, base)


def test_an_adapter_that_lost_layers_is_refused(adapter: Path, base: Path) -> None:
    def lose(_settings: object, tensors: dict[str, torch.Tensor]) -> None:
        for name in [one for one in tensors if "layers.1.mlp.up_proj" in one]:
            del tensors[name]

    changed(adapter, lose)
    with pytest.raises(ModelLoadError, match=r"no weights for 1 of .*1\.mlp\.up_proj"):
        check(adapter, base)
    # A layer that the settings leave out is not missed, whichever says so.
    for settings in (
        {"exclude_modules": r"model\.layers\.1\.mlp\.up_proj"},
        {"exclude_modules": ["1.mlp.up_proj"]},
        {"exclude_modules": None, "target_modules": None},
    ):
        changed(adapter, setting(**settings))
        assert check(adapter, base).rank == 4


@pytest.mark.parametrize(
    "settings",
    [
        {"layers_to_transform": [0, 1]},
        {"exclude_modules": ["k_proj"]},
        {"target_modules": r".*\.mlp\..*"},
    ],
)
def test_layers_are_missed_whatever_else_the_settings_say(
    settings: dict[str, object], base: Path, tmp_path: Path
) -> None:
    path = save_tiny_adapter(base, tmp_path / "part", ends=("up_proj", "down_proj"))
    named = {"target_modules": ["up_proj", "down_proj", "gate_proj"], **settings}
    changed(path, setting(**named))
    with pytest.raises(ModelLoadError, match=r"no weights for 2 .*0\.mlp\.gate_proj"):
        check(path, base)


def test_layers_of_some_indices_are_enough(base: Path, tmp_path: Path) -> None:
    path = save_tiny_adapter(base, tmp_path / "upper", layers_to_transform=[1])

    def lose(_settings: object, tensors: dict[str, torch.Tensor]) -> None:
        for name in [one for one in tensors if ".layers.0." in one]:
            del tensors[name]

    changed(path, lose)
    assert check(path, base).notes == ()
    changed(path, setting(target_modules="All-Linear", layers_to_transform=None))
    with pytest.raises(ModelLoadError, match=r"no weights for 7 .*layers\.0\."):
        check(path, base)


def test_an_adapter_of_a_base_with_fewer_layers_is_refused(
    adapter: Path, base: Path
) -> None:
    """All-linear names each layer in full, and all shapes fit the deeper base."""

    def shallow(settings: dict[str, object], tensors: dict[str, torch.Tensor]) -> None:
        for name in [one for one in tensors if ".layers.1." in one]:
            del tensors[name]
        modules = [one for one in base_linears(base).shapes if ".layers.0." in one]
        settings.update(target_modules=modules, base_model_name_or_path="owner/small")

    changed(adapter, shallow)
    with pytest.raises(ModelLoadError, match=r"first 1 decoder .* has 2: .*'owner/sm"):
        check(adapter, base)
    # These layers alone of this base are meant, or somebody says so.
    for meant in (
        {"base_model_name_or_path": "owner/llama"},
        {"base_model_name_or_path": "owner/small", "layers_to_transform": [0]},
    ):
        changed(adapter, setting(**meant))
        assert check(adapter, base).rank == 4


def test_names_that_would_take_too_long_to_match_are_said_not_to_be_checked(
    adapter: Path, base: Path
) -> None:
    changed(adapter, setting(target_modules=r"(?:.*?(?:self_attn|mlp).*?(?:q|v).*?)+"))
    (note,) = check(adapter, base).notes
    assert "target_modules is a pattern that may take too long" in note


def test_a_base_of_another_name_is_noted(adapter: Path, base: Path) -> None:
    for same in ("owner/llama", "/elsewhere/LLAMA", ""):
        changed(adapter, setting(base_model_name_or_path=same))
        assert check(adapter, base).notes == ()
    changed(adapter, setting(base_model_name_or_path="owner/llama2"))
    (note,) = check(adapter, base).notes
    assert "trained on 'owner/llama2'" in note
    assert str(base) in note


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_value_that_is_not_finite_is_found(
    value: float, adapter: Path, base: Path
) -> None:
    weight = torch.zeros(48, 4)
    weight[7, 1] = value
    changed(adapter, tensor(SECOND, weight))
    with pytest.raises(ModelLoadError, match=r"q_proj\.lora_B\.weight has NaN or inf"):
        check(adapter, base)


def test_a_rank_beyond_the_bound_is_refused(adapter: Path, base: Path) -> None:
    assert check(adapter, base, max_rank=4).rank == 4
    with pytest.raises(ModelLoadError, match="has rank 4; at most 3 is served"):
        check(adapter, base, max_rank=3)


def test_a_pickle_and_a_cut_file_are_refused(adapter: Path, base: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-10])
    with pytest.raises(ModelLoadError, match="safetensors"):
        check(adapter, base)
    file.rename(adapter / "adapter_model.bin")
    with pytest.raises(ModelLoadError, match="is a pickle, which is never read"):
        check(adapter, base)
    with pytest.raises(ModelLoadError, match=r"adapter_config\.json cannot be read"):
        check(base, base)


def test_what_is_no_file_or_holds_more_than_it_says_is_not_read(
    adapter: Path, base: Path
) -> None:
    """A pipe would keep its reader for ever, a file without end would fill memory."""
    file = adapter / "adapter_model.safetensors"
    with file.open("r+b") as stream:
        stream.truncate(1 << 40)  # takes no disk
    with pytest.raises(ModelLoadError, match=r"more than the \d+ bytes"):
        check(adapter, base)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (adapter / name).unlink()
        os.mkfifo(adapter / name)
        with pytest.raises(ModelLoadError, match=rf"{name}.*not a regular file"):
            check(adapter, base)


def test_what_does_not_fit_is_refused_before_its_weights_are_read(
    adapter: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(adapter, setting(r=5))
    monkeypatch.setattr(AdapterFiles, "weights", lambda _files: pytest.fail("read"))
    with pytest.raises(ModelLoadError, match="rank 5, and tensor"):
        check(adapter, base)


def test_scales_follow_rank_alpha_and_patterns(base: Path, tmp_path: Path) -> None:
    path = save_tiny_adapter(
        base,
        tmp_path / "patterns",
        rank=4,
        alpha=8,
        ranks={"q_proj": 16},
        alpha_pattern={"layers.1.mlp.*": 2, "down_proj": 100},
        use_rslora=True,
    )
    config = open_adapter(path).config
    assert config.scale_of("model.layers.0.self_attn.k_proj") == 8 / 4**0.5
    assert config.scale_of("model.layers.0.self_attn.q_proj") == 8 / 16**0.5
    assert config.scale_of("model.layers.0.mlp.down_proj") == 100 / 4**0.5
    assert config.scale_of("model.layers.1.mlp.down_proj") == 2 / 4**0.5
    assert check(path, base).rank == 16


def test_names_with_and_without_the_models_prefix_are_one(
    base: Path, tmp_path: Path
) -> None:
    path = save_tiny_adapter(base, tmp_path / "bare", ends=("v_proj",))
    changed(path, moved("base_model.model.model.", "base_model.model."))
    assert check(path, base).targets == ("v_proj",)


def test_checking_needs_no_torch() -> None:
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "import tokenmill.workers.engine.adapters.checkpoint\n"
        "import tokenmill.workers.engine.adapters.cache\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
