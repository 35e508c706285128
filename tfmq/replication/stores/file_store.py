"""Objects as files in a folder of a file system that all servers share: `file:///FOLDER`.

An object is written to a temporary file, fsynced, and then linked to its name, which fails if the name exists. So a
file that has the name of an object is always whole, and of concurrent links of one name exactly one succeeds.
Temporary files that killed writers have left are removed by later writers.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import os
import secrets
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Final, NamedTuple

from journal.disk import FILE_MODE, FOLDER_MODE
from tfmq.data_dir import META_NAME, VERSION_NAME
from tfmq.databases import PERMANENT_ERRNOS
from tfmq.replication.errors import InvalidObject, ReplicationError, StoreMissing, StoreRefused, StoreUnavailable
from tfmq.replication.store import OBJECT_BYTES_MAX, StoredObject, check_key, check_size

TEMPORARY: Final = ".temporary"
"""The folder of temporary files. No key begins with a dot."""
LEFTOVER_SECONDS: Final = 3600.0
"""Temporary files of this age are removed. If a writer is that slow, its put fails, and it puts the object again."""
PAGE: Final = 50_000
"""Maximum names of one folder that a list sorts in memory."""
SPOOL_BYTES: Final = 8 << 20
"""How much of the sorted pages is in memory; more is in a temporary file."""
PAGE_READ_BYTES: Final = 8 << 10
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""How file systems refuse hard links that they do not have."""


class _Name(NamedTuple):
    """A name in a folder. `path`: relative to the store's folder; a folder's ends with "/", so that paths sort as keys
    do."""

    path: str
    is_folder: bool


