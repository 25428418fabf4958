"""transformers on the engine's model and workload, in padded batches."""

import time
from collections.abc import Iterator
from pathlib import Path

import torch
from gpu_device import device_of
from gpu_engine import MAX_RUNNING, workload

Row = dict[str, object]


def stage(facts: Row, _deadline: float) -> Iterator[Row]:
    """Yields output tokens a second of `generate` in bfloat16."""
    from transformers import LlamaForCausalLM

    device, smoke = device_of(facts), bool(facts["smoke"])
    path = Path(str(facts["directory"]))
    dtype = torch.float32 if smoke else torch.bfloat16
    model = LlamaForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
    prompts, output = workload(model.config.vocab_size, smoke=smoke)
    if not smoke:
        _generate(model, prompts[:1], 8, device)
    began = time.perf_counter()
    tokens = sum(
        _generate(model, prompts[start : start + MAX_RUNNING], output, device)
        for start in range(0, len(prompts), MAX_RUNNING)
    )
    took = time.perf_counter() - began
    yield {
        "what": f"transformers {str(dtype).removeprefix('torch.')}",
        "tokens_per_s": tokens / took,
        "output_tokens": tokens,
        "seconds": took,
    }


def _generate(
    model: torch.nn.Module, prompts: list[list[int]], output: int, device: torch.device
) -> int:
    longest = max(map(len, prompts))
    ids = torch.zeros((len(prompts), longest), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # padded on the left, as generate wants it
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    with torch.inference_mode():
        found = model.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            do_sample=False,
            max_new_tokens=output,
            min_new_tokens=output,
            pad_token_id=0,
        )
    return len(prompts) * (int(found.shape[1]) - longest)
