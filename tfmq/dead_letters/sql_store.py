"""Dead letters in a database, through SQLAlchemy.

Every change is one transaction: rows are read and locked, `state_machine.apply_event` computes the new letters, and
these are written. `BlockingSqlStore` has blocking, thread-safe methods; `SqlLetterStore` has the same methods as
operations (generators that the driver of a client runs). docs/dead-letters.md documents the columns.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Select,
    String,
    Table,
    Text,
    UniqueConstraint,
    and_,
    bindparam,
    create_engine,
    delete,
    event,
    func,
    insert,
    inspect,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.mysql import LONGTEXT
from sqlalchemy.engine import Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.schema import CreateColumn

from journal.disk import Disk, RealDisk
from tfmq.client.operation import Executor, Operation, run_work
from tfmq.client.worker.dead_letter_store import Failure, StoreUnusable
from tfmq.databases import driver_install_hint, is_permanent_error
from tfmq.dead_letters import model
from tfmq.dead_letters.model import FIRST_PAGE, PAGE_LETTERS, Letter, PagePosition, Selection
from tfmq.dead_letters.state_machine import apply_event
from tfmq.dead_letters.store import ADDRESS_FORMS, Step, StoreAddress, default_path, existing_or_default_path
from tfmq.errors import BadRequest, StoreFailed

log = logging.getLogger("tfmq.consumer")

BUSY_SECONDS: Final = 30.0
"""How long a process waits for the write lock of SQLite, while another process changes up to a page of letters."""
READ_ONLY_OPTION: Final = "tfmq_reads"
"""Execution option of read-only connections."""
FILE_OPTION: Final = "tfmq_file"
"""Execution option of an engine: `file_identity` of the file that the engine has opened."""
FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600
"""Mode of a new file: only its owner may read the payloads in it."""


class Database:
    """A database that stores dead letters. It is opened on first use, and its commits are durable.

    SQLite: `synchronous=FULL`, so that a commit survives a power failure. A file that only tfmq uses also gets a
    write-ahead log, so that readers do not block the writer. A write transaction takes the write lock at its start, so
    that two processes wait for each other instead of failing. PostgreSQL: `synchronous_commit` is always set to on.

    Thread-safe; a forked child opens its own connections.
    """

    def __init__(self, address: StoreAddress) -> None:
        self.name = str(address)
        self.address = address
        self._url = _parse_url(address)
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._has_table = False
        self._process = os.getpid()

    @property
    def path(self) -> Path | None:
        """Path of the SQLite file; None for another kind of database, and for a database in memory."""
        found = self._url.get_backend_name() == "sqlite" and self._url.database
        return Path(str(found)) if found else None

    @property
    def _own_path(self) -> Path | None:
        """Path of the SQLite file if the address is a path: only tfmq uses such a file. None for other addresses."""
        return self.path if self.address.kind == "path" else None

    def exists(self) -> bool:
        """Return whether the table of dead letters exists. Raises StoreFailed if the database cannot be queried."""
        if self.path is not None and not self.path.exists():
            return False
        with self.translated_errors():
            return inspect(self._current_engine()).has_table(TABLE.name)

    @contextmanager
    def write_transaction(self) -> Iterator[Connection]:
        """Context of a write transaction. The end of the block commits the transaction durably.

        Raises StoreFailed if the database fails, or if the file was removed or replaced during the transaction.
        """
        with self.translated_errors(), self._engine_with_table().begin() as connection:
            yield connection
            engine = connection.engine
        if self._is_file_replaced(engine):
            raise StoreFailed(
                f"The file of the dead letters at {self.name} was removed or replaced while they were written: the"
                " write is lost."
            )

    @contextmanager
    def read_connection(self) -> Iterator[Connection]:
        """Context of a connection that only reads. Raises StoreFailed if the database fails."""
        with (
            self.translated_errors(),
            self._engine_with_table().execution_options(**{READ_ONLY_OPTION: True}).connect() as connection,
        ):
            yield connection

    @contextmanager
    def translated_errors(self) -> Iterator[None]:
        """Context that converts database errors to StoreFailed, whose text has no values of rows."""
        try:
            yield
        except SQLAlchemyError as error:
            raise self._to_store_error(error, _error_text(error)) from error
        except (OSError, OverflowError) as error:  # A driver raises OverflowError for a number that is too large.
            raise self._to_store_error(error, getattr(error, "strerror", None) or str(error)) from error

    def _to_store_error(self, error: Exception, reason: str) -> StoreFailed:
        if is_permanent_error(error, self.path):
            return StoreUnusable(
                f"No dead letters can be stored at {self.name}: {reason}. Use a file that this user may create and"
                " write, or a database that permits it."
            )
        return StoreFailed(f"The dead letters at {self.name} could not be reached: {reason}")

    def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        with self._lock:
            if self._engine is not None:
                self._engine.dispose(close=self._process == os.getpid())
            self._engine = None

    def _engine_with_table(self) -> Engine:
        """Create the table or its ADDED_COLUMNS if they are missing, and return the engine."""
        engine = self._current_engine()
        if not self._has_table:
            try:
                METADATA.create_all(engine, checkfirst=True)
            except SQLAlchemyError:  # Another process may have created the table at the same time.
                if not inspect(engine).has_table(TABLE.name):
                    raise
            _add_columns(engine)
            self._has_table = True
        return engine

    def _current_engine(self) -> Engine:
        """Return the engine of this process; a new one after a fork, or if the file was replaced."""
        with self._lock:
            own = self._process == os.getpid()
            if self._engine is not None and (not own or self._is_file_replaced(self._engine)):
                self._engine.dispose(close=own)  # In a forked child, the connections belong to the parent process.
                self._engine = None
            if self._engine is None:
                self._engine, self._process, self._has_table = self._create_engine(), os.getpid(), False
            return self._engine

    def _is_file_replaced(self, engine: Engine) -> bool:
        """Return whether the file was removed or replaced after its opening, so that SQLite writes to the old file."""
        opened = engine.get_execution_options().get(FILE_OPTION)
        return opened is not None and opened != file_identity(self._own_path)

    def _create_engine(self) -> Engine:
        if self._url.get_backend_name() != "sqlite":
            is_postgresql = self._url.get_backend_name() == "postgresql"
            options = (
                {"isolation_level": "READ COMMITTED"} if is_postgresql else {}
            )  # Enough: rows are read with locks.
            engine = create_engine(self._url, pool_pre_ping=True, hide_parameters=True, **options)
            if is_postgresql:
                event.listen(engine, "connect", _set_synchronous_commit)
            return engine
        if self.path is not None:
            create_directory(self.path.parent)
        if self._own_path is not None:
            create_file(self._own_path)
        engine = create_engine(
            self._url,
            connect_args={"timeout": BUSY_SECONDS},
            hide_parameters=True,
            execution_options={FILE_OPTION: file_identity(self._own_path)},
        )
        has_wal = self._own_path is not None
        event.listen(engine, "connect", lambda connection, _: _set_up_sqlite(connection, has_wal))
        event.listen(engine, "begin", _begin_transaction)
        return engine


def _add_columns(engine: Engine) -> None:
    for column in _missing_columns(engine):
        words = str(CreateColumn(column).compile(dialect=engine.dialect))
        try:
            with engine.begin() as connection:
                connection.exec_driver_sql(f"ALTER TABLE {TABLE.name} ADD COLUMN {words}")
        except SQLAlchemyError:  # Another process may have added the column at the same time.
            if column in _missing_columns(engine):
                raise


def _missing_columns(engine: Engine) -> list[Column[Any]]:
    there = {each["name"] for each in inspect(engine).get_columns(TABLE.name)}
    return [each for each in ADDED_COLUMNS if each.name not in there]


def create_directory(folder: Path, disk: Disk | None = None) -> None:
    """Create the directory of the store and its missing parents; their entries are durable after the call."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=FOLDER_MODE, exist_ok=True)
        (disk or RealDisk()).force_folder(str(each.parent))


