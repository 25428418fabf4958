"""Models that are not served: why, and which engine does serve them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ...shared.errors import ModelLoadError
from ..engine.model.families import FAMILIES

_EXPERTS: Final = (
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok",
)
"""Keys of configurations with a mixture of experts."""
_ENCODERS: Final = frozenset(
    {
        *("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "albert"),
        *("electra", "deberta", "deberta-v2", "mpnet", "modernbert", "nomic_bert"),
        *("xlm", "ernie", "longformer", "big_bird"),
    }
)
_MIXTURES: Final = frozenset(
    {
        *("mixtral", "dbrx", "deepseek_v2", "deepseek_v3", "gpt_oss", "llama4"),
        *("olmoe", "grok", "ernie4_5_moe"),
    }
)
_SEQUENCES: Final = frozenset(
    {
        *("t5", "mt5", "umt5", "bart", "mbart", "marian", "pegasus", "m2m_100", "led"),
        *("whisper", "blenderbot", "prophetnet", "longt5"),
    }
)
_RECURRENT: Final = frozenset(
    {
        *("mamba", "mamba2", "falcon_mamba", "rwkv", "rwkv7", "recurrent_gemma"),
        *("jamba", "bamba", "zamba", "zamba2", "falcon_h1", "nemotron_h"),
    }
)


def check_served(config: Mapping[str, object], source: str) -> None:
    """Refuses what a worker would refuse, and names an engine that would not.

    Args:
        config: The content of a `config.json`.
        source: Names it in messages.

    Raises:
        ModelLoadError: Not served here.
    """
    if config.get("quantization_config"):
        raise ModelLoadError(
            f"{source} describes weights that are quantized already; give the float "
            "checkpoint, since weights are quantized at load, or serve it with vLLM "
            "(GPTQ, AWQ, fp8) or llama.cpp (GGUF)"
        )
    if config.get("is_encoder_decoder") or config.get("add_cross_attention"):
        raise _refused(config, source, *_SEQUENCE)
    if config.get("model_type") not in FAMILIES:
        raise _refused(config, source, *_kind(config))


_SEQUENCE: Final = (
    "an encoder with a decoder",
    "CTranslate2 or transformers itself",
)


def _kind(config: Mapping[str, object]) -> tuple[str, str]:
    """Returns what sort of model it is, and what serves those."""
    family = str(config.get("model_type"))
    if family in _ENCODERS:
        return (
            "an encoder, which makes no text",
            "Text Embeddings Inference or Infinity",
        )
    if family in _SEQUENCES:
        return _SEQUENCE
    if family in _RECURRENT:
        return "a recurrent or hybrid model, without a KV cache", "vLLM or SGLang"
    has_experts = any(config.get(key) for key in _EXPERTS)
    if has_experts or family in _MIXTURES or "moe" in family.lower():
        return (
            "a mixture of experts, which wants expert parallelism",
            "vLLM, SGLang or TensorRT-LLM",
        )
    if config.get("vision_config") or config.get("audio_config"):
        return "a model of images or sound beside text", "vLLM or SGLang"
    return "of a family that is not served", "vLLM or SGLang, if they list it"


def _refused(
    config: Mapping[str, object], source: str, kind: str, engines: str
) -> ModelLoadError:
    return ModelLoadError(
        f"architecture {config.get('model_type')!r} of {source} is {kind}: supported "
        f"are {', '.join(sorted(FAMILIES))}; {engines} would serve it better"
    )
