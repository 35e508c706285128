"""The outbox: an SQLite file with batches that wait until their partition accepts writes.

Each row is a batch of encoded records, with the id under which it may have been sent: topic incarnation, producer id,
sequence, and the end of the log before the send. A row without such an id was never sent. So after a crash the next
process can ask the broker which rows the broker has stored. Only one process at a time can use the outbox: the process
holds the lock on DATABASE.lock, which the kernel releases when the process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from journal.disk import RealDisk
from tfmq.errors import Busy, NotAllowed, StoreFailed

_TABLE: Final = """create table if not exists kept (
    id integer primary key autoincrement, topic text not null, partition integer not null, count integer not null,
    blocks text not null, data blob not null, incarnation integer not null, producer_id integer not null,
    sequence integer not null, from_offset integer not null)"""
_INDEX: Final = "create index if not exists kept_by_partition on kept (topic, partition, id)"
_COLUMNS: Final = "id, count, blocks, data, incarnation, producer_id, sequence, from_offset"

SCHEMA_VERSION: Final = 1
"""Version of the database schema. Files of early releases, which recorded no version, have version 0."""
LOCK_SUFFIX: Final = ".lock"
FILE_NUMBER_SHIFT: Final = 40
"""The bits of a batch id from this one on count how often the file was replaced, so that an outdated id is detected."""
FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600
"""Permissions of the outbox: only the user may read the file, because it has payloads."""


class SentAs(NamedTuple):
    """The id under which a batch was sent or may have been sent. `producer_id` 0: the batch was never sent.

    `from_offset`: the end of the log before the batch was sent. A search for the batch's records begins there.
    """

    incarnation: int
    producer_id: int
    sequence: int
    from_offset: int


NEVER_SENT: Final = SentAs(0, 0, 0, 0)


class StoredBatch(NamedTuple):
    """A stored batch. Later batches have larger `id`s. `blocks`: (size, number of records, CRC-32) of each block."""

    id: int
    count: int  # type: ignore[assignment]
    blocks: list[tuple[int, int, int]]
    data: bytes
    sent_as: SentAs


class Outbox:
    """The outbox file at `path`. Thread-safe. Every method may block on the disk.

    Methods raise `StoreFailed` if the file cannot be read or written, `NotAllowed` if another process uses it.
    """

    def __init__(self, path: str, bytes_max: int) -> None:
        self.path = os.path.abspath(os.path.expanduser(path))
        self._bytes_max = bytes_max
        self._mutex = threading.Lock()
        self._database: sqlite3.Connection | None = None
        self._lock_descriptor = -1
        self._bytes = 0
        self._file_number = 0
        self._opened_identity: tuple[object, object] = (None, None)
        self._parent_databases: list[sqlite3.Connection | None] = []

    def partitions(self) -> list[tuple[str, int]]:
        with self._open_database() as database:
            return list(database.execute("select distinct topic, partition from kept"))

    def append(self, topic: str, partition: int, batches: Iterable[tuple[int, Sequence[Any], bytes, SentAs]]) -> None:
        """Append all `batches` (count, blocks, data, id) or none, and fsync. Raises `Busy` if the file is full."""
        rows = [
            (topic, partition, count, json.dumps(list(map(tuple, blocks))), data, *sent_as)
            for count, blocks, data, sent_as in batches
        ]
        size = sum(len(row[4]) for row in rows)
        with self._open_database() as database:
            if self._bytes + size > self._bytes_max:
                raise Busy(
                    f"{self.path} stores {self._bytes} bytes for partitions that accept no writes; its limit is"
                    f" {self._bytes_max}: make {topic}/{partition} writable again, or raise store_bytes."
                )
            database.executemany("insert into kept values (null, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
            database.commit()
            self._bytes += size

    def read_oldest(self, topic: str, partition: int, count_max: int, bytes_max: int) -> list[StoredBatch]:
        """Return the oldest batches of a partition up to the limits, but at least one batch if there is any."""
        found: list[StoredBatch] = []
        size = 0
        with self._open_database() as database:
            cursor = database.execute(
                f"select {_COLUMNS} from kept where topic = ? and partition = ? order by id limit ?",
                (topic, partition, count_max),
            )
            for number, count, blocks, data, *sent_as in cursor:
                size += len(data)
                if found and size > bytes_max:
                    break
                number |= self._file_number << FILE_NUMBER_SHIFT
                found.append(StoredBatch(number, count, list(map(tuple, json.loads(blocks))), data, SentAs(*sent_as)))
            cursor.close()
        return found

    def record_sent_as(self, entries: Iterable[tuple[int, SentAs]]) -> None:
        """Record the `SentAs` ids of batches before they are sent, and fsync. `entries`: (batch id, `SentAs`)."""
        with self._open_database() as database:
            database.executemany(
                "update kept set incarnation = ?, producer_id = ?, sequence = ?, from_offset = ? where id = ?",
                [(*sent_as, self._row_id(number)) for number, sent_as in entries],
            )
            database.commit()

    def remove(self, rows: Iterable[StoredBatch]) -> None:
        removed = list(rows)
        with self._open_database() as database:
            database.executemany("delete from kept where id = ?", [(self._row_id(row.id),) for row in removed])
            database.commit()
            self._bytes -= sum(len(row.data) for row in removed)

    def close(self) -> None:
        """Close the file and release the lock. The next call of another method opens the file again."""
        with self._mutex:
            self._close_file()

    def abandon_after_fork(self) -> None:
        """Forget the parent's file in a forked child. Do not close it: SQLite would release the parent's locks."""
        self._mutex = threading.Lock()
        self._parent_databases.append(self._database)
        self._database = None
        self._release_lock()

    def _close_file(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            database.close()
        self._release_lock()

    def _discard_if_replaced(self) -> bool:
        """Close the outbox if its file or lock file was removed or replaced. Return whether this is so.

        Without this check, SQLite would continue to write into the removed file, and another process could get the
        lock. The batch ids of the closed file become invalid.
        """
        replaced = self._opened_identity != (_file_identity(self.path), _file_identity(self.path + LOCK_SUFFIX))
        if replaced:
            self._close_file()
            self._file_number += 1
        return replaced

    def _row_id(self, id: int) -> int:
        """Return the row id in the open file for a batch id. Raises `StoreFailed` for an id from an earlier file."""
        if id >> FILE_NUMBER_SHIFT != self._file_number:
            raise self._lost_error()
        return id & ((1 << FILE_NUMBER_SHIFT) - 1)

    def _lost_error(self) -> StoreFailed:
        return StoreFailed(f"{self.path} was removed or replaced while it was in use: its contents are lost.")

    def _release_lock(self) -> None:
        if self._lock_descriptor >= 0:
            os.close(self._lock_descriptor)
            self._lock_descriptor = -1

    @contextlib.contextmanager
    def _open_database(self) -> Iterator[sqlite3.Connection]:
        """Yield the open and locked database. If the `with` block raises, roll back. Errors: see `Outbox`."""
        with self._mutex:
            try:
                if self._database is not None:
                    self._discard_if_replaced()
                database = self._database or self._open()
                try:
                    yield database
                except BaseException:
                    database.rollback()
                    raise
                if self._discard_if_replaced():
                    raise self._lost_error()
            except (OSError, sqlite3.Error) as error:
                if isinstance(error, Busy | NotAllowed | StoreFailed):
                    raise
                raise StoreFailed(f"{self.path}: {error}") from error

    def _open(self) -> sqlite3.Connection:
        _create_file(self.path)
        descriptor = os.open(self.path + LOCK_SUFFIX, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise NotAllowed(
                f"{self.path} is in use by another producer: give each process a store of its own."
            ) from None
        locked = os.fstat(descriptor)
        opened = (_file_identity(self.path), (locked.st_dev, locked.st_ino))
        try:
            database = sqlite3.connect(self.path, check_same_thread=False)
            (version,) = database.execute("pragma user_version").fetchone()
            if version > SCHEMA_VERSION:
                database.close()
                raise StoreFailed(
                    f"{self.path} was written by a newer version of tfmq: it is of version {version}, this one knows"
                    f" up to {SCHEMA_VERSION}. Start the newer version, or give this one a store of its own."
                )
            database.execute("pragma journal_mode = wal")
            database.execute("pragma synchronous = full")  # In WAL mode this makes every commit fsync.
            database.execute(_TABLE)
            database.execute(_INDEX)
            if version < SCHEMA_VERSION:
                database.execute(f"pragma user_version = {SCHEMA_VERSION}")
            database.commit()
            self._bytes = database.execute("select coalesce(sum(length(data)), 0) from kept").fetchone()[0]
        except BaseException:
            os.close(descriptor)
            raise
        self._lock_descriptor, self._database, self._opened_identity = descriptor, database, opened
        return database


def _create_file(path: str) -> None:
    """Create the file and its missing folders. Fsync the parent folder of each of them, so that all are durable."""
    folder = os.path.dirname(path)
    missing = [] if os.path.exists(path) else [path]
    while not os.path.exists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for each in reversed(missing):
        if each == path:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
        else:
            os.makedirs(each, FOLDER_MODE, exist_ok=True)
        RealDisk().force_folder(os.path.dirname(each))


def _file_identity(path: str) -> tuple[int, int] | None:
    """Return the device and inode of the file at `path`; None if there is no file."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
