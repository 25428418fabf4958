"""The sides of the memory benchmark: each runs in a process of its own."""

from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from harness import Figures
from model_tensors import own_tensors, tensors_of

if TYPE_CHECKING:
    from torch import nn

    from tokenmill.workers.engine.kernels.layout import KVKind
    from tokenmill.workers.engine.model.quantize import Weights

MIB = 1 << 20
Parts = dict[str, int]


def resident() -> int:
    """Returns this process's resident bytes."""
    return int(psutil.Process().memory_info().rss)


def module_bytes(model: "nn.Module", head: "nn.Module") -> Parts:
    """Returns bytes of the linear layers, the head, and all else; each tensor once."""
    parts = {"linear": 0, "head": 0, "other": 0}
    seen: set[int] = set()
    for module in model.modules():
        if module is head:
            part = "head"
        elif "Linear" in type(module).__name__:
            part = "linear"
        else:
            part = "other"
        for tensor in own_tensors(module):
            storage = tensor.untyped_storage()
            if tensor.device.type != "meta" and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                parts[part] += storage.nbytes()
    return parts


def _weight_figures(parts: Parts, before: int) -> Figures:
    figures: Figures = {f"{name}_mib": size / MIB for name, size in parts.items()}
    figures["all_mib"] = sum(parts.values()) / MIB
    figures["resident_growth_mib"] = (resident() - before) / MIB
    return figures


def weights_of_transformers(path: Path) -> Figures:
    """Loads the model in float16 as transformers alone does it."""
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401

    before = resident()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16)
    return _weight_figures(module_bytes(model, model.get_output_embeddings()), before)


def weights_of_ours(path: Path, kind: "Weights") -> Figures:
    """Loads the model in one of our precisions, with the smallest KV pool."""
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401

    from tokenmill.workers.engine.model.load import load_runner

    before = resident()
    runner = load_runner(path, weights=kind, num_blocks=1)
    model = runner.model
    return _weight_figures(module_bytes(model, model.get_output_embeddings()), before)


def kv_of_transformers(path: Path, slots: int, context: int) -> Figures:
    """Fills transformers' static cache in float16."""
    from transformers import AutoConfig, StaticCache

    config = AutoConfig.from_pretrained(path)

    def made(slots: int, context: int) -> StaticCache:
        cache = StaticCache(config=config, max_cache_len=context)
        cache.early_initialization(
            batch_size=slots,
            num_heads=config.num_key_value_heads,
            head_dim=config.hidden_size // config.num_attention_heads,
            dtype=torch.float16,
            device=torch.device("cpu"),
        )
        return cache

    made(1, 1)  # what it imports at its first use is not the cache's memory
    before = resident()
    cache = made(slots, context)
    tensors = list(tensors_of([vars(layer) for layer in cache.layers]))
    return _kv_figures(tensors, slots * context, before)


def kv_of_ours(path: Path, slots: int, context: int, kind: "KVKind") -> Figures:
    """Fills a KV pool of ours."""
    from transformers import AutoConfig

    from tokenmill.workers.engine.kv.store import KVStore
    from tokenmill.workers.engine.model.families import kv_shape

    config = AutoConfig.from_pretrained(path)
    block_size = 8
    before = resident()
    store = KVStore(
        kv_shape(config),
        num_blocks=slots * context // block_size,
        block_size=block_size,
        kind=kind,
    )
    return _kv_figures(list(tensors_of(store.layers)), slots * context, before)


def _kv_figures(tensors: list[torch.Tensor], tokens: int, before: int) -> Figures:
    for tensor in tensors:
        tensor.fill_(1)  # untouched pages take no memory
    size = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    return {
        "tensors_mib": size / MIB,
        "bytes_per_token": size / tokens,
        "resident_growth_mib": (resident() - before) / MIB,
    }
