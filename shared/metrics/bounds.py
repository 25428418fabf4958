"""Upper bounds of the histograms' buckets, chosen for what operators ask of them."""

from typing import Final

SECONDS: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0),
)
"""Of a job's waits and of its whole life."""
TOKEN_SECONDS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.04, 0.06),
    *(0.08, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0),
)
"""Of an engine step and of the time between two tokens."""
TOKENS: Final = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
"""Prompt tokens of a batch."""
JOBS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Jobs of a batch."""
