"""Which adapters the requests in an engine hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....shared.errors import InvalidRequest

if TYPE_CHECKING:
    from ..request import EngineRequest
    from .source import AdapterSource, Lease


class Leases:
    """A lease a request, from when it enters until it leaves.

    Args:
        source: Where adapters are; None has none.
    """

    def __init__(self, source: AdapterSource | None) -> None:
        self._source = source
        self._held: dict[str, Lease] = {}

    def take(self, request: EngineRequest) -> None:
        """Holds the adapter that a request names, if it names one.

        Args:
            request: A request that is about to enter.

        Raises:
            InvalidRequest: No adapters are served here.
            AdapterUnavailable: This one is not loaded.
        """
        if request.adapter is None:
            return
        if self._source is None:
            raise InvalidRequest(
                "adapter",
                f"is {request.adapter!r}, and this worker serves the base model alone",
            )
        self._held[request.id] = self._source.lease(request.adapter)

    def give_back(self, request_id: str) -> None:
        """Releases what a request holds, if anything.

        Args:
            request_id: A request that leaves.
        """
        lease = self._held.pop(request_id, None)
        if lease is not None:
            lease.release()