def create_file(path: Path, disk: Disk | None = None) -> None:
    """Create the file of the store if it is missing, private to its owner. SQLite gives its other files this mode."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
    except FileExistsError:
        return
    (disk or RealDisk()).force_folder(str(path.parent))


def file_identity(path: Path | None) -> tuple[int, int] | None:
    """Return device and inode of a file; (0, 0) if it is missing, None without a path."""
    if path is None:
        return None
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return (0, 0)
    return (found.st_dev, found.st_ino)


def _parse_url(address: StoreAddress) -> Any:
    if address.kind == "path":
        path = Path(address.value).expanduser()
        return make_url("sqlite://").set(database=str(path.absolute()))
    try:
        url = make_url(address.value)
        url.get_dialect()
        if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
            raise BadRequest(f"{address} is in memory: dead letters must outlive the process, give it a file.")
        if url.get_dialect().is_async:
            raise BadRequest(f"The driver of {address} is for asyncio: use a blocking one of the same database.")
        url.get_dialect().import_dbapi()
        return url
    except ImportError as error:
        raise BadRequest(
            f"The driver of {address} is not installed ({error}): {driver_install_hint(url.drivername, error)}."
        ) from None
    except NoSuchModuleError as error:
        raise BadRequest(f"{address} names no database that SQLAlchemy knows ({error}): {ADDRESS_FORMS}.") from None
    except (ArgumentError, ValueError):  # The texts of these errors are omitted, because they may contain the password.
        raise BadRequest(f"{address} is no URL that SQLAlchemy can read: {ADDRESS_FORMS}.") from None


def _set_up_sqlite(connection: Any, has_wal: bool) -> None:
    """Make SQLite commits survive a power failure; `has_wal`: with a write-ahead log."""
    # If `isolation_level` is None, the driver begins no transactions, so `_begin_transaction` begins all of them.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous=FULL")
    if has_wal:
        cursor.execute("PRAGMA journal_mode=WAL")
    cursor.close()


def _begin_transaction(connection: Connection) -> None:
    """Begin an SQLite transaction. A transaction that may write takes the write lock at once."""
    reads = connection.get_execution_options().get(READ_ONLY_OPTION)
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


def _set_synchronous_commit(connection: Any, _: object) -> None:
    before, connection.autocommit = connection.autocommit, True
    cursor = connection.cursor()
    cursor.execute("SET synchronous_commit TO on")
    cursor.close()
    connection.autocommit = before


def _error_text(error: SQLAlchemyError) -> str:
    """Return the driver's message on one line, without statement and values."""
    words, _, _ = str(getattr(error, "orig", None) or error).partition("\nDETAIL:")
    return " ".join(words.split())


