"""A free port that stays a pool's own while the process that listens is restarted.

The supervisor's socket is bound and never listens. With SO_REUSEADDR on both, a child
may bind to the same port and listen there; the kernel gives the port to nobody else.
"""

import contextlib
import socket
from collections.abc import Iterator

import msgspec

from ..config import Config
from .plan import PoolOptions


@contextlib.contextmanager
def settled_port(options: PoolOptions, config: Config) -> Iterator[PoolOptions]:
    """Replaces a gateway's port 0 by one that stays: clients know it after a restart.

    Args:
        options: What was asked for.
        config: Settings in force.

    Yields:
        The options, to be used within the block.
    """
    given, settings = options.gateway_port, config.gateway
    wanted = settings.port if given is None else given
    if wanted or not options.with_gateway:
        yield options
        return
    with reserved_port(settings.host) as port:
        yield (
            options
            if port is None
            else msgspec.structs.replace(options, gateway_port=port)
        )


@contextlib.contextmanager
def reserved_port(host: str) -> Iterator[int | None]:
    """Keeps a free port for the length of a block.

    Args:
        host: Address to bind to.

    Yields:
        The port; None if the address cannot be bound to. Whoever is to listen there
        finds the same and says so.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((host, 0))
        except OSError:
            yield None
        else:
            yield int(held.getsockname()[1])
