"""Stores by their address: directories, buckets, whatever fsspec knows. Blocking."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

from .errors import StorageUnavailable, TokenmillError
from .input_refs import LOCAL_SCHEMES

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


@contextmanager
def translated(url: str, *but: type[Exception]) -> Iterator[None]:
    """Turns whatever a store's backend raises into `StorageUnavailable`.

    Args:
        url: The store, for the message.
        but: Kinds that go on as they are.
    """
    kept: tuple[type[Exception], ...] = (TokenmillError, *but)
    try:
        yield
    except kept:
        raise
    except Exception as error:
        # Each backend raises errors of its own; all of them mean the same here.
        raise StorageUnavailable(
            f"the store {url} refused or did not answer: {type(error).__name__}: "
            f"{str(error)[:200]}; check the address, its credentials and that this "
            "host reaches it"
        ) from error


def open_url(url: str) -> tuple["AbstractFileSystem", str]:
    """Returns a store's file system and the path of its root.

    Raises:
        StorageUnavailable: A package is missing, or the address cannot be opened.
    """
    import fsspec

    try:
        with translated(url, ImportError, ValueError):
            fs, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        scheme = url.partition(":")[0]
        extra = "pip install 'tokenmill[s3]'" if scheme == "s3" else str(error)
        raise StorageUnavailable(
            f"the store {url} needs a package that is not installed: {extra}"
        ) from error
    except ValueError as error:
        raise StorageUnavailable(
            f"the store {url} cannot be opened: {error}; expected file:///directory, "
            "s3://bucket/prefix or another fsspec URL"
        ) from error
    return fs, str(path).rstrip("/")


def is_local(fs: "AbstractFileSystem") -> bool:
    """Whether a store is a directory of this host."""
    protocols = fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,)
    return bool(LOCAL_SCHEMES & set(protocols))


def modified_s(info: dict[str, Any]) -> float:
    """Returns when an object was written: Unix time by the store's own clock."""
    for field in ("mtime", "LastModified", "last_modified", "created"):
        value = info.get(field)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    raise StorageUnavailable("the store does not tell when its objects were written")
