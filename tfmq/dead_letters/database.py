"""The database that keeps dead letters: opened when it is first used, and told to be durable.

SQLite: `synchronous=FULL`, so that what is committed survives a power cut, and in a file of our own a write-ahead log,
so that readers do not stop the writer; a transaction that changes something takes its lock when it begins, so that
two processes wait for each other instead of failing. PostgreSQL: `synchronous_commit` on, whatever its default is.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Column, create_engine, event, inspect
from sqlalchemy.engine import Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.schema import CreateColumn

from journal.disk import Disk, RealDisk
from tfmq.client.dead_letters import StoreUnusable
from tfmq.dead_letters.address import ALLOWED, Address
from tfmq.dead_letters.table import ADDED, METADATA, TABLE
from tfmq.errors import BadRequest, StoreFailed
from tfmq.offsets.storage import driver_remedy, is_hopeless

BUSY_SECONDS: Final = 30.0
"""How long one process waits for another one's transaction, which has at most a page of letters."""
READS: Final = "tfmq_reads"
"""The option of connections that change nothing."""
FILE: Final = "tfmq_file"
"""The option of an engine that says which file it opened."""
FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600
"""Payloads are nobody else's."""


class Database:
    """See the module. Safe for threads; a forked child opens its own."""

    def __init__(self, address: Address) -> None:
        self.name = str(address)
        self.address = address
        self._url = _url(address)
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._has_table = False
        self._process = os.getpid()

    @property
    def path(self) -> Path | None:
        """The file, where it is one."""
        found = self._url.get_backend_name() == "sqlite" and self._url.database
        return Path(str(found)) if found else None

    @property
    def _own_path(self) -> Path | None:
        """The file, where it is nobody else's."""
        return self.path if self.address.kind == "path" else None

    def is_there(self) -> bool:
        """Whether there is a store already. Raises `StoreFailed` where that cannot be known."""
        if self.path is not None and not self.path.exists():
            return False
        with self.failing():
            return inspect(self._connected()).has_table(TABLE.name)

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction; committed, and on the disk, when the block ends. Raises `StoreFailed`."""
        with self.failing(), self._opened().begin() as connection:
            yield connection
            engine = connection.engine
        if self._is_gone(engine):
            raise StoreFailed(
                f"The file of the dead letters at {self.name} was removed or replaced while they were written: what was"
                " written is gone with it."
            )

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Raises `StoreFailed`."""
        with self.failing(), self._opened().execution_options(**{READS: True}).connect() as connection:
            yield connection

    @contextmanager
    def failing(self) -> Iterator[None]:
        """What a database raises becomes `StoreFailed`, which names the store and never a value of a row."""
        try:
            yield
        except SQLAlchemyError as error:
            raise self._failed(error, _reason(error)) from error
        except (OSError, OverflowError) as error:  # a driver may refuse a number before the database does
            raise self._failed(error, getattr(error, "strerror", None) or str(error)) from error

    def _failed(self, error: Exception, reason: str) -> StoreFailed:
        """`error`, which may pass; or that there can be no dead letters."""
        if is_hopeless(error, self.path):
            return StoreUnusable(
                f"No dead letters can be kept at {self.name}: {reason}. Name a file that this user may make and write,"
                " or a database that lets him."
            )
        return StoreFailed(f"The dead letters at {self.name} could not be reached: {reason}")

    def close(self) -> None:
        with self._lock:
            if self._engine is not None:
                self._engine.dispose(close=self._process == os.getpid())
            self._engine = None

    def _opened(self) -> Engine:
        """The engine, with the table made where it was missing."""
        engine = self._connected()
        if not self._has_table:
            try:
                METADATA.create_all(engine, checkfirst=True)
            except SQLAlchemyError:  # another process may have made it in the same moment
                if not inspect(engine).has_table(TABLE.name):
                    raise
            _add_columns(engine)
            self._has_table = True
        return engine

    def _connected(self) -> Engine:
        with self._lock:
            own = self._process == os.getpid()
            if self._engine is not None and (not own or self._is_gone(self._engine)):
                self._engine.dispose(close=own)  # else the connections are the parent's
                self._engine = None
            if self._engine is None:
                self._engine, self._process, self._has_table = self._made(), os.getpid(), False
            return self._engine

    def _is_gone(self, engine: Engine) -> bool:
        """Whether the file that `engine` opened is not the one at the path any more: SQLite would go on writing into
        what nobody can open again."""
        opened = engine.get_execution_options().get(FILE)
        return opened is not None and opened != identity(self._own_path)

    def _made(self) -> Engine:
        if self._url.get_backend_name() != "sqlite":
            is_postgresql = self._url.get_backend_name() == "postgresql"
            told = (
                {"isolation_level": "READ COMMITTED"} if is_postgresql else {}
            )  # rows are read under their locks
            engine = create_engine(self._url, pool_pre_ping=True, hide_parameters=True, **told)
            if is_postgresql:
                event.listen(engine, "connect", _commit_synchronously)
            return engine
        if self.path is not None:
            make_folder(self.path.parent)
        if self._own_path is not None:
            make_file(self._own_path)
        engine = create_engine(
            self._url,
            connect_args={"timeout": BUSY_SECONDS},
            hide_parameters=True,
            execution_options={FILE: identity(self._own_path)},
        )
        event.listen(engine, "connect", _sync_fully)
        if self._own_path is not None:
            event.listen(engine, "connect", _log_ahead)
        event.listen(engine, "begin", _lock_at_once)
        return engine


