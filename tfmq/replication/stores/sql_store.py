"""Objects as rows of a table in a database, through SQLAlchemy. The primary key is the object's key.

Commits are made durable in PostgreSQL and SQLite, whatever the default there is. Other databases are used as they are
set up.
"""

from __future__ import annotations

import os
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import UTC
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    LargeBinary,
    MetaData,
    String,
    Table,
    case,
    create_engine,
    delete,
    event,
    func,
    insert,
    inspect,
    select,
)
from sqlalchemy.dialects.mysql import LONGBLOB
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    IntegrityError,
    InterfaceError,
    NoSuchModuleError,
    OperationalError,
    SQLAlchemyError,
)

from tfmq.databases import driver_install_hint, is_permanent_error, url_without_passwords
from tfmq.replication.errors import InvalidObject, ReplicationError, StoreRefused, StoreUnavailable
from tfmq.replication.store import KEY_CHARACTERS_MAX, OBJECT_BYTES_MAX, URL_FORMS, StoredObject, check_key, check_size

CONNECT_SECONDS: Final = 5
CALL_SECONDS: Final = 30
CONNECTIONS_MAX: Final = 16
PAGE: Final = 1000
PREFIX_PARAMETER: Final = "prefix"
"""Parameter of the URL that tfmq takes for itself: several brokers may use one table."""
PREFIX_CHARACTERS_MAX: Final = 54
AFTER_KEYS: Final = "~"
"""Sorts after every character of a key."""
LIBPQ: Final = {
    "connect_timeout": CONNECT_SECONDS,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": CALL_SECONDS * 1000,
}
"""Parameters of PostgreSQL's drivers that use libpq: a server that is gone is noticed within CALL_SECONDS."""
LIBPQ_DRIVERS: Final = ("psycopg", "psycopg2")
FULL_SQLSTATES: Final = frozenset({"53100", "53000"})
SQLITE_FULL: Final = 13
SQLITE_PARAMETERS: Final = (
    "cached_statements",
    "check_same_thread",
    "detect_types",
    "isolation_level",
    "timeout",
    "uri",
)
"""What SQLAlchemy gives to SQLite's driver."""
READ_ONLY_SQLSTATE: Final = "25006"

