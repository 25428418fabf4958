"""From the runs of all sides to ratios and targets. Pure: figures in, figures out."""

from collections.abc import Mapping, Sequence

import msgspec
from harness import Figures

OURS = "tokenmill"
LLAMA = "llama.cpp"
STATIC = "hf-static"
VLLM = "vllm"
PEERS = (LLAMA, STATIC, VLLM)

Runs = Mapping[str, Sequence[Figures]]
"""Each side's figures, one entry a try."""

MIXED = "output_tokens_per_s"
TARGETS = (
    ("mixed workload", LLAMA, MIXED, 2.0),
    ("mixed workload", STATIC, MIXED, 8.0),
    ("decode, batch 1", LLAMA, "decode_1", 1.2),
    ("decode, batch 8", LLAMA, "decode_8", 1.5),
    ("decode, batch 16", LLAMA, "decode_16", 1.6),
    ("prefill", LLAMA, "prefill", 1.6),
)
"""What is measured, against whom, the figure's name, the least ratio wanted."""


class Comparison(msgspec.Struct, frozen=True):
    """One figure of ours beside another side's, tokens per second."""

    what: str
    against: str
    ours: float
    theirs: float
    ratio: float
    target: float | None
    tries: int
    """The best of so many, for both sides."""

    @property
    def met(self) -> bool:
        """Whether the ratio reaches its target, if it has one."""
        return self.target is None or self.ratio >= self.target


def compare(what: str, name: str, runs: Runs, against: str) -> Comparison | None:
    """Compares the best of equally many tries.

    Other work on the machine only ever makes a run slower, so the best of several is
    the nearest to what a side can do. A side that ran less often, since it is slow, is
    held against as many of our tries.

    Args:
        what: Title.
        name: The figure's name, greater is better.
        runs: All sides' tries.
        against: The other side.

    Returns:
        None when one of the two did not run.
    """
    ours, theirs = runs.get(OURS, ()), runs.get(against, ())
    tries = min(len(ours), len(theirs))
    if not tries:
        return None
    mine = max(figures[name] for figures in ours[:tries])
    other = max(figures[name] for figures in theirs[:tries])
    targets = {(title, peer): least for title, peer, _name, least in TARGETS}
    return Comparison(
        what, against, mine, other, mine / other, targets.get((what, against)), tries
    )


def compare_all(mixed: Runs, rates: Runs) -> list[Comparison]:
    """Returns every comparison that can be made from these runs."""
    wanted = [(*target[:3],) for target in TARGETS]
    wanted.append(("mixed workload", VLLM, MIXED))
    found = [
        compare(what, name, mixed if name == MIXED else rates, against)
        for what, against, name in wanted
    ]
    return [one for one in found if one is not None]