def _add_columns(engine: Engine) -> None:
    """Those that the table of an earlier release does not have, in place."""
    for column in _missing(engine):
        words = str(CreateColumn(column).compile(dialect=engine.dialect))
        try:
            with engine.begin() as connection:
                connection.exec_driver_sql(f"ALTER TABLE {TABLE.name} ADD COLUMN {words}")
        except SQLAlchemyError:  # another process may have added it in the same moment
            if column in _missing(engine):
                raise


def _missing(engine: Engine) -> list[Column[Any]]:
    there = {each["name"] for each in inspect(engine).get_columns(TABLE.name)}
    return [each for each in ADDED if each.name not in there]


def make_folder(folder: Path, disk: Disk | None = None) -> None:
    """The folder of the store, and those above it, each on the disk before something is put into it."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=FOLDER_MODE, exist_ok=True)
        (disk or RealDisk()).force_folder(str(each.parent))


def make_file(path: Path, disk: Disk | None = None) -> None:
    """The file of the store, where there is none, for its owner only; SQLite gives what it puts beside it the same
    mode."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
    except FileExistsError:
        return
    (disk or RealDisk()).force_folder(str(path.parent))


def identity(path: Path | None) -> tuple[int, int] | None:
    """What tells the file at `path` from every other one; (0, 0): there is none; None: no path was given."""
    if path is None:
        return None
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return (0, 0)
    return (found.st_dev, found.st_ino)


def _url(address: Address) -> Any:
    if address.kind == "path":
        path = Path(address.value).expanduser()
        return make_url("sqlite://").set(database=str(path.absolute()))
    try:
        url = make_url(address.value)
        url.get_dialect()
        if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
            raise BadRequest(
                f"{address} is in memory: dead letters must outlive the process, give it a file."
            )
        if url.get_dialect().is_async:
            raise BadRequest(
                f"The driver of {address} is one for asyncio: write a blocking one of the same database."
            )
        url.get_dialect().import_dbapi()
        return url
    except ImportError as error:
        raise BadRequest(
            f"The driver of {address} is not installed ({error}): {driver_remedy(url.drivername, error)}."
        ) from None
    except NoSuchModuleError as error:
        raise BadRequest(f"{address} names no database that SQLAlchemy knows ({error}): {ALLOWED}.") from None
    except (ArgumentError, ValueError):  # their words may have the password
        raise BadRequest(f"{address} is no URL that SQLAlchemy can read: {ALLOWED}.") from None


def _sync_fully(connection: Any, _: object) -> None:
    connection.isolation_level = None  # SQLAlchemy begins, not the driver: see _lock_at_once
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


def _log_ahead(connection: Any, _: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.close()


def _lock_at_once(connection: Connection) -> None:
    reads = connection.get_execution_options().get(READS)
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


def _commit_synchronously(connection: Any, _: object) -> None:
    before, connection.autocommit = connection.autocommit, True
    cursor = connection.cursor()
    cursor.execute("SET synchronous_commit TO on")
    cursor.close()
    connection.autocommit = before


def _reason(error: SQLAlchemyError) -> str:
    """The driver's own words on one line, without the statement, its values, and those of the row that was refused."""
    words, _, _ = str(getattr(error, "orig", None) or error).partition("\nDETAIL:")
    return " ".join(words.split())