TABLE: Final = Table(
    "tfmq_objects",
    MetaData(),
    Column(
        "key",
        # Keys are compared byte by byte, whatever the language of the database.
        String(KEY_CHARACTERS_MAX + PREFIX_CHARACTERS_MAX + 1)
        .with_variant(String(KEY_CHARACTERS_MAX + PREFIX_CHARACTERS_MAX + 1, collation="C"), "postgresql")
        .with_variant(
            String(KEY_CHARACTERS_MAX + PREFIX_CHARACTERS_MAX + 1, collation="ascii_bin"), "mysql", "mariadb"
        ),
        primary_key=True,
    ),
    Column("value", LargeBinary().with_variant(LONGBLOB(), "mysql", "mariadb"), nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("stored", DateTime(timezone=True), nullable=False),
)


class SqlStore:
    """A `tfmq.replication.store.Store` in a database. It connects, and creates the table, on first use.

    With `must_exist` a table, or a file of SQLite, that is not there is refused on first use, and not created.
    """

    def __init__(self, url: str, *, must_exist: bool = False) -> None:
        """Raises StoreRefused for an invalid URL, a database in memory, and a driver that is missing."""
        self._must_exist = must_exist
        self._url, self._prefix = _parse(url)
        self._shown = url_without_passwords(self._url.render_as_string(hide_password=True))
        self._shown += (
            f"{'&' if self._url.query else '?'}{PREFIX_PARAMETER}={self._prefix[:-1]}" if self._prefix else ""
        )
        self._engine = self._create_engine()
        self._has_table = False
        self._limit = _CallLimit() if self._url.get_driver_name() in LIBPQ_DRIVERS else None
        self._writing: AbstractContextManager[object] = nullcontext()
        if self._url.get_backend_name() == "sqlite":
            # It has one writer at a time. Its others look again only after pauses of up to 0.1 s.
            self._writing = threading.Lock()

    @property
    def name(self) -> str:
        return self._shown

    def put_new(self, key: str, data: bytes) -> bool:
        check_key(key)
        check_size(key, len(data))
        is_mysql = self._engine.dialect.name in ("mysql", "mariadb")
        row = insert(TABLE).values(
            key=self._prefix + key,
            value=data,
            size_bytes=len(data),
            stored=func.utc_timestamp() if is_mysql else func.current_timestamp(),
        )
        with self._translated_errors():
            try:
                with self._writing, self._connection() as connection:
                    connection.execute(row)
            except IntegrityError:
                return False
        return True

    def get(self, key: str) -> bytes | None:
        check_key(key)
        is_small = TABLE.c.size_bytes <= OBJECT_BYTES_MAX
        query = select(case((is_small, TABLE.c.value), else_=None)).where(TABLE.c.key == self._prefix + key)
        with self._translated_errors(), self._connection() as connection:
            row = connection.execute(query).first()
        if row is None:
            return None
        if row[0] is None:
            raise InvalidObject(f"{key} in {self.name} has more than {OBJECT_BYTES_MAX} bytes")
        return bytes(row[0])

    def list(self, prefix: str, after: str = "") -> Iterator[StoredObject]:
        begin, last = self._prefix + prefix, self._prefix + after
        query = (
            select(TABLE.c.key, TABLE.c.size_bytes, TABLE.c.stored)
            .where(TABLE.c.key >= begin, TABLE.c.key < begin + AFTER_KEYS)
            .order_by(TABLE.c.key)
            .limit(PAGE)
        )
        while True:
            with self._translated_errors(), self._connection() as connection:
                rows = connection.execute(query.where(TABLE.c.key > last)).all()
            for key, size_bytes, stored in rows:
                if not (key.startswith(begin) and key > last):
                    raise StoreRefused(
                        f"The database {self.name} does not compare keys byte by byte ({last}, then {key}): give the"
                        f" column key of the table {TABLE.name} a binary collation."
                    )
                last = key
                at = stored if stored.tzinfo is not None else stored.replace(tzinfo=UTC)
                yield StoredObject(key.removeprefix(self._prefix), size_bytes, at.timestamp())
            if len(rows) < PAGE:
                return

    def delete(self, *keys: str) -> None:
        for key in keys:
            check_key(key)
        with self._translated_errors(), self._writing, self._connection() as connection:
            connection.execute(delete(TABLE).where(TABLE.c.key.in_([self._prefix + key for key in keys])))

    def close(self) -> None:
        self._engine.dispose()
        if self._limit is not None:
            self._limit.close()

    def _create_engine(self) -> Engine:
        arguments: dict[str, Any] = {}
        if self._url.get_backend_name() == "sqlite":
            arguments["timeout"] = CALL_SECONDS
        elif self._url.get_driver_name() in LIBPQ_DRIVERS:
            arguments |= {name: value for name, value in LIBPQ.items() if name not in self._url.query}
        engine = create_engine(
            self._url,
            connect_args=arguments,
            isolation_level="AUTOCOMMIT",  # each call is one statement
            pool_size=CONNECTIONS_MAX,
            max_overflow=0,
            pool_timeout=CALL_SECONDS,
            hide_parameters=True,
        )
        if engine.dialect.name == "sqlite":
            event.listen(engine, "connect", _set_up_sqlite)
            if not self._must_exist:
                event.listen(engine, "connect", _use_write_ahead_log)  # changes the file, which may be another one
        elif engine.dialect.name == "postgresql":
            event.listen(engine, "connect", _set_up_postgresql)
        return engine

    def _engine_with_table(self) -> Engine:
        if not self._has_table:
            if self._must_exist:
                self._check_table()
                self._has_table = True
                return self._engine
            try:
                TABLE.create(self._engine, checkfirst=True)
            except SQLAlchemyError:  # Another process may have created it at the same time.
                if not inspect(self._engine).has_table(TABLE.name):
                    raise
            self._has_table = True
        return self._engine

    def _check_table(self) -> None:
        """Raise StoreRefused if the table is missing. A missing file is noticed before SQLite would create it."""
        path = self._url.database or ""
        is_sqlite = self._url.get_backend_name() == "sqlite"
        if is_sqlite and not os.path.exists(path.removeprefix("file:").partition("?")[0]):
            raise StoreRefused(f"The database {self.name} does not exist: correct the URL.")
        if not inspect(self._engine).has_table(TABLE.name):
            raise StoreRefused(
                f"The database {self.name} has no table {TABLE.name}, so nothing was replicated there: correct the URL."
            )

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        """Context of a connection for one call. Raises StoreUnavailable if the call lasts too long."""
        with self._engine_with_table().connect() as connection:
            if self._limit is None:
                yield connection
                return
            driver_connection = connection.connection.driver_connection
            self._limit.begin(driver_connection)
            try:
                yield connection
            except DBAPIError:
                if self._limit.end(driver_connection):
                    raise
                raise StoreUnavailable(
                    f"The database {self.name} does not answer: nothing came within {CALL_SECONDS} s."
                ) from None
            finally:
                self._limit.end(driver_connection)

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            raise self._to_store_error(error) from None  # its text has the row

    def _to_store_error(self, error: SQLAlchemyError) -> ReplicationError:
        reason = _reason(error)
        origin: Any = getattr(error, "orig", None)
        sqlstate = getattr(origin, "sqlstate", None)
        if sqlstate in FULL_SQLSTATES or (getattr(origin, "sqlite_errorcode", 0) or 0) & 0xFF == SQLITE_FULL:
            return StoreUnavailable(f"The database {self.name} is full: {reason}.")
        path = self._url.database if self._url.get_backend_name() == "sqlite" else None
        is_transient = isinstance(error, OperationalError | InterfaceError) or not isinstance(error, DBAPIError)
        is_permanent = is_permanent_error(error, path) or sqlstate == READ_ONLY_SQLSTATE
        if is_permanent and path is not None:
            return StoreRefused(
                f"The database {self.name} cannot be used: {reason}. Its folder must exist, and this user must have the"
                " rights to read and to write there, and in the file if there is one."
            )
        if is_permanent or _is_login_refused(reason):
            return StoreRefused(
                f"The database {self.name} refuses this user: {reason}. It must exist and permit the user to create the"
                f" table {TABLE.name}, and to read and change it."
            )
        if is_transient:
            return StoreUnavailable(f"The database {self.name} does not answer: {reason}.")
        return StoreRefused(f"The database {self.name} refuses the table {TABLE.name}: {reason}.")


class _CallLimit:
    """Cuts connections on which a call lasts longer than CALL_SECONDS.

    libpq waits without limit for a server that stands still and keeps the connection.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ends: dict[Any, float] = {}
        """By the driver's connection: when its call has to end, the earliest first."""
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def begin(self, connection: Any) -> None:
        with self._changed:
            self._ends[connection] = time.monotonic() + CALL_SECONDS
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tfmq-sql-store", daemon=True)
                self._thread.start()
            if len(self._ends) == 1:
                self._changed.notify()

    def end(self, connection: Any) -> bool:
        """Return whether the call has ended in time. A second call changes nothing."""
        with self._changed:
            return self._ends.pop(connection, None) is not None

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while not self._is_closed:
                first = next(iter(self._ends), None)
                if first is None:
                    self._changed.wait()
                elif (left := self._ends[first] - time.monotonic()) > 0:
                    self._changed.wait(left)
                else:
                    del self._ends[first]
                    _cut(first)


def _cut(connection: Any) -> None:
    """End the TCP connection below a driver's connection, whose call then raises an error. The driver closes it."""
    with suppress(Exception), socket.socket(fileno=os.dup(connection.fileno())) as shared:
        shared.shutdown(socket.SHUT_RDWR)


def _parse(text: str) -> tuple[URL, str]:
    """Return the URL for SQLAlchemy, and the prefix of keys, which is "" or ends with "/". Raises StoreRefused."""
    shown = url_without_passwords(text)
    try:
        url = make_url(text)
        prefix = url.query.get(PREFIX_PARAMETER, "")
        url = url.difference_update_query([PREFIX_PARAMETER])
        dialect = url.get_dialect()
        if url.get_backend_name() == "sqlite":
            _check_sqlite(url, shown)
        if dialect.is_async:
            raise StoreRefused(f"The driver of {shown} is for asyncio: use a blocking one of the same database.")
        dialect.import_dbapi()
    except ImportError as error:
        raise StoreRefused(
            f"The driver of {shown} is not installed ({error}): {driver_install_hint(url.drivername, error)}."
        ) from None
    except NoSuchModuleError:
        raise StoreRefused(
            f"{shown} is no store: SQLAlchemy knows no database of this name. Write {URL_FORMS}."
        ) from None
    except (ArgumentError, ValueError):  # The texts of these errors may contain the password.
        raise StoreRefused(f"{shown} is no URL that SQLAlchemy can read.") from None
    if not prefix:
        return url, ""
    try:
        check_key(str(prefix))
        is_valid = isinstance(prefix, str) and len(prefix) <= PREFIX_CHARACTERS_MAX
    except ValueError:
        is_valid = False
    if not is_valid:
        raise StoreRefused(
            f"The prefix of {url_without_passwords(url.render_as_string())} is not one of at most"
            f" {PREFIX_CHARACTERS_MAX} ASCII letters, digits, '-', '.' and '/'."
        )
    return url, f"{prefix}/"


def _check_sqlite(url: URL, shown: str) -> None:
    """Raise StoreRefused for a database that other servers would not find, and for unknown parameters."""
    path = url.database or ""
    is_uri = url.query.get("uri") == "true"  # else a path that begins with "file:" is that of a file of this name
    if not url.host and (path in ("", ":memory:") or url.query.get("mode") == "memory"):
        raise StoreRefused(f"{shown} is in memory, which no other server sees: write sqlite:////PATH.")
    if url.host or not path.startswith(("/", "file:/") if is_uri else "/"):
        raise StoreRefused(
            f"{shown} does not name the whole path, so a server that is started in another folder would have another"
            " file: write sqlite:////PATH, with four slashes."
        )
    unknown = next((name for name in url.query if name not in SQLITE_PARAMETERS), None)
    if unknown is not None and not is_uri:  # the driver ignores it
        known = ", ".join((PREFIX_PARAMETER, *SQLITE_PARAMETERS))
        raise StoreRefused(f"{shown} knows no parameter {unknown[:40]!r}, only {known}.")


def _set_up_sqlite(connection: Any, _: object) -> None:
    """Make commits survive a power failure."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous=EXTRA")  # FULL is enough with a write-ahead log, but not without
    cursor.close()


def _use_write_ahead_log(connection: Any, _: object) -> None:
    """Let readers not wait for the writer."""
    cursor = connection.cursor()
    with suppress(sqlite3.OperationalError):  # locked: another connection switches to the write-ahead log just now
        cursor.execute("PRAGMA journal_mode=WAL")
    cursor.close()


def _set_up_postgresql(connection: Any, _: object) -> None:
    """Make commits durable where the server's default is not, and limit the time of a statement."""
    before, connection.autocommit = connection.autocommit, True
    cursor = connection.cursor()
    cursor.execute(
        "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
    )
    cursor.execute(f"SELECT set_config('statement_timeout', '{CALL_SECONDS}s', false)")
    cursor.close()
    connection.autocommit = before


def _is_login_refused(reason: str) -> bool:
    """Return whether PostgreSQL has refused a connection. libpq tells the reason only as text, in English or not."""
    return "password authentication failed" in reason or "no pg_hba.conf entry" in reason or "does not exist" in reason


def _reason(error: SQLAlchemyError) -> str:
    """Return the database's message on one line, without the statement and its values."""
    words, _, _ = str(getattr(error, "orig", None) or error).partition("\nDETAIL:")
    return " ".join(words.split()).rstrip(".")[:300]
