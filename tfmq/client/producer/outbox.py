"""Batches that wait for their partition, in an SQLite file: committed and forced before `keep` returns.

A row is a batch of records as they go out, with the place under which it may have been sent: incarnation, producer id,
sequence, and the end of the log before. Nothing written: never sent. So whoever opens the file after a crash can find
out at the broker which rows arrived. One living process has the file: DATABASE.lock, given back however it ends.
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


VERSION: Final = 1
"""Of the table; 0 is what it was before it had a number."""
LOCK_SUFFIX: Final = ".lock"
FILE_SHIFT: Final = 40
"""An id's upper bits count the files that were opened at the path, so that rows of two are not taken for each other."""
FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600
"""Payloads are nobody else's."""


class Place(NamedTuple):
    """Under what a batch was, or may have been, sent. `producer_id` 0: it never was."""

    incarnation: int
    producer_id: int
    sequence: int
    from_offset: int


NOWHERE: Final = Place(0, 0, 0, 0)


class Kept(NamedTuple):
    """A batch to be forwarded; `id` grows in the order in which batches were kept. `blocks`: as PRODUCE has them."""

    id: int
    count: int  # type: ignore[assignment]
    blocks: list[tuple[int, int, int]]
    data: bytes
    place: Place


class LocalStore:
    """The store at `path`. Every method may wait for the disk; one at a time, from any thread.

    Raises `StoreFailed` where the file cannot be read or written, `NotAllowed` where another process has it.
    """

    def __init__(self, path: str, bytes_max: int) -> None:
        self.path = os.path.abspath(os.path.expanduser(path))
        self._bytes_max = bytes_max
        self._guard = threading.Lock()
        self._database: sqlite3.Connection | None = None
        self._descriptor = -1
        self._bytes = 0
        self._file = 0
        self._opened: tuple[object, object] = (None, None)
        self._parents: list[sqlite3.Connection | None] = []

    def partitions(self) -> list[tuple[str, int]]:
        """Those for which something is kept."""
        with self._using() as database:
            return list(database.execute("select distinct topic, partition from kept"))

    def keep(
        self, topic: str, partition: int, batches: Iterable[tuple[int, Sequence[Any], bytes, Place]]
    ) -> None:
        """Store (count, blocks, data, place) of each behind what is there, all or none. Beyond the bound: `Busy`."""
        rows = [
            (topic, partition, count, json.dumps(list(map(tuple, blocks))), data, *place)
            for count, blocks, data, place in batches
        ]
        size = sum(len(row[4]) for row in rows)
        with self._using() as database:
            if self._bytes + size > self._bytes_max:
                raise Busy(
                    f"{self.path} keeps {self._bytes} bytes for partitions that take no writes, and may keep"
                    f" {self._bytes_max}: get {topic}/{partition} going, or allow more with store_bytes."
                )
            database.executemany("insert into kept values (null, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
            database.commit()
            self._bytes += size

    def first(self, topic: str, partition: int, count_max: int, bytes_max: int) -> list[Kept]:
        """The oldest rows of a partition, at least one if there is any."""
        found: list[Kept] = []
        size = 0
        with self._using() as database:
            cursor = database.execute(
                f"select {_COLUMNS} from kept where topic = ? and partition = ? order by id limit ?",
                (topic, partition, count_max),
            )
            for number, count, blocks, data, *place in cursor:
                size += len(data)
                if found and size > bytes_max:
                    break
                number |= self._file << FILE_SHIFT
                found.append(Kept(number, count, list(map(tuple, json.loads(blocks))), data, Place(*place)))
            cursor.close()
        return found

    def place(self, places: Iterable[tuple[int, Place]]) -> None:
        """Write down under what these rows are about to be sent."""
        with self._using() as database:
            database.executemany(
                "update kept set incarnation = ?, producer_id = ?, sequence = ?, from_offset = ? where id = ?",
                [(*place, self._row(number)) for number, place in places],
            )
            database.commit()

    def remove(self, rows: Iterable[Kept]) -> None:
        """These have arrived."""
        gone = list(rows)
        with self._using() as database:
            database.executemany("delete from kept where id = ?", [(self._row(row.id),) for row in gone])
            database.commit()
            self._bytes -= sum(len(row.data) for row in gone)

    def close(self) -> None:
        """Give it back; the next call opens it again."""
        with self._guard:
            self._shut()

    def forked(self) -> None:
        """In a child: the parent has it. SQLite's part is left as it is: to close it here might take it from there."""
        self._guard = threading.Lock()
        self._parents.append(self._database)
        self._database = None
        self._give_back()

    def _shut(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            database.close()
        self._give_back()

    def _is_gone(self) -> bool:
        """Whether file or lock are not those at the path any more: SQLite would go on writing into what nobody can open
        again, and somebody else could have the lock as well."""
        return self._opened != (_identity(self.path), _identity(self.path + LOCK_SUFFIX))

    def _leave(self) -> None:
        """The file that was opened: the rows of the next one are others."""
        self._shut()
        self._file += 1

    def _row(self, id: int) -> int:
        """The row of that id in the file. Raises `StoreFailed` where it was read from another one."""
        if id >> FILE_SHIFT != self._file:
            raise self._lost()
        return id & ((1 << FILE_SHIFT) - 1)

    def _lost(self) -> StoreFailed:
        return StoreFailed(
            f"{self.path} was removed or replaced while it was in use: what was in it is gone."
        )

    def _give_back(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @contextlib.contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        with self._guard:
            try:
                if self._database is not None and self._is_gone():
                    self._leave()
                database = self._database or self._open()
                try:
                    yield database
                except BaseException:
                    database.rollback()
                    raise
                if self._is_gone():
                    self._leave()
                    raise self._lost()
            except (OSError, sqlite3.Error) as error:
                if isinstance(error, Busy | NotAllowed | StoreFailed):
                    raise
                raise StoreFailed(f"{self.path}: {error}") from error

    def _open(self) -> sqlite3.Connection:
        _make(self.path)
        descriptor = os.open(self.path + LOCK_SUFFIX, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise NotAllowed(
                f"{self.path} is in use by another producer: give each process a store of its own."
            ) from None
        held = os.fstat(descriptor)
        opened = (_identity(self.path), (held.st_dev, held.st_ino))
        try:
            database = sqlite3.connect(self.path, check_same_thread=False)
            (version,) = database.execute("pragma user_version").fetchone()
            if version > VERSION:
                database.close()
                raise StoreFailed(
                    f"{self.path} was written by a newer version of tfmq: it is of version {version}, this one knows"
                    f" up to {VERSION}. Start the newer version, or give this one a store of its own."
                )
            database.execute("pragma journal_mode = wal")
            database.execute("pragma synchronous = full")  # in this mode, forced at every commit
            database.execute(_TABLE)
            database.execute(_INDEX)
            if version < VERSION:
                database.execute(f"pragma user_version = {VERSION}")
            database.commit()
            self._bytes = database.execute("select coalesce(sum(length(data)), 0) from kept").fetchone()[0]
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor, self._database = descriptor, database
        self._opened = opened
        return database


def _make(path: str) -> None:
    """The file, where there is none, and the folders that are missing above it; each is on the disk then."""
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


def _identity(path: str) -> tuple[int, int] | None:
    """What tells the file at `path` from every other one; None: there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