# Conversion of letters to rows and back. The primary key is the letter's id, a hash of group, incarnation, partition,
# offset and append time. Each of these five also has a column, because people query by them; together they are unique.
# Times are ms since 1970. A missing value is 0 or -1, as documented for each field of `Letter`.

TABLE_NAME: Final = "tfmq_dead_letters"
NAME_CHARACTERS: Final = 249
STATE_CHARACTERS: Final = 16
TOKEN_CHARACTERS: Final = 40
BROKER_CHARACTERS: Final = 64
LARGE_BYTES: Final = 1 << 31
"""Declared size of the body's columns, from which MySQL derives their type. A payload has at most 63 MiB."""

LONG: Final = Text().with_variant(LONGTEXT(), "mysql", "mariadb")
"""Type of columns with long texts, because MySQL's TEXT is limited to 64 KiB."""

METADATA: Final = MetaData()
TABLE: Final = Table(
    TABLE_NAME,
    METADATA,
    Column("id", String(model.ID_CHARACTERS), primary_key=True),
    Column("group_name", String(NAME_CHARACTERS), nullable=False),
    Column("topic", String(NAME_CHARACTERS), nullable=False),
    Column("incarnation", BigInteger, nullable=False),
    Column("partition_number", Integer, nullable=False),
    Column("message_offset", BigInteger, nullable=False),
    Column("next_offset", BigInteger, nullable=False),
    Column("ordinal", BigInteger, nullable=False),
    Column("message_id", String(model.ID_CHARACTERS), nullable=False),
    Column("appended_ms", BigInteger, nullable=False),
    Column("log_epoch", BigInteger, nullable=False),
    Column("payload_bytes", BigInteger, nullable=False),
    Column("state", String(STATE_CHARACTERS), nullable=False),
    Column("calls", Integer, nullable=False),
    Column("calls_left", Integer, nullable=False),
    Column("put_offs", Integer, nullable=False),
    Column("redrives", Integer, nullable=False),
    Column("next_ms", BigInteger, nullable=False),
    Column("kept_ms", BigInteger, nullable=False),
    Column("changed_ms", BigInteger, nullable=False),
    Column("token", String(TOKEN_CHARACTERS), nullable=False),
    Column("lease_ms", BigInteger, nullable=False),
    Column("key_text", LONG),
    Column("key_is_text", Integer, nullable=False),
    Column("tag", Text),
    Column("error", Text, nullable=False),
    Column("failures", LONG, nullable=False),
    Column("journey", Text),
    Column("sent_offset", BigInteger, nullable=False),
    Column("broker", String(BROKER_CHARACTERS), nullable=False, server_default=""),
    Column("attribute", LargeBinary(LARGE_BYTES)),
    Column("payload", LargeBinary(LARGE_BYTES)),
    UniqueConstraint(
        "group_name",
        "incarnation",
        "partition_number",
        "message_offset",
        "appended_ms",
        name="tfmq_dead_letters_message",
    ),
    Index("tfmq_dead_letters_due", "group_name", "state", "next_ms"),
    Index("tfmq_dead_letters_kept", "kept_ms", "id"),
)
ADDED_COLUMNS: Final = (TABLE.c.broker,)
"""Columns that tables of earlier releases lack. Each has a default, so that earlier releases can still insert rows."""
COLUMNS_WITHOUT_BODY: Final = tuple(column for column in TABLE.c if column.name not in ("attribute", "payload"))
"""All columns except those of the body, which may be large."""

