"""Sections of docs/benchmarks.md on several models and versions in one pool."""

from report_queue import Result, Section, Table

_FIGURES = ("requests", "load", "queue_ms_p50", "queue_ms_p99", "ttft_ms_p99")
_WHOLE = ("total_ms_p50", "total_ms_p95", "total_ms_p99")
_HEADER = ("requests", "load", "queue P50", "queue P99", "first token P99")
_WHOLE_HEADER = ("whole P50", "whole P95", "whole P99")


def _steps(result: Result, table: Table) -> str:
    rows = [
        (name, *(found[column] for column in (*_FIGURES, *_WHOLE)))
        for name, found in result["steps"].items()
    ]
    return table(("", *_HEADER, *_WHOLE_HEADER), rows)


def mixed_models(result: Result, table: Table) -> str:
    """Two models together beside each alone."""
    extra, rate = result["added_ms"], result["throughput"]
    text = (
        f"{result['model']} under two names, each with {result['share']:g} of the "
        f"host; prompts of at most {result['limit_prompt']} tokens, outputs "
        f"of {result['limit_tokens']}. An open loop offers "
        f"{result['load']:.0%} of what each model can do while its neighbour is "
        f"saturated too; rounds in turns: {result['rounds']}. Times in ms; load is "
        "what was served over what the model can do.\n"
    )
    judged = (
        f"A neighbour adds {extra['queue_ms_p99']:g} ms to P99 of the wait in the "
        f"queue (target: at most {result['target_ms']:g}; {result['verdict']}), "
        f"{extra['ttft_ms_p99']:,.0f} ms to that of the first token and "
        f"{extra['total_ms_p99']:,.0f} ms to that of the whole time, of the model that "
        "feels more.\n"
    )
    full = [
        (name, found["qps"], found["output_tokens_per_s"])
        for name, found in result["full"].items()
    ]
    ratios = (
        f"Saturated, both together make {rate['together_over_alone']:g} times the "
        "tokens of each alone, added up, and "
        f"{rate['together_over_whole_host']:g} times those of one model that has the "
        "whole host.\n"
    )
    rates = table(("saturated", "requests/s", "output tokens/s"), full)
    return "\n".join((text, _steps(result, table), judged, rates, ratios))


def switches(result: Result, table: Table) -> str:
    """Jobs that are switched between two versions beside such that are not."""
    ratios = result["ratios"]
    text = (
        f"{result['model']} as two versions in one pool at {result['load']:.0%} of "
        f"what one can do; prompts of at most {result['limit_prompt']} tokens, outputs "
        f"of {result['limit_tokens']}; rounds in turns: {result['rounds']}; "
        f"{result['switches']} switches, one every "
        f"{result['every']:g} s. Times in ms.\n"
    )
    judged = (
        f"P99 of the whole time with switches is {ratios['p99']:g} times that on one "
        f"version (target: at most {result['target_ratio']:g}; {result['verdict']}) "
        f"and {ratios['p99_to_both']:g} times that on both. Of {result['jobs']} jobs "
        f"{_unhurt(result)}.\n"
    )
    kinds = result["served_by"]
    names = sorted({name for found in kinds.values() for name in found})
    rows = [
        (kind, *(found.get(name, 0) for name in names)) for kind, found in kinds.items()
    ]
    served = table(("jobs served by", *names), rows)
    return "\n".join((text, _steps(result, table), judged, served))


def _unhurt(result: Result) -> str:
    wrong = [problem for problem in result["problems"] if "job" in problem]
    return (
        f"{len(wrong)} problems: {'; '.join(wrong)}" if wrong else "each succeeded once"
    )


MODEL_SECTIONS: dict[str, Section] = {
    "mixed_models": ("Two models on one host", mixed_models),
    "switches": ("Switches between versions", switches),
}
