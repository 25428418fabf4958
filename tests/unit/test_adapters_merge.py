"""`tokenmill lora merge`: the same checkpoint with the adapter in it, or nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog
import torch
from safetensors.torch import load_file
from support.tiny_adapters import save_tiny_adapter
from support.tiny_models import save_tiny_model
from typer.testing import CliRunner

from tokenmill.__main__ import build_app
from tokenmill.shared.errors import ModelLoadError
from tokenmill.workers.engine.adapters import merge
from tokenmill.workers.engine.adapters.merge_check import TOLERANCES
from tokenmill.workers.engine.adapters.merging import merge_adapter
from tokenmill.workers.engine.adapters.weights import LoraPair


@pytest.fixture(scope="module")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("merged")
    return lambda variant: (
        root / variant if (root / variant).exists() else save_tiny_model(variant, root)
    )


def in_shards(base: Path, directory: Path, dtype: torch.dtype) -> Path:
    """The same model in several files, in another type."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    model.save_pretrained(directory, max_shard_size="60KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((base / name).read_bytes())
    return directory


def silent(_stage: str, _fraction: float) -> None:
    pass


def merged_into(base: Path, adapter: Path, output: Path, **options: object):
    return merge_adapter(base, adapter, output, progress=silent, threads=1, **options)


@pytest.mark.parametrize("variant", ["llama-tied", "gpt2", "falcon-grouped"])
def test_a_merged_model_is_base_plus_adapter(
    variant: str, base_of: Callable[[str], Path], tmp_path: Path
) -> None:
    base = base_of(variant)
    adapter = save_tiny_adapter(base, tmp_path / "adapter", use_rslora=True)
    facts, lost, check = merged_into(base, adapter, tmp_path / "out")
    assert check.passed
    assert check.off < 1e-4 < 0.2 < check.effect
    assert lost < 1e-5
    assert facts.rank == 4
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        file.name for file in base.iterdir()
    }
    old = load_file(base / "model.safetensors")
    new = load_file(tmp_path / "out" / "model.safetensors")
    assert old.keys() == new.keys()
    adapted = {name for name in old if not torch.equal(old[name], new[name])}
    assert len(adapted) == len(load_file(adapter / "adapter_model.safetensors")) / 2


def test_a_checkpoint_of_many_files_keeps_files_types_and_index(
    base_of: Callable[[str], Path], tmp_path: Path
) -> None:
    base = in_shards(base_of("llama"), tmp_path / "base", torch.bfloat16)
    assert len(list(base.glob("*.safetensors"))) > 2
    (base / "tokenmill-calibration.safetensors").write_bytes(b"of the base alone")
    adapter = save_tiny_adapter(base, tmp_path / "adapter", ends=("o_proj", "up_proj"))
    _, lost, check = merged_into(base, adapter, tmp_path / "out")
    assert check.tolerance == 5e-2
    assert 1e-4 < check.off < 5e-2
    assert 1e-4 < lost < 0.1
    for file in base.glob("model*"):
        assert (tmp_path / "out" / file.name).stat().st_size == file.stat().st_size
    assert not list((tmp_path / "out").glob("tokenmill-*"))


