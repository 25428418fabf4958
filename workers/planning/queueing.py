"""Waiting times of a queue before servers that work side by side.

Erlang's C formula says how often a request waits at all; the wait of those that do is
taken to be exponential, scaled for service times that vary less than that (Allen and
Cunneen). It is an approximation, good where load is below 0.95.
"""

from __future__ import annotations

import math
from typing import Final

_NEVER: Final = 1e-9


def waits(servers: int, load: float) -> float:
    """Returns the part of requests that find all servers taken (Erlang C).

    Args:
        servers: Requests that are served at once.
        load: Requests that would be in service on average: rate times service time.
    """
    if load >= servers:
        return 1.0
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = load * blocked / (count + load * blocked)
        if blocked < _NEVER:  # and less with every further server
            return 0.0
    return servers * blocked / (servers - load * (1 - blocked))


def wait_quantile(
    part: float, servers: int, load: float, service_s: float, variation: float
) -> float:
    """Returns the wait in seconds that so large a part of requests does not exceed.

    Args:
        part: As 0.99.
        servers: Requests that are served at once.
        load: As in `waits`.
        service_s: Mean time of a service.
        variation: Squared coefficient of variation of service times; 1 is exponential.
    """
    if load >= servers:
        return math.inf
    often = waits(servers, load)
    if often <= 1 - part:
        return 0.0
    scale = service_s / (servers - load) * (1 + variation) / 2
    return scale * math.log(often / (1 - part))
