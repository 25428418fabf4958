"""What is known of a file, and how the API shows it."""

from typing import Final, Literal

import msgspec

FILE_ID: Final = r"file-[0-9a-f]{32}"
MOST_LISTED: Final = 10_000
"""Most files of one page, as in OpenAI's API."""


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`tm:file:<id>`: one file whose content lies whole in the store."""

    id: str
    tenant: str
    filename: str
    purpose: str
    num_bytes: int
    created_ms: int
    """By the clock of Redis."""
    expires_ms: int

    @property
    def name(self) -> str:
        """Of its object in the store."""
        return f"{self.tenant}/{self.id}"


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """A file, as OpenAI's API shows it. Times are Unix seconds."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    """When it is removed."""
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"

    @classmethod
    def of(cls, record: FileRecord) -> "FileObject":
        """Shows a record."""
        return cls(
            id=record.id,
            bytes=record.num_bytes,
            created_at=record.created_ms // 1000,
            expires_at=record.expires_ms // 1000,
            filename=record.filename,
            purpose="batch" if record.purpose == "batch" else "batch_output",
        )


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    """Files of a tenant, a page of them."""

    object: Literal["list"] = "list"
    data: tuple[FileObject, ...]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class FileDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """That a file has gone."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True