class FileStore:
    """A `tfmq.replication.store.Store` in an existing folder.

    The folder is opened once, and all names are resolved from there: if another file system is mounted over it, or it
    is unmounted, the store does not continue elsewhere. Calls wait as long as the file system does.
    """

    def __init__(self, folder: str) -> None:
        """Raises StoreRefused if the folder is missing, may not be used, or is the data folder of a broker."""
        self.folder = folder
        self._shown = f"file://{folder}"
        try:
            self._root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise StoreMissing(
                self.name,
                f"The store {self.name} is no folder ({error.strerror}): mount the file system, or create the folder.",
            ) from None
        except OSError as error:
            raise self._to_store_error(error) from error
        self._is_open = True
        if os.path.isfile(os.path.join(folder, META_NAME, VERSION_NAME)):
            self.close()
            raise StoreRefused(f"{folder} is the data folder of a broker: name a folder that has only the store.")
        self._writer = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._durable_folders: set[str] = set()
        """Folders whose own names are known to be durable."""
        self._next_cleaning = 0.0
        """When to look for leftovers again, by the clock of the file system."""

    @property
    def name(self) -> str:
        return self._shown

    def put_new(self, key: str, data: bytes) -> bool:
        check_key(key)
        check_size(key, len(data))
        with self._translated_errors():
            stored = not self._exists(key) and self._write(key, data)
            # Also for an object of somebody else: who is told that it exists must be able to rely on it.
            self._force_name(key)
        return stored

    def get(self, key: str) -> bytes | None:
        check_key(key)
        with self._translated_errors():
            try:
                descriptor = os.open(key, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._root)
            except FileNotFoundError:
                self._check_root()
                return None
            with open(descriptor, "rb") as file:
                if os.fstat(descriptor).st_size > OBJECT_BYTES_MAX:
                    raise InvalidObject(f"{key} in {self.name} has more than {OBJECT_BYTES_MAX} bytes")
                data = file.read(OBJECT_BYTES_MAX)
            # Its writer may not have come to that yet, and nobody may act on what a power cut can take back.
            with suppress_read_only():
                self._force_name(key)
        return data

    def list(self, prefix: str, after: str = "") -> Iterator[StoredObject]:
        with self._translated_errors():
            self._check_root()
            folder = prefix.rpartition("/")[0]
            for path in self._walk(f"{folder}/" if folder else "", prefix, after):
                try:
                    found = os.stat(path, dir_fd=self._root, follow_symlinks=False)
                except FileNotFoundError:  # deleted meanwhile
                    continue
                yield StoredObject(path, found.st_size, found.st_mtime)

    def delete(self, *keys: str) -> None:
        for key in keys:
            check_key(key)
            # Not fsynced: an object that a power cut brings back is deleted again by the next sweep.
            with self._translated_errors(), suppress(FileNotFoundError):
                os.unlink(key, dir_fd=self._root)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self._root)

    # Writing

    def _write(self, key: str, data: bytes) -> bool:
        temporary = f"{TEMPORARY}/{self._writer}-{next(self._numbers)}"
        descriptor = self._create(temporary)
        try:
            with open(descriptor, "wb", buffering=0) as file:
                left = memoryview(data)
                while left:
                    left = left[file.write(left) :]
                os.fsync(descriptor)
                self._remove_leftovers(os.fstat(descriptor).st_mtime)
            return self._link(temporary, key)
        finally:
            with suppress(OSError):  # a leftover, then
                os.unlink(temporary, dir_fd=self._root)

    def _create(self, temporary: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(temporary, flags, FILE_MODE, dir_fd=self._root)
        except FileNotFoundError:
            self._check_root()
            self._make_folder(TEMPORARY)
            return os.open(temporary, flags, FILE_MODE, dir_fd=self._root)

    def _link(self, temporary: str, key: str) -> bool:
        try:
            try:
                self._link_once(temporary, key)
            except FileNotFoundError:
                for folder in _folders_of(key):
                    self._make_folder(folder)
                self._link_once(temporary, key)
        except FileExistsError:
            # A network file system repeats a call whose answer was lost: then the file that exists is this one.
            return os.path.samestat(self._stat(temporary), self._stat(key))
        except OSError as error:
            if error.errno in NO_LINKS:
                raise StoreRefused(
                    f"The file system of {self.name} makes no hard links ({error.strerror}), so an object could replace"
                    " another: use a file system that makes them."
                ) from error
            raise
        return True

    def _link_once(self, temporary: str, key: str) -> None:
        os.link(temporary, key, src_dir_fd=self._root, dst_dir_fd=self._root)

    def _make_folder(self, folder: str) -> None:
        with suppress(FileExistsError):
            os.mkdir(folder, FOLDER_MODE, dir_fd=self._root)

    def _force_name(self, key: str) -> None:
        """Make the name of an existing object durable, with those of its folders."""
        folders = _folders_of(key)
        for folder in folders:
            if folder not in self._durable_folders:  # possibly made a moment ago, also by another process
                self._force_folder(folder.rpartition("/")[0])
                self._durable_folders.add(folder)
        self._force_folder(folders[-1] if folders else "")

    def _force_folder(self, folder: str) -> None:
        descriptor = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._root)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _remove_leftovers(self, now: float) -> None:
        """Remove old temporary files of any writer, at most once in LEFTOVER_SECONDS. `now`: by the file system."""
        with self._lock:
            if now < self._next_cleaning:
                return
            self._next_cleaning = now + LEFTOVER_SECONDS
        for name in self._names(TEMPORARY):
            with suppress(FileNotFoundError):
                if self._stat(name.path).st_mtime <= now - LEFTOVER_SECONDS:
                    os.unlink(name.path, dir_fd=self._root)

    # Reading

    def _walk(self, folder: str, prefix: str, after: str) -> Iterator[str]:
        """Yield the paths of the files below `folder`, which is "" or ends with "/", in the order of keys."""
        for path in self._sorted_paths(folder, prefix, after):
            if path.endswith("/"):
                yield from self._walk(path, prefix, after)
            else:
                yield path

    def _sorted_paths(self, folder: str, prefix: str, after: str) -> Iterator[str]:
        """Yield the paths in `folder` that are wanted, in order; those of folders end with "/".

        The folder is read once: what does not fit into a page waits in a temporary file, as pages that are merged.
        """
        wanted = (each.path for each in self._names(folder) if _may_have(each, prefix, after))
        with tempfile.SpooledTemporaryFile(SPOOL_BYTES) as spool:
            ends = [0]
            while page := sorted(itertools.islice(wanted, PAGE)):
                if len(page) < PAGE and len(ends) == 1:
                    yield from page
                    return
                with _errors_of_temporary_files():
                    spool.write("".join(f"{path}\n" for path in page).encode())
                    ends.append(spool.tell())
            yield from heapq.merge(*(_read_page(spool, begin, end) for begin, end in itertools.pairwise(ends)))

    def _names(self, folder: str) -> Iterator[_Name]:
        try:
            descriptor = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._root)
        except FileNotFoundError:
            return
        try:
            with os.scandir(descriptor) as entries:
                before = f"{folder.rstrip('/')}/" if folder else ""
                for entry in entries:
                    if not entry.name.startswith(".") and entry.name.isascii() and entry.name.isprintable():
                        is_folder = entry.is_dir(follow_symlinks=False)
                        yield _Name(f"{before}{entry.name}{'/' if is_folder else ''}", is_folder)
        finally:
            os.close(descriptor)

    def _exists(self, key: str) -> bool:
        try:
            return stat.S_ISREG(self._stat(key).st_mode)
        except FileNotFoundError:
            return False

    def _stat(self, path: str) -> os.stat_result:
        return os.stat(path, dir_fd=self._root, follow_symlinks=False)

    # Errors

    def _check_root(self) -> None:
        """Raise StoreRefused if the folder was removed: then no object would ever be found."""
        if os.fstat(self._root).st_nlink == 0:
            raise StoreRefused(f"The folder of the store {self.name} was removed: restore it, and restart the server")

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._to_store_error(error) from error

    def _to_store_error(self, error: OSError) -> ReplicationError:
        if error.errno in FULL:
            return StoreUnavailable(f"The store {self.name} is full: {error.strerror}.")
        if error.errno in PERMANENT_ERRNOS and error.errno != errno.ENOENT:
            return StoreRefused(
                f"The store {self.name} refuses this user ({error.strerror}): permit it to read and to write there."
            )
        return StoreUnavailable(f"The store {self.name} failed: {error.strerror}.")