def test_what_is_wrong_leaves_nothing(
    base_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_of("llama")
    adapter = save_tiny_adapter(base, tmp_path / "adapter")
    right = merge._Merger._merged

    def wrong(self, file: Path, name: str, weight: torch.Tensor) -> torch.Tensor:
        """One layer of all gets the adapter at half its strength."""
        if "layers.1.mlp.down_proj" in name:
            pair = self._changes[name]
            self._changes[name] = LoraPair(pair.a, pair.b, pair.scale / 2)
        return right(self, file, name, weight)

    monkeypatch.setattr(merge._Merger, "_merged", wrong)
    with pytest.raises(ModelLoadError, match=r"logits are off by .* was not made"):
        merged_into(base, adapter, tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["adapter"]


def test_a_small_adapter_that_was_left_out_is_missed(
    base_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its effect alone is less than what rounding to the type may come to."""
    base = in_shards(base_of("llama"), tmp_path / "base", torch.bfloat16)
    adapter = save_tiny_adapter(base, tmp_path / "adapter", size=0.022)
    *_, check = merged_into(base, adapter, tmp_path / "right")
    assert check.off < check.tolerance == check.effect / 2 < TOLERANCES["BF16"]
    monkeypatch.setattr(merge._Merger, "_merged", lambda _self, _file, _name, old: old)
    with pytest.raises(ModelLoadError, match=r"logits are off by .* was not made"):
        merged_into(base, adapter, tmp_path / "wrong")
    zero = save_tiny_adapter(base, tmp_path / "zero", size=0.0)
    *_, check = merged_into(base, zero, tmp_path / "same")
    assert check.off == check.effect == 0


def test_an_output_that_is_there_is_left_alone(
    base_of: Callable[[str], Path], tmp_path: Path
) -> None:
    base = base_of("llama")
    adapter = save_tiny_adapter(base, tmp_path / "adapter")
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelLoadError, match="exists already"):
        merged_into(base, adapter, tmp_path / "out")
    with pytest.raises(ModelLoadError, match="cannot be made"):
        merged_into(base, adapter, tmp_path / "nowhere" / "out")


def test_weights_that_overflow_are_refused(
    base_of: Callable[[str], Path], tmp_path: Path
) -> None:
    base = in_shards(base_of("llama"), tmp_path / "base", torch.float16)
    adapter = save_tiny_adapter(base, tmp_path / "adapter", size=1000.0)
    with pytest.raises(ModelLoadError, match=r"not be finite in torch\.float16"):
        merged_into(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_without_bounds_is_blamed_not_the_base(
    base_of: Callable[[str], Path], tmp_path: Path
) -> None:
    base = base_of("llama")
    adapter = save_tiny_adapter(base, tmp_path / "huge", size=1e15)
    with pytest.raises(ModelLoadError, match=r"not finite with .*/huge: its training"):
        merged_into(base, adapter, tmp_path / "out")
    settings = json.loads((adapter / "adapter_config.json").read_bytes())
    (adapter / "adapter_config.json").write_text(json.dumps({**settings, "r": 10**15}))
    with pytest.raises(ModelLoadError, match=r"give .* rank 10{15}, and tensor") as why:
        merged_into(base, adapter, tmp_path / "out")
    assert "base" not in str(why.value).replace(str(tmp_path), "").replace("base_m", "")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """A command that runs in this process logs to a stream that ends with it."""
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("logging_as_before")
def test_the_command_says_what_came_of_it(
    base_of: Callable[[str], Path], tmp_path: Path
) -> None:
    base = base_of("llama")
    adapter = save_tiny_adapter(base, tmp_path / "adapter", ends=("q_proj",))
    wanted = ["--base", str(base), "--adapter", str(adapter), "--threads", "1"]
    output = str(tmp_path / "out")
    done = CliRunner().invoke(build_app(), ["lora", "merge", *wanted, "-o", output])
    assert done.exit_code == 0, done.output
    assert "adapter of rank 4 on q_proj merged into" in done.stdout
    assert "warning" not in done.stderr
    file = adapter / "adapter_config.json"
    settings = json.loads(file.read_bytes()) | {"base_model_name_or_path": "x/other"}
    file.write_text(json.dumps(settings))
    again = [*wanted, "-o", str(tmp_path / "again"), "--json"]
    done = CliRunner().invoke(build_app(), ["lora", "merge", *again])
    assert "trained on 'x/other', the base here is" in done.stderr
    assert json.loads(done.stdout)["check"]["weights"] == "float32"
    done = CliRunner().invoke(build_app(), ["lora", "merge", *wanted, "-o", output])
    assert done.exit_code == ModelLoadError.exit_code
