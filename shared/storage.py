"""Inputs too large for Redis: a store of objects named by tenant and content.

The store is any file system that fsspec knows: a directory that all hosts mount, S3.
Objects are written once whole and never changed, so a name stands for its content.
Credentials come from the environment of each process, never from the address.
"""

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Self, TypeVar

import msgspec

from .errors import InputUnreadable, StorageUnavailable
from .file_systems import is_local, modified_s, open_url, translated
from .input_refs import check_ref, is_input, url_problem
from .messages import InputRef

_THREADS: Final = 4
"""Objects that one process moves at a time."""
_TIMEOUT_S: Final = 60.0
"""Longest time for one object, without the wait for its turn; a store that hangs holds
nobody for ever."""
_LIST_S: Final = 540.0
"""Longest time for the names of all objects, of which there may be millions."""
_PROBE: Final = ".probe-"
_PART: Final = ".part"
_MARK: Final = ".tokenmill-inputs"
"""Stands in every directory that was ever used as a store."""
_T = TypeVar("_T")


class StoredInput(msgspec.Struct, frozen=True):
    """One object of the store."""

    name: str
    size: int
    """Bytes."""
    modified_s: float
    """Unix time by the store's own clock."""


class Storage:
    """Writes and reads inputs; nothing blocks the event loop.

    Args:
        url: Address of the store.
        max_bytes: Largest object that is written or read.

    Raises:
        StorageUnavailable: The address cannot be one, or its package is missing.
    """

    def __init__(self, url: str, *, max_bytes: int) -> None:
        problem = url_problem(url)
        if problem is not None:
            raise StorageUnavailable(f"storage.url: {problem}")
        self.url = url
        self._max_bytes = max_bytes
        self._fs, self._root = open_url(url)
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="storage")
        self._turns = asyncio.Semaphore(_THREADS)

    @classmethod
    async def opened(cls, url: str, *, max_bytes: int) -> Self:
        """The same off the event loop: a backend's modules take a second to import."""
        return await asyncio.to_thread(cls, url, max_bytes=max_bytes)

    async def write(self, ref: InputRef, content: bytes) -> None:
        """Stores an input, again if it is there: its age begins anew.

        Raises:
            StorageUnavailable: The store does not answer or refuses.
        """
        await self._run(lambda: self._write(self._path(ref), content))

    async def read(self, ref: InputRef, tenant: str) -> bytes:
        """Returns an input, checked against its reference.

        Args:
            ref: As a client wrote it.
            tenant: Whose job it is; the reference must name an object of this tenant.

        Raises:
            InputUnreadable: The reference or the object is wrong; the job's own fault.
            StorageUnavailable: The store does not answer or refuses.
        """
        check_ref(ref, tenant, self._max_bytes)
        return await self._run(lambda: self._read(ref))

    async def inputs(self) -> list[StoredInput]:
        """Returns every object that is named as an input, in no order.

        What a writer left that was killed at its work is among them.
        """
        return await self._run(lambda: list(self._inputs()), _LIST_S)

    async def remove(self, name: str, before_s: float) -> bool:
        """Removes an input unless it has been written anew; whether it has gone.

        Args:
            name: From `inputs`.
            before_s: It is left alone when it was written later than this.
        """
        return await self._run(lambda: self._remove_old(name, before_s))

    async def probe(self) -> float:
        """Writes, reads and removes an object.

        Returns:
            The time by the store's own clock.

        Raises:
            StorageUnavailable: One of the three failed.
        """
        return await self._run(self._probe)

    async def holds_inputs(self) -> bool:
        """Whether inputs were ever stored here, as far as that can be told.

        Where not, jobs that name one wait: a directory may not be mounted yet.
        """
        return await self._run(lambda: not self._lacks_mark())

    def close(self) -> None:
        """Ends the threads after their present work."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    # --- in a thread ---------------------------------------------------------------
    async def _run(self, work: Callable[[], _T], longest_s: float | None = None) -> _T:
        loop = asyncio.get_running_loop()
        longest_s = _TIMEOUT_S if longest_s is None else longest_s

        def guarded() -> _T:
            with translated(self.url):
                return work()

        try:
            async with self._turns, asyncio.timeout(longest_s):
                return await loop.run_in_executor(self._executor, guarded)
        except TimeoutError:
            raise StorageUnavailable(
                f"the store {self.url} did not answer within {longest_s:.0f} s"
            ) from None

    def _path(self, ref: InputRef) -> str:
        return f"{self._root}/{ref.name}"

    def _write(self, path: str, content: bytes) -> None:
        if not is_local(self._fs):
            self._fs.pipe_file(path, content)  # object stores write whole or not at all
            return
        part = f"{path}.{os.getpid()}-{os.urandom(4).hex()}{_PART}"
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._fs.touch(f"{self._root}/{_MARK}", truncate=False)
        try:
            with self._fs.open(part, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # its name must not outlive its content
            self._fs.mv(part, path)
        except BaseException:
            self._remove(part)
            raise

    def _read(self, ref: InputRef) -> bytes:
        try:
            size = int(self._fs.info(self._path(ref))["size"])
            # One byte more shows an object that has grown meanwhile.
            content = b"" if size != ref.size else self._head(ref, ref.size + 1)
        except FileNotFoundError:
            self._require_mounted()
            raise InputUnreadable(
                "text_ref",
                f"there is no object {ref.name} in the store: it was never written "
                "there, or it was removed; submit the job again",
            ) from None
        if size != ref.size or len(content) != ref.size:
            raise InputUnreadable(
                "text_ref",
                f"the object {ref.name} has {max(size, len(content))} bytes and the "
                f"request says {ref.size}; submit the job again",
            )
        if hashlib.sha256(content).hexdigest() != ref.sha256:
            raise InputUnreadable(
                "text_ref",
                f"the object {ref.name} is damaged: its content does not have the "
                "SHA-256 that the request names; submit the job again",
            )
        return content

    def _lacks_mark(self) -> bool:
        return is_local(self._fs) and not self._fs.exists(f"{self._root}/{_MARK}")

    def _require_mounted(self) -> None:
        """An empty mount point is no store that lost its objects: jobs can wait."""
        if self._lacks_mark():
            raise StorageUnavailable(
                f"the store {self.url} holds no input of anyone here; is it mounted "
                "on this host?"
            )

    def _head(self, ref: InputRef, num_bytes: int) -> bytes:
        with self._fs.open(self._path(ref), "rb") as file:
            return bytes(file.read(num_bytes))

    def _inputs(self) -> Iterator[StoredInput]:
        try:
            found = self._fs.find(self._root, detail=True)
        except FileNotFoundError:
            return  # nothing was ever written
        root = self._root.lstrip("/")
        for path, info in found.items():
            name = str(path).lstrip("/").removeprefix(f"{root}/")
            if is_input(name) or _is_left_over(name):
                yield StoredInput(name, int(info["size"]), modified_s(info))

    def _remove_old(self, name: str, before_s: float) -> bool:
        path = f"{self._root}/{name}"
        try:
            if modified_s(self._fs.info(path)) >= before_s:
                return False
        except FileNotFoundError:
            return False
        self._remove(path)
        return True

    def _remove(self, path: str) -> None:
        try:
            self._fs.rm_file(path)
        except FileNotFoundError:
            return

    def _probe(self) -> float:
        path = f"{self._root}/{_PROBE}{os.urandom(8).hex()}"
        content = os.urandom(16)
        if is_local(self._fs):
            self._fs.makedirs(self._root, exist_ok=True)
        self._fs.pipe_file(path, content)
        try:
            if self._fs.cat_file(path) != content:
                raise StorageUnavailable(
                    f"the store {self.url} gives back other bytes than were written"
                )
            return modified_s(self._fs.info(path))
        finally:
            self._remove(path)


def _is_left_over(name: str) -> bool:
    """Whether this is what a writer leaves that was killed at its work."""
    return name.startswith(_PROBE) or name.endswith(_PART)
