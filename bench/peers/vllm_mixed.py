"""A workload through vLLM, run by vLLM's own interpreter.

    VLLM_PYTHON bench/peers/vllm_mixed.py MODEL REQUESTS.json MAX_RUNNING RESULT.json

REQUESTS.json holds a list of [token ids, output length]. The figures go to a file,
since vLLM's own lines go to standard output, some after the end. Nothing of this
project is imported: the two do not share an environment.
"""

import json
import sys
import time
from pathlib import Path

CONTEXT = 1024
"""Always the same, since vLLM compiles the model anew for another length."""


def main() -> None:
    """Runs all requests, submitted at once, to their forced lengths."""
    from vllm import LLM, SamplingParams

    model, requests, max_running, result = sys.argv[1:5]
    pairs = json.loads(Path(requests).read_text(encoding="utf-8"))
    began = time.perf_counter()
    engine = LLM(
        model=model,
        dtype="float32",
        max_num_seqs=int(max_running),
        max_model_len=CONTEXT,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    load_s = time.perf_counter() - began

    def run(some: list[tuple[list[int], int]]) -> int:
        prompts = [{"prompt_token_ids": ids} for ids, _ in some]
        sampling = [
            SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
            for _, n in some
        ]
        done = engine.generate(prompts, sampling, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in done)

    run([(pairs[0][0], 4)])
    began = time.perf_counter()
    produced = run(pairs)
    seconds = time.perf_counter() - began
    figures = {"output_tokens_per_s": produced / seconds, "seconds": seconds}
    figures |= {"load_s": load_s, "output_tokens": produced}
    Path(result).write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