@contextmanager
def suppress_read_only() -> Iterator[None]:
    """Ignore that nothing can be fsynced on a read-only file system: what is read there is durable."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EROFS:
            raise


@contextmanager
def _errors_of_temporary_files() -> Iterator[None]:
    """Say that it is not the store that failed."""
    try:
        yield
    except OSError as error:
        folder = tempfile.tempdir or "the folder for temporary files"
        raise StoreUnavailable(
            f"The list of a large folder of the store needs a temporary file in {folder}, which failed:"
            f" {error.strerror}. Make room there, or set TMPDIR to another folder."
        ) from error


def _read_page(spool: IO[bytes], begin: int, end: int) -> Iterator[str]:
    """Yield the paths of a sorted page, of which little is in memory."""
    left = b""
    while begin < end:
        with _errors_of_temporary_files():
            spool.seek(begin)
            data = spool.read(min(PAGE_READ_BYTES, end - begin))
        begin += len(data)
        *lines, left = (left + data).split(b"\n")
        for line in lines:
            yield line.decode()


def _folders_of(key: str) -> list[str]:
    """Return the folders of a key, the outermost first."""
    names = key.split("/")[:-1]
    return ["/".join(names[: count + 1]) for count in range(len(names))]


def _may_have(name: _Name, prefix: str, after: str) -> bool:
    """Return whether `name` is, or can have below it, a key that begins with `prefix` and comes after `after`."""
    path = name.path
    if name.is_folder:
        return (path.startswith(prefix) or prefix.startswith(path)) and (path > after or after.startswith(path))
    return path.startswith(prefix) and path > after
