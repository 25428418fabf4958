"""One random number per output token, the same wherever and whenever it is drawn."""

from typing import Final

import numpy as np

_MANTISSA: Final = 2.0**-53


def uniform(seed: int, choice: int, position: int) -> float:
    """Returns the number in [0, 1) that belongs to one output token.

    A counter-based generator (Philox) is keyed by seed and choice and counts
    positions, so a number depends on no earlier one: batch mates and a resume on
    another worker change nothing.

    Args:
        seed: The job's seed, 0 to 2**63 - 1.
        choice: Index of the choice.
        position: Index of the token in the output.
    """
    generator = np.random.Philox(key=[seed, choice], counter=[position, 0, 0, 0])
    return (int(generator.random_raw()) >> 11) * _MANTISSA