_COLUMN_NAMES: Final = {
    name: name
    for name in (
        "id topic incarnation next_offset ordinal appended_ms payload_bytes state calls calls_left put_offs redrives"
        " next_ms kept_ms changed_ms token lease_ms tag sent_offset broker"
    ).split()
} | {"group": "group_name", "partition": "partition_number", "offset": "message_offset", "epoch": "log_epoch"}
"""Field of `Letter` -> column, for fields that are stored unchanged."""


def row_from_letter(letter: Letter) -> dict[str, Any]:
    """Return the row of a letter, with the body columns only if the letter has a body."""
    row: dict[str, Any] = {column: getattr(letter, name) for name, column in _COLUMN_NAMES.items()}
    row.update(
        message_id=f"{letter.message_id:016x}",
        key_text=_storable(model.key_text(letter.key)),
        key_is_text=int(isinstance(letter.key, str)),
        failures=json.dumps(letter.failures, ensure_ascii=True),
        tag=_storable(letter.tag),
        error=_storable(letter.error),
        journey=None if letter.journey is None else json.dumps(letter.journey),
    )
    if letter.body is not None:
        row.update(attribute=letter.body.attribute, payload=letter.body.payload)
    return row


def letter_from_row(row: Mapping[Any, Any]) -> Letter:
    """Return the letter of a row. Raises ValueError or TypeError for a row with values that tfmq does not write."""
    key: bytes | str | None = row["key_text"]
    if key is not None and not row["key_is_text"]:
        key = str(key).encode()
    body = model.LetterBody(_bytes(row["payload"]), _bytes(row["attribute"])) if "payload" in row else None
    return Letter(
        **{name: row[column] for name, column in _COLUMN_NAMES.items()},
        message_id=int(row["message_id"], 16),
        key=key,
        failures=tuple(Failure(*each) for each in json.loads(row["failures"])),
        journey=None if row["journey"] is None else model.RedrivePosition(*json.loads(row["journey"])),
        body=body,
    )


