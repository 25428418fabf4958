"""How much of the store a tenant may fill.

What is there is counted in the records of its files, and what is on its way to this
gateway is added: so many uploads at once cannot fill more than one after the other.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .errors import ApiError

if TYPE_CHECKING:
    from ...shared.config import GatewayConfig
    from .files_models import FileRecord
    from .owned_records import OwnedRecords


class FilesQuota:
    """Grants room to uploads.

    Args:
        settings: `gateway.max_file_bytes`, `max_tenant_files` and `max_tenant_bytes`.
    """

    def __init__(self, settings: "GatewayConfig") -> None:
        self._settings = settings
        self._arriving: defaultdict[str, list[int]] = defaultdict(list)
        """Tenant -> bytes that each of its uploads may have."""

    async def room(self, records: "OwnedRecords[FileRecord]", tenant: str) -> int:
        """Returns the bytes that one more upload may have.

        Raises:
            ApiError: 403: the tenant has as many files or bytes as it may.
        """
        stored = await records.all_of(tenant)
        arriving = self._arriving.get(tenant, [])
        most_files = self._settings.max_tenant_files
        if len(stored) + len(arriving) >= most_files:
            raise _full(f"{most_files} files (gateway.max_tenant_files)")
        num_bytes = sum(record.num_bytes for record in stored) + sum(arriving)
        left = self._settings.max_tenant_bytes - num_bytes
        if left <= 0:
            raise self.too_many_bytes
        return min(left, self._settings.max_file_bytes)

    @property
    def too_many_bytes(self) -> ApiError:
        """What an upload is told for which there is no room."""
        most = self._settings.max_tenant_bytes
        return _full(f"{most} bytes in files (gateway.max_tenant_bytes)")

    @contextmanager
    def taken(self, tenant: str, num_bytes: int) -> Iterator[None]:
        """Keeps room for an upload for the length of a `with` block."""
        arriving = self._arriving[tenant]
        arriving.append(num_bytes)
        try:
            yield
        finally:
            arriving.remove(num_bytes)
            if not arriving:
                self._arriving.pop(tenant, None)


def _full(most: str) -> ApiError:
    return ApiError(
        403,
        f"the tenant may have {most}, those that arrive now included; delete what is "
        "not needed any more, with DELETE /v1/files/ID",
        code="files_quota_exceeded",
        param="file",
    )
