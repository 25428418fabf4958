"""Several adapters in one batch against peft, each of its prompts run alone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support.generate_reference import NEAR_TIE, OUTPUT, generate, prompts
from support.tiny_adapters import save_tiny_adapter
from support.tiny_models import VARIANTS
from transformers import AutoModelForCausalLM

from tokenmill.shared.messages import Sampling
from tokenmill.workers.engine.adapters.checkpoint import adapter_digest
from tokenmill.workers.engine.adapters.serving import serve_adapters
from tokenmill.workers.engine.detokenizer import TokenTable
from tokenmill.workers.engine.engine import Engine
from tokenmill.workers.engine.model.families import FAMILIES
from tokenmill.workers.engine.model.load import load_runner
from tokenmill.workers.engine.request import EngineRequest

pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out"),  # peft corrects it
    pytest.mark.filterwarnings("ignore:The following .* keys did not match"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]
LENGTHS = (3, 40, 1, 18, 33, 12)
WHO = ("all", "some", None, "late", "all", "some")
"""Whose adapter each prompt gets; "late" is on the second layer alone."""
EXACT = {"weights": "float32", "kv": "float32"}
Answers = list[tuple[list[int], torch.Tensor]]


def adapters(base: Path, directory: Path) -> dict[str, Path]:
    some = ("v_proj", "down_proj", "c_proj", "query_key_value")
    return {
        "all": save_tiny_adapter(
            base, directory / "all", rank=6, alpha=5, use_rslora=True, size=0.15
        ),
        "some": save_tiny_adapter(
            base,
            directory / "some",
            ends=some,
            rank=3,
            ranks={"v_proj": 5},
            alpha=6,
            alpha_pattern={"down_proj": 2},
            seed=1,
            dtype=torch.bfloat16,
        ),
        "late": saved_by_peft(base, directory / "late"),
    }


def saved_by_peft(base: Path, directory: Path) -> Path:
    """An adapter on the second layer, as `save_pretrained` writes it."""
    model = float_model(base)
    turned = model.config.model_type == "gpt2"
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules="all-linear",
        fan_in_fan_out=turned,
        task_type="CAUSAL_LM",
    )
    wrapped = get_peft_model(model, config)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                late = ".1." in name
                parameter.copy_(torch.randn_like(parameter) * (0.3 if late else 0.0))
    wrapped.save_pretrained(directory)
    return directory


def float_model(base: Path):
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


def by_peft(base: Path, paths: Mapping[str, Path]) -> Answers:
    first, *more = paths
    model = PeftModel.from_pretrained(
        float_model(base), paths[first], adapter_name=first
    ).eval()
    for name in more:
        model.load_adapter(paths[name], adapter_name=name)
    answers = []
    for name, prompt in zip(WHO, prompts(LENGTHS), strict=True):
        if name is None:
            with model.disable_adapter():
                answers.append(generate(model, prompt))
        else:
            model.set_adapter(name)
            answers.append(generate(model, prompt))
    return answers


def by_engine(
    base: Path, paths: Mapping[str, Path], who=WHO, **options: object
) -> list[tuple[int, ...]]:
    """All prompts at once, in little room, in chunks."""
    runner = load_runner(base, num_blocks=32, threads=1, **options)
    cache = serve_adapters(runner, max_bytes=1 << 26)
    leases = [
        cache.load(name, path, adapter_digest(path)) for name, path in paths.items()
    ]
    table = TokenTable.from_directory(base)
    engine = Engine(
        runner,
        table,
        max_running=4,
        prefill_chunk=24,
        step_target_ms=0.0,
        adapters=cache,
    )
    for index, (prompt, name) in enumerate(zip(prompts(LENGTHS), who, strict=True)):
        engine.add(
            EngineRequest(
                id=str(index),
                token_ids=tuple(prompt),
                sampling=Sampling(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True),
                seed=index,
                adapter=name,
            )
        )
    for lease in leases:
        lease.release()
    outputs: dict[str, tuple[int, ...]] = {}
    while engine.has_work:
        for finished in engine.step().finished:
            assert finished.error is None
            outputs[finished.request_id] = finished.choices[0].token_ids
    engine.check_integrity()
    assert cache.stats().leased == 0
    return [outputs[str(index)] for index in range(len(LENGTHS))]


def certain(logits: torch.Tensor) -> int:
    """Tokens before the first near tie, where either is right."""
    margins = logits.topk(2).values.diff().abs()[:, 0]
    ties = (margins < NEAR_TIE).nonzero()
    return int(ties[0]) if len(ties) else OUTPUT


@pytest.mark.parametrize(
    "variant",
    [
        "llama",
        "llama-gelu",
        "mistral",
        "qwen2",
        "qwen3",
        "glm4",
        "gpt2",
        "falcon-grouped",
        "falcon-alibi",
    ],
)
def test_exact_mode_gives_what_peft_gives(
    variant: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    base = tiny_model(variant)
    paths = adapters(base, tmp_path)
    expected = by_peft(base, paths)
    can_fuse = FAMILIES[VARIANTS[variant][0]].llama_pattern
    check_answers(base, paths, expected, fused=can_fuse)
    if variant == "llama":
        check_answers(base, paths, expected, fused=False)
        plain = by_engine(base, {}, (None,) * len(WHO), **EXACT)
        for name, (ids, _), without in zip(WHO, expected, plain, strict=True):
            assert (ids == list(without)) == (name is None)  # each changes something
    gc.collect()


def check_answers(
    base: Path, paths: Mapping[str, Path], expected: Answers, *, fused: bool
) -> None:
    outputs = by_engine(base, paths, **EXACT, fused=fused)
    compared = 0
    for output, (ids, logits) in zip(outputs, expected, strict=True):
        count = certain(logits)
        assert list(output[:count]) == ids[:count]
        compared += count
    assert compared >= len(LENGTHS) * OUTPUT // 2, "too many near ties to judge"


@pytest.mark.parametrize("variant", ["llama", "qwen3", "gpt2", "falcon-grouped"])
def test_on_int8_weights_an_adapter_costs_no_more_than_the_base(
    variant: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Logits of the last prompt token: as far from peft's as INT8 is without one."""
    base = tiny_model(variant)
    paths = adapters(base, tmp_path)
    runner = load_runner(base, weights="int8", kv="int8", num_blocks=32, threads=1)
    cache = serve_adapters(runner, max_bytes=1 << 26)
    with cache.load("all", paths["all"], adapter_digest(paths["all"])):
        ours = {key: last_logits(runner, key) for key in (None, "all")}
    model = float_model(base)
    tokens = torch.tensor([prompts((40,))[0]])
    with torch.no_grad():
        theirs = {None: model(tokens).logits[0, -1]}
        wrapped = PeftModel.from_pretrained(model, paths["all"]).eval()
        theirs["all"] = wrapped(tokens).logits[0, -1]
    off = {key: relative(ours[key], theirs[key]) for key in ours}
    effect = relative(theirs["all"], theirs[None])
    assert effect > 0.2
    assert off["all"] < max(1.5 * off[None], 0.02)


def last_logits(runner, key: str | None) -> torch.Tensor:
    import numpy as np

    from tokenmill.workers.engine.batch import SequenceSlice, StepBatch

    prompt = prompts((40,))[0]
    batch = StepBatch(
        token_ids=np.array(prompt),
        positions=np.arange(40),
        slices=(SequenceSlice(0, 40, 40, tuple(range(5)), 40),),
        logit_rows=np.array([39]),
        adapters=() if key is None else (key,),
    )
    return runner.run(batch)[0]


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / (other - other.mean()).norm())