def _storable(text: str | None) -> str | None:
    """Replace what a database cannot store: NUL in PostgreSQL, and unpaired surrogates."""
    return None if text is None else text.replace("\0", "\ufffd").encode(errors="replace").decode()


def _bytes(value: Any) -> bytes | None:
    return None if value is None else bytes(value)


TRIES: Final = 3
"""Attempts of a transaction. An attempt fails if two processes insert the same letter at the same time."""
ENDED_MS_KEPT: Final = 30 * 86_400_000
"""How long a letter in one of EXPIRING_STATES is kept after its last event: a month."""

EXPIRING_STATES: Final = (*model.FINAL_STATES, model.FAILING)

COLUMNS = TABLE.c
HAS_FAILED: Final = or_(COLUMNS.state != model.HANDLED, COLUMNS.calls > 1, COLUMNS.error != "")
"""SQL condition as in `Selection.holds`: excludes letters that never failed."""


class BlockingSqlStore:
    """Dead letters in a database; see `LetterStore`. The methods block, and raise StoreFailed if the database fails."""

    def __init__(self, address: StoreAddress) -> None:
        self.database = Database(address)
        self.name = self.database.name

    def apply(self, steps: Sequence[Step]) -> list[Letter | None]:
        """Apply each event to its letter in one transaction. Return the letters; None for an event without effect."""
        if not steps:
            return []
        for _ in range(TRIES - 1):
            try:
                return self._apply_once(steps)
            except StoreFailed as failed:
                if not isinstance(failed.__cause__, IntegrityError):
                    raise
        return self._apply_once(steps)

    def _apply_once(self, steps: Sequence[Step]) -> list[Letter | None]:
        """Apply events in one transaction.

        If another process inserts the same letter at the same time, raises StoreFailed, caused by IntegrityError.
        """
        with self.database.write_transaction() as connection:
            known = self._lock_rows(connection, [id for id, _ in steps])
            before, results = dict(known), []
            for id, event in steps:
                found = apply_event(known.get(id), event)
                results.append(found)
                if found is not None:
                    known[id] = found
            changed = [letter for id, letter in known.items() if letter is not before.get(id)]
            _write(connection, [each for each in changed if each.id in before], new=False)
            _write(connection, [each for each in changed if each.id not in before], new=True)
        return results

    def _lock_rows(self, connection: Connection, ids: Sequence[str]) -> dict[str, Letter]:
        """Read and lock the letters with these ids, in a fixed order to avoid deadlocks."""
        query = (
            select(*COLUMNS_WITHOUT_BODY).where(COLUMNS.id.in_(sorted(set(ids)))).order_by(COLUMNS.id).with_for_update()
        )
        return {row["id"]: _decode_row(row) for row in connection.execute(query).mappings()}

    def find(
        self, selection: Selection, after: PagePosition = FIRST_PAGE, count: int = PAGE_LETTERS, *, whole: bool = False
    ) -> list[Letter]:
        query = _page_query(_conditions(selection), after, count)
        with self.database.read_connection() as connection:
            found = [_decode_row(row) for row in connection.execute(query).mappings()]
            if not whole:
                return found
            ids = [each.id for each in model.fit_page(found)]
            rows = connection.execute(select(TABLE).where(COLUMNS.id.in_(ids))).mappings()
            letters = {row["id"]: _decode_row(row) for row in rows}
            return [letters[id] for id in ids if id in letters]

    def get(self, id: str) -> Letter | None:
        with self.database.read_connection() as connection:
            row = connection.execute(select(TABLE).where(COLUMNS.id == id)).mappings().first()
        return None if row is None else _decode_row(row)

    def next_due_id(self, group: str, now_ms: int, broker: str = "") -> str | None:
        """Return the id of a letter with an expired lease, else of a waiting letter that is due, else None."""
        query = select(COLUMNS.id).where(COLUMNS.group_name == group, COLUMNS.broker == broker)
        with self.database.read_connection() as connection:
            for state, due in ((model.RETRYING, COLUMNS.lease_ms), (model.WAITING, COLUMNS.next_ms)):
                oldest = query.where(COLUMNS.state == state, due <= now_ms).order_by(due, COLUMNS.id).limit(1)
                id: str | None = connection.scalar(oldest)
                if id is not None:
                    return id
        return None

    def next_due_ms(self, group: str, broker: str = "") -> int | None:
        own = (COLUMNS.group_name == group, COLUMNS.broker == broker)
        waiting = select(func.min(COLUMNS.next_ms)).where(*own, COLUMNS.state == model.WAITING)
        left = select(func.min(COLUMNS.lease_ms)).where(*own, COLUMNS.state == model.RETRYING)
        with self.database.read_connection() as connection:
            found = [connection.scalar(each) for each in (waiting, left)]
        return min((int(each) for each in found if each is not None), default=None)

    def find_foreign_waiting(self, group: str, broker: str, after: PagePosition = FIRST_PAGE) -> list[Letter]:
        waiting = COLUMNS.state.in_((model.WAITING, model.RETRYING))
        conditions = [COLUMNS.group_name == group, waiting, COLUMNS.broker != broker]
        query = _page_query(conditions, after, PAGE_LETTERS)
        with self.database.read_connection() as connection:
            return [_decode_row(row) for row in connection.execute(query).mappings()]

    def failing_offsets(self, group: str, incarnation: int, partition: int) -> list[int]:
        query = select(COLUMNS.message_offset).where(
            COLUMNS.group_name == group,
            COLUMNS.state == model.FAILING,
            COLUMNS.incarnation == incarnation,
            COLUMNS.partition_number == partition,
        )
        with self.database.read_connection() as connection:
            return [int(offset) for offset in connection.scalars(query)]

    def count_by_state(self) -> dict[tuple[str, str], int]:
        query = select(COLUMNS.group_name, COLUMNS.state, func.count()).where(HAS_FAILED)
        query = query.group_by(COLUMNS.group_name, COLUMNS.state)
        with self.database.read_connection() as connection:
            return {(group, state): count for group, state, count in connection.execute(query)}

    def delete_expired(self, now_ms: int) -> int:
        """Delete up to PAGE_LETTERS letters in EXPIRING_STATES without an event for ENDED_MS_KEPT. Return how many."""
        old = (COLUMNS.state.in_(EXPIRING_STATES), COLUMNS.changed_ms < now_ms - ENDED_MS_KEPT)
        with self.database.write_transaction() as connection:
            ids = connection.scalars(select(COLUMNS.id).where(*old).limit(PAGE_LETTERS)).all()
            connection.execute(delete(TABLE).where(COLUMNS.id.in_(ids), *old))
        return len(ids)

    def close(self) -> None:
        self.database.close()


