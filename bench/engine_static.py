"""The workload through static batches of `generate`, as the library alone does it."""

import sys
import time
import warnings
from pathlib import Path

import torch
from engine_workload import Item, output_tokens
from harness import Figures
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar


def run_static(
    model: Path,
    items: list[Item],
    *,
    batch_size: int,
    threads: int,
    device: str = "cpu",
) -> Figures:
    """Runs the requests in their order, in batches padded on the left.

    A batch goes on until its longest output is complete; tokens beyond a request's own
    length are not counted, the time for them is.

    Args:
        model: Directory with the same weights.
        items: The workload.
        batch_size: Requests in a batch.
        threads: Compute threads.
        device: Where it runs: float32 on "cpu", float16 elsewhere.

    Returns:
        Figures by name; rates in tokens per second, times in seconds.
    """
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    disable_progress_bar()
    began = time.perf_counter()
    dtype = torch.float32 if device == "cpu" else torch.float16
    network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    network.to(device)
    load_s = time.perf_counter() - began
    _generate(network, [Item("warm", items[0].token_ids, 2)])
    began, cpu_before = time.perf_counter(), time.process_time()
    steps = 0
    for start in range(0, len(items), batch_size):
        print(f"static batch at request {start} of {len(items)}", file=sys.stderr)
        steps += _generate(network, items[start : start + batch_size])
    seconds = time.perf_counter() - began
    return {
        "output_tokens_per_s": output_tokens(items) / seconds,
        "seconds": seconds,
        "cpu_s": time.process_time() - cpu_before,
        "load_s": load_s,
        "output_tokens": output_tokens(items),
        "steps": steps,
    }


@torch.inference_mode()
def _generate(network: PreTrainedModel, batch: list[Item]) -> int:
    """Runs one batch to its longest output, which it returns."""
    longest = max(len(item.token_ids) for item in batch)
    length = max(item.max_tokens for item in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, item in enumerate(batch):
        ids[row, longest - len(item.token_ids) :] = torch.tensor(item.token_ids)
        mask[row, longest - len(item.token_ids) :] = 1
    # No end-of-sequence id: every output has its forced length.
    config = GenerationConfig(
        max_new_tokens=length, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    ids, mask = ids.to(network.device), mask.to(network.device)
    out = network.generate(ids, attention_mask=mask, generation_config=config)
    if out.shape[1] != longest + length:
        raise SystemExit(f"generate stopped at {out.shape[1] - longest} of {length}")
    return length
