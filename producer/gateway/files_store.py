"""The content of files: objects in a directory or bucket that all gateways share.

Everything that may block runs in threads of the store's own, and nothing is held in
memory but the chunk that is on its way.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

import structlog

from ...shared.errors import StorageUnavailable
from ...shared.file_systems import is_local, modified_s, open_url, translated
from ...shared.input_refs import url_problem
from .files_names import PROBE, checked

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

CHUNK_BYTES: Final = 256 * 1024
_THREADS: Final = 8
_TIMEOUT_S: Final = 60.0
"""Longest time for one chunk: a store that hangs holds nobody for ever."""
_AWAY: Final = (
    "the store of files (gateway.files_url) refused or did not answer; try again "
    "later. The gateway's log says what is wrong"
)
_PART: Final = ".part"
_T = TypeVar("_T")
_log = structlog.get_logger(__name__)


@contextmanager
def _told(url: str, *but: type[Exception]) -> Iterator[None]:
    """As `translated`; where the files lie is in the log, and not told to tenants."""
    try:
        with translated(url, *but):
            yield
    except StorageUnavailable as error:
        _log.warning("files_unavailable", why=str(error))
        raise StorageUnavailable(_AWAY) from error


class _Draft(NamedTuple):
    """An object that is not visible yet."""

    file: Any
    part: str | None
    """Its path until it is whole, where the store is a directory."""


class Written:
    """One object while it is written; it is there once the `with` block ends well."""

    def __init__(self, store: "FilesStore", name: str) -> None:
        self._store = store
        self._name = name
        self._draft: _Draft | None = None
        self.num_bytes = 0

    async def write(self, content: bytes) -> None:
        """Appends bytes.

        Raises:
            StorageUnavailable: The store refuses or does not answer.
        """
        if self._draft is None:
            begin = self._store.begin_object
            self._draft = await self._store.run(lambda: begin(self._name))
        file = self._draft.file
        await self._store.run(lambda: file.write(content))
        self.num_bytes += len(content)

    async def close(self, *, keep: bool) -> None:
        """Makes the object visible under its name, or leaves nothing of it."""
        if self._draft is None and keep:
            await self.write(b"")
        if self._draft is not None:
            draft, end = self._draft, self._store.end_object
            await self._store.run(lambda: end(self._name, draft, keep=keep))


class FilesStore:
    """Writes, reads and removes objects.

    Args:
        url: An address that fsspec knows, as `gateway.files_url`.

    Raises:
        StorageUnavailable: The address cannot be one, or its package is missing.
    """

    def __init__(self, url: str) -> None:
        problem = url_problem(url)
        if problem is not None:
            raise StorageUnavailable(f"gateway.files_url: {problem}")
        self.url = url
        with _told(url):
            fs, self._root = open_url(url)
        self._fs: AbstractFileSystem = fs
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="files")

    @asynccontextmanager
    async def writing(self, name: str) -> AsyncIterator[Written]:
        """Writes an object for the length of a `with` block.

        Args:
            name: `<tenant>/<id>`, perhaps with `/<part>`.
        """
        written = Written(self, checked(name))
        try:
            yield written
        except BaseException:
            await asyncio.shield(written.close(keep=False))
            raise
        await written.close(keep=True)

    async def read(self, name: str) -> AsyncIterator[bytes]:
        """Yields an object's content in chunks.

        Raises:
            FileNotFoundError: There is none of this name.
            StorageUnavailable: The store does not answer.
        """
        path = self._path(checked(name))
        file = await self.run(lambda: self._fs.open(path, "rb"))
        try:
            while chunk := await self.run(lambda: file.read(CHUNK_BYTES)):
                yield chunk
        finally:
            await asyncio.shield(self.run(file.close))

    async def parts(self, name: str) -> list[str]:
        """Returns the names of the parts of `<tenant>/<id>`, in order of name."""
        return await self.run(lambda: self.parts_now(name))

    async def objects(self) -> list[tuple[str, float]]:
        """Returns every object, and when it was written (Unix time of the store)."""
        return await self.run(lambda: list(self._find(self._root)), None)

    async def now_s(self) -> float:
        """Returns the time by the store's own clock: when something is written now."""
        return await self.run(self._probe)

    async def remove(self, name: str) -> None:
        """Removes an object; that it is not there is no error."""
        path = self._path(name)
        await self.run(lambda: self._remove(path))

    async def remove_all(self, name: str) -> None:
        """Removes the parts of `<tenant>/<id>`, torn ones too."""
        path = self._path(checked(name))
        await self.run(lambda: self._remove_tree(path), None)

    def local_path(self, name: str) -> str | None:
        """Returns the path of an object on this host, if the store is a directory."""
        return self._path(checked(name)) if is_local(self._fs) else None

    def close(self) -> None:
        """Ends the threads after their present work."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def run(
        self, work: Callable[[], _T], longest_s: float | None = _TIMEOUT_S
    ) -> _T:
        """Runs something that may block in a thread of the store.

        Raises:
            StorageUnavailable: It failed or took too long.
        """

        def guarded() -> _T:
            with _told(self.url, FileNotFoundError):
                return work()

        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(longest_s):
                return await loop.run_in_executor(self._executor, guarded)
        except TimeoutError:
            _log.warning("files_unavailable", url=self.url, waited_s=longest_s)
            raise StorageUnavailable(_AWAY) from None

    # --- in a thread ---------------------------------------------------------------
    def begin_object(self, name: str) -> _Draft:
        """Opens an object for writing."""
        path = self._path(checked(name))
        if not is_local(self._fs):
            return _Draft(self._fs.open(path, "wb"), None)  # visible once closed
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        # Of its own: two gateways may write one object, and the last whole one stays.
        part = f"{path}.{os.urandom(4).hex()}{_PART}"
        return _Draft(self._fs.open(part, "wb"), part)

    def end_object(self, name: str, draft: _Draft, *, keep: bool) -> None:
        """Closes an object, and keeps or drops it."""
        if draft.part is None:
            _close_remote(draft.file, keep=keep)
            return
        if keep:
            draft.file.flush()
            os.fsync(draft.file.fileno())  # its name must not outlive its content
        draft.file.close()
        if keep:
            self._fs.mv(draft.part, self._path(name))
        else:
            self._remove(draft.part)

    @contextmanager
    def putting(self, name: str) -> Iterator[IO[bytes]]:
        """Writes an object for the length of a `with` block, on the caller's thread.

        Raises:
            StorageUnavailable: The store refuses.
        """
        with _told(self.url):
            draft = self.begin_object(name)
            try:
                yield draft.file
            except BaseException:
                self.end_object(name, draft, keep=False)
                raise
            self.end_object(name, draft, keep=True)

    def opened(self, name: str) -> IO[bytes]:
        """Opens an object for reading, on the caller's thread.

        Raises:
            FileNotFoundError: There is none of this name.
            StorageUnavailable: The store does not answer.
        """
        with _told(self.url, FileNotFoundError):
            return cast("IO[bytes]", self._fs.open(self._path(checked(name)), "rb"))

    def drop(self, name: str) -> None:
        """Removes an object, on the caller's thread; a missing one is no error."""
        with _told(self.url):
            self._remove(self._path(checked(name)))

    def parts_now(self, name: str) -> list[str]:
        """Returns what `parts` does, on the caller's thread."""
        with _told(self.url):
            found = self._find(self._path(checked(name)))
            return sorted(part for part, _ in found if not part.endswith(_PART))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _find(self, path: str) -> Iterator[tuple[str, float]]:
        try:
            found = self._fs.find(path, detail=True)
        except FileNotFoundError:
            return  # nothing was ever written
        root = self._root.lstrip("/")
        for full, info in found.items():
            yield str(full).lstrip("/").removeprefix(f"{root}/"), modified_s(info)

    def _probe(self) -> float:
        path = f"{self._root}/{PROBE}{os.urandom(8).hex()}"
        if is_local(self._fs):
            self._fs.makedirs(self._root, exist_ok=True)
        self._fs.pipe_file(path, b"probe")
        try:
            return modified_s(self._fs.info(path))
        finally:
            self._remove(path)

    def _remove(self, path: str) -> None:
        try:
            self._fs.rm_file(path)
        except FileNotFoundError:
            return

    def _remove_tree(self, path: str) -> None:
        for part, _ in list(self._find(path)):
            self._remove(self._path(part))
        if is_local(self._fs) and self._fs.isdir(path):
            try:
                self._fs.rmdir(path)
            except OSError as error:
                # Someone who was thought dead writes on; the janitor removes it.
                _log.info("directory_not_removed", path=path, why=error.strerror)


def _close_remote(file: Any, *, keep: bool) -> None:  # noqa: ANN401 - fsspec's files
    if keep:
        file.close()
        return
    discard = getattr(file, "discard", None)
    file.closed = True  # else it is completed when it is collected
    if discard is not None:
        discard()