def _page_query(conditions: Sequence[ColumnElement[bool]], page: PagePosition, count: int) -> Select[Any]:
    after = or_(COLUMNS.kept_ms > page.kept_ms, and_(COLUMNS.kept_ms == page.kept_ms, COLUMNS.id > page.id))
    found = select(*COLUMNS_WITHOUT_BODY).where(*conditions, after)
    return found.order_by(COLUMNS.kept_ms, COLUMNS.id).limit(count)


def _decode_row(row: Mapping[Any, Any]) -> Letter:
    """Decode the letter of a row. Raises StoreFailed for invalid values, for example after a change by hand."""
    try:
        return letter_from_row(row)
    except (ValueError, TypeError) as error:
        raise StoreFailed(
            f"The row {row['id']} of dead letters cannot be read ({type(error).__name__}): repair it, or delete it."
        ) from error


def _write(connection: Connection, letters: Sequence[Letter], *, new: bool) -> None:
    """Insert or update letters. Bodies are only inserted, because they never change."""
    if not letters:
        return
    if new:
        connection.execute(
            insert(TABLE), [{"payload": None, "attribute": None, **row_from_letter(each)} for each in letters]
        )
        return
    rows = [
        {f"to_{name}": value for name, value in row_from_letter(replace(each, body=None)).items()} for each in letters
    ]
    names = [name.removeprefix("to_") for name in rows[0] if name != "to_id"]
    values: Any = {name: bindparam(f"to_{name}") for name in names}
    connection.execute(update(TABLE).where(COLUMNS.id == bindparam("to_id")).values(values), rows)


def _conditions(selection: Selection) -> list[ColumnElement[bool]]:
    """Return SQL conditions for the letters for which `Selection.holds` returns True."""
    equal = (
        (COLUMNS.group_name, selection.group),
        (COLUMNS.topic, selection.topic),
        (COLUMNS.partition_number, selection.partition),
        (COLUMNS.key_text, selection.key),
        (COLUMNS.tag, selection.tag),
    )
    found = [HAS_FAILED, *(column == value for column, value in equal if value is not None)]
    if selection.states:
        found.append(COLUMNS.state.in_(selection.states))
    if selection.ids:
        found.append(or_(*(COLUMNS.id.startswith(each, autoescape=True) for each in selection.ids)))
    if selection.error is not None:
        found.append(COLUMNS.error.icontains(selection.error, autoescape=True))
    if selection.since_ms is not None:
        found.append(COLUMNS.kept_ms >= selection.since_ms)
    if selection.until_ms is not None:
        found.append(COLUMNS.kept_ms < selection.until_ms)
    return found


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def _in_executor(
    call: Callable[Concatenate[BlockingSqlStore, Parameters], Result],
) -> Callable[Concatenate[SqlLetterStore, Parameters], Operation[Result]]:
    """Return a method of `SqlLetterStore` that calls the blocking method `call` in the executor of that store."""

    @wraps(call)
    def method(self: SqlLetterStore, /, *arguments: Parameters.args, **named: Parameters.kwargs) -> Operation[Result]:
        return run_work(self._run, partial(getattr(self._open(), call.__name__), *arguments, **named))

    return method


class SqlLetterStore:
    """Dead letters in a database, as operations: `run` executes the calls of a `BlockingSqlStore`."""

    def __init__(self, store: BlockingSqlStore | None, run: Executor) -> None:
        self._store = store
        self._run = run

    @property
    def name(self) -> str:
        return self._open().name

    def _open(self) -> BlockingSqlStore:
        assert self._store is not None, "only a DefaultLetterStore is opened later"
        return self._store

    apply = _in_executor(BlockingSqlStore.apply)
    find = _in_executor(BlockingSqlStore.find)
    next_due_id = _in_executor(BlockingSqlStore.next_due_id)
    next_due_ms = _in_executor(BlockingSqlStore.next_due_ms)
    find_foreign_waiting = _in_executor(BlockingSqlStore.find_foreign_waiting)
    get = _in_executor(BlockingSqlStore.get)
    failing_offsets = _in_executor(BlockingSqlStore.failing_offsets)
    count_by_state = _in_executor(BlockingSqlStore.count_by_state)
    delete_expired = _in_executor(BlockingSqlStore.delete_expired)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


class DefaultLetterStore(SqlLetterStore):
    """Default store of a group: a file whose path contains the broker's id.

    The id is unknown until the client has reached the broker for the first time; until then, methods raise StoreFailed.
    """

    def __init__(self, group: str, broker: Callable[[], str | None], run: Executor) -> None:
        super().__init__(None, run)
        self._group = group
        self._broker = broker
        self._opened_for = ""

    @property
    def name(self) -> str:
        """Path of the file, with NODE in place of the broker's id while the id is unknown."""
        return default_path(self._group, broker="NODE") if self._store is None else self._store.name

    def _open(self) -> BlockingSqlStore:
        broker = self._broker()
        if broker is None:
            raise StoreFailed(
                "The broker was not reached yet, and the path of the dead letters has its id in it: they are stored,"
                " and handled again, when it is reached."
            )
        if self._store is None or self._opened_for != broker:
            self.close()
            self._store = BlockingSqlStore(StoreAddress("path", existing_or_default_path(self._group, broker)))
            self._opened_for = broker
            log.info("Dead letters of group %s are kept in %s.", self._group, self._store.name)
        return self._store
