"""Dead letters in a database. Every change is one transaction: the rows are read under their locks, `course` says what
becomes of them, and they are written; what the database refuses has not happened.

Blocking, and safe for threads; `SqlShelf` is the same as operations.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

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
from tfmq.client.operation import Operation, Run, work
from tfmq.client.worker.dead_letter_store import Failure, StoreUnusable
from tfmq.dead_letters.model import (
    ENDED,
    FAILING,
    HANDLED,
    ID_CHARACTERS,
    PAGE_LETTERS,
    RETRYING,
    START,
    WAITING,
    Body,
    Journey,
    Letter,
    Page,
    Selection,
    fitting,
    key_text,
)
from tfmq.dead_letters.state_machine import after
from tfmq.dead_letters.store import ALLOWED, Address, Step
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
    """The database that keeps dead letters: opened when it is first used, and told to be durable.

    SQLite: `synchronous=FULL`, so that what is committed survives a power cut, and in a file of our own a write-ahead
    log, so that readers do not stop the writer; a transaction that changes something takes its lock when it begins, so
    that two processes wait for each other instead of failing. PostgreSQL: `synchronous_commit` on, whatever its
    default is.

    Safe for threads; a forked child opens its own.
    """

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


# The table of dead letters, one row a letter: docs/dead-letters.md has its columns. Rows to letters and back.
#
# The primary key is the letter's id, made of what the message is; the unique constraint says the same in words that a
# person can query. Times are ms since 1970; 0 and -1 stand for none where a letter has them so.

NAME: Final = "tfmq_dead_letters"
NAME_CHARACTERS: Final = 249
STATE_CHARACTERS: Final = 16
TOKEN_CHARACTERS: Final = 40
BROKER_CHARACTERS: Final = 64
LARGE_BYTES: Final = 1 << 31
"""MySQL chooses the kind of a column by it; a payload has at most 63 MiB."""

LONG: Final = Text().with_variant(LONGTEXT(), "mysql", "mariadb")
"""MySQL's TEXT ends at 64 KiB."""

METADATA: Final = MetaData()
TABLE: Final = Table(
    NAME,
    METADATA,
    Column("id", String(ID_CHARACTERS), primary_key=True),
    Column("group_name", String(NAME_CHARACTERS), nullable=False),
    Column("topic", String(NAME_CHARACTERS), nullable=False),
    Column("incarnation", BigInteger, nullable=False),
    Column("partition_number", Integer, nullable=False),
    Column("message_offset", BigInteger, nullable=False),
    Column("next_offset", BigInteger, nullable=False),
    Column("ordinal", BigInteger, nullable=False),
    Column("message_id", String(ID_CHARACTERS), nullable=False),
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
ADDED: Final = (TABLE.c.broker,)
"""Columns that tables of earlier releases do not have; each has a default, with which these go on writing."""
BODY: Final = (TABLE.c.attribute, TABLE.c.payload)
BRIEF: Final = tuple(column for column in TABLE.c if column.name not in ("attribute", "payload"))
"""All columns but those that may be large."""

_SAME: Final = (
    "id topic incarnation next_offset ordinal appended_ms payload_bytes state calls calls_left put_offs redrives"
    " next_ms kept_ms changed_ms token lease_ms tag sent_offset broker"
).split()


def row_of(letter: Letter) -> dict[str, Any]:
    """The row; its body only where the letter has one."""
    row: dict[str, Any] = {name: getattr(letter, name) for name in _SAME}
    row.update(
        group_name=letter.group,
        partition_number=letter.partition,
        message_offset=letter.offset,
        message_id=f"{letter.message_id:016x}",
        log_epoch=letter.epoch,
        key_text=_storable(key_text(letter.key)),
        key_is_text=int(isinstance(letter.key, str)),
        failures=json.dumps(letter.failures, ensure_ascii=True),
        tag=_storable(letter.tag),
        error=_storable(letter.error),
        journey=None if letter.journey is None else json.dumps(letter.journey),
    )
    if letter.body is not None:
        row.update(attribute=letter.body.attribute, payload=letter.body.payload)
    return row


def letter_of_row(row: Mapping[Any, Any]) -> Letter:
    """The letter in a row, with its body where the row has it. Raises `ValueError`, `TypeError` for one that no store
    of ours wrote."""
    key: bytes | str | None = row["key_text"]
    if key is not None and not row["key_is_text"]:
        key = str(key).encode()
    body = Body(_bytes(row["payload"]), _bytes(row["attribute"])) if "payload" in row else None
    fields = {name: row[name] for name in _SAME}
    return Letter(
        **fields,
        group=row["group_name"],
        partition=row["partition_number"],
        offset=row["message_offset"],
        message_id=int(row["message_id"], 16),
        epoch=row["log_epoch"],
        key=key,
        failures=tuple(Failure(*each) for each in json.loads(row["failures"])),
        journey=None if row["journey"] is None else Journey(*json.loads(row["journey"])),
        body=body,
    )


def _storable(text: str | None) -> str | None:
    """Text as every database takes it: PostgreSQL has no NUL, and none has half of a surrogate."""
    return None if text is None else text.replace("\0", "\ufffd").encode(errors="replace").decode()


def _bytes(value: Any) -> bytes | None:
    return None if value is None else bytes(value)


TRIES: Final = 3
"""Two may keep the same message at once; the loser's next try finds the row."""
ENDED_MS_KEPT: Final = 30 * 86_400_000
"""What is handled, redriven or dropped is remembered for a month, and what failed in a lane and passed unnoticed."""

OVER: Final = (*ENDED, FAILING)

T = TABLE.c
FAILED_ONCE: Final = or_(T.state != HANDLED, T.calls > 1, T.error != "")
"""As `Selection.holds` has it: what was counted before its first call and handled by that is nobody's letter."""


class SqlStore:
    """See the module. All methods raise `StoreFailed`."""

    def __init__(self, address: Address) -> None:
        self.database = Database(address)
        self.name = self.database.name

    def apply(self, steps: Sequence[Step]) -> list[Letter | None]:
        """Each event to its letter, all in one transaction; the letter behind it, or None where it did nothing."""
        if not steps:
            return []
        for _ in range(TRIES - 1):
            try:
                return self._apply(steps)
            except StoreFailed as failed:
                if not isinstance(failed.__cause__, IntegrityError):
                    raise
        return self._apply(steps)

    def _apply(self, steps: Sequence[Step]) -> list[Letter | None]:
        with self.database.writing() as connection:
            known = self._locked(connection, [id for id, _ in steps])
            before, behind = dict(known), []
            for id, event in steps:
                found = after(known.get(id), event)
                behind.append(found)
                if found is not None:
                    known[id] = found
            changed = [letter for id, letter in known.items() if letter is not before.get(id)]
            _write(connection, [each for each in changed if each.id in before], new=False)
            _write(connection, [each for each in changed if each.id not in before], new=True)
        return behind

    def _locked(self, connection: Connection, ids: Sequence[str]) -> dict[str, Letter]:
        """The rows of `ids`, which nobody else changes until the transaction ends; in one order, so that two who lock
        the same do not wait for each other for ever."""
        query = select(*BRIEF).where(T.id.in_(sorted(set(ids)))).order_by(T.id).with_for_update()
        return {row["id"]: _letter(row) for row in connection.execute(query).mappings()}

    def find(
        self, selection: Selection, after: Page = START, count: int = PAGE_LETTERS, *, whole: bool = False
    ) -> list[Letter]:
        """At most `count` letters, in the order in which they were first kept, from behind `after` on."""
        query = (
            _chosen(select(*BRIEF), selection).where(_behind(after)).order_by(T.kept_ms, T.id).limit(count)
        )
        with self.database.reading() as connection:
            found = [_letter(row) for row in connection.execute(query).mappings()]
            if not whole:
                return found
            ids = [each.id for each in fitting(found)]
            rows = connection.execute(select(TABLE).where(T.id.in_(ids))).mappings()
            letters = {row["id"]: _letter(row) for row in rows}
            return [letters[id] for id in ids if id in letters]

    def get(self, id: str) -> Letter | None:
        """The whole letter."""
        with self.database.reading() as connection:
            row = connection.execute(select(TABLE).where(T.id == id)).mappings().first()
        return None if row is None else _letter(row)

    def due(self, group: str, now_ms: int, broker: str = "") -> str | None:
        """The id of the one of `broker` that should have been handled longest ago."""
        query = select(T.id).where(T.group_name == group, T.broker == broker)
        waiting = query.where(T.state == WAITING, T.next_ms <= now_ms).order_by(T.next_ms, T.id).limit(1)
        left = query.where(T.state == RETRYING, T.lease_ms <= now_ms).order_by(T.lease_ms, T.id).limit(1)
        with self.database.reading() as connection:
            return connection.scalar(left) or connection.scalar(waiting)

    def next_due_ms(self, group: str, broker: str = "") -> int | None:
        """When the next one of `broker` is due, in ms since 1970."""
        own = (T.group_name == group, T.broker == broker)
        waiting = select(func.min(T.next_ms)).where(*own, T.state == WAITING)
        left = select(func.min(T.lease_ms)).where(*own, T.state == RETRYING)
        with self.database.reading() as connection:
            found = [connection.scalar(each) for each in (waiting, left)]
        return min((int(each) for each in found if each is not None), default=None)

    def waiting_for_others(self, group: str, broker: str, after: Page = START) -> list[Letter]:
        """Letters of the group that wait, and do not say that they are of `broker`; at most a page."""
        query = select(*BRIEF).where(
            T.group_name == group, T.state.in_((WAITING, RETRYING)), T.broker != broker
        )
        query = query.where(_behind(after)).order_by(T.kept_ms, T.id).limit(PAGE_LETTERS)
        with self.database.reading() as connection:
            return [_letter(row) for row in connection.execute(query).mappings()]

    def counts(self) -> dict[tuple[str, str], int]:
        """How many letters there are: (group, state) -> number."""
        query = select(T.group_name, T.state, func.count()).where(FAILED_ONCE)
        query = query.group_by(T.group_name, T.state)
        with self.database.reading() as connection:
            return {(group, state): count for group, state, count in connection.execute(query)}

    def prune(self, now_ms: int) -> int:
        """Forget what ended long ago; how many, at most a page."""
        old = (T.state.in_(OVER), T.changed_ms < now_ms - ENDED_MS_KEPT)
        with self.database.writing() as connection:
            ids = connection.scalars(select(T.id).where(*old).limit(PAGE_LETTERS)).all()
            connection.execute(delete(TABLE).where(T.id.in_(ids), *old))
        return len(ids)

    def close(self) -> None:
        self.database.close()


def _behind(page: Page) -> ColumnElement[bool]:
    return or_(T.kept_ms > page.kept_ms, and_(T.kept_ms == page.kept_ms, T.id > page.id))


def _letter(row: Mapping[Any, Any]) -> Letter:
    """Raises `StoreFailed` for a row that was changed by hand and is no valid letter any more."""
    try:
        return letter_of_row(row)
    except (ValueError, TypeError) as error:
        raise StoreFailed(
            f"The row {row['id']} of dead letters cannot be read ({type(error).__name__}): mend it, or delete it."
        ) from error


def _write(connection: Connection, letters: Sequence[Letter], *, new: bool) -> None:
    """Bodies are written with a row that is new; they never change."""
    if not letters:
        return
    if new:
        connection.execute(
            insert(TABLE), [{"payload": None, "attribute": None, **row_of(each)} for each in letters]
        )
        return
    rows = [{f"to_{name}": value for name, value in row_of(_brief(each)).items()} for each in letters]
    names = [name.removeprefix("to_") for name in rows[0] if name != "to_id"]
    values: Any = {name: bindparam(f"to_{name}") for name in names}
    connection.execute(update(TABLE).where(T.id == bindparam("to_id")).values(values), rows)


def _brief(letter: Letter) -> Letter:
    return replace(letter, body=None)


def _chosen(query: Select[Any], selection: Selection) -> Select[Any]:
    """The rows that `selection` means, as the database sees them."""
    equal = (
        (T.group_name, selection.group),
        (T.topic, selection.topic),
        (T.partition_number, selection.partition),
        (T.key_text, selection.key),
        (T.tag, selection.tag),
    )
    for column, value in equal:
        if value is not None:
            query = query.where(column == value)
    query = query.where(FAILED_ONCE)
    if selection.states:
        query = query.where(T.state.in_(selection.states))
    if selection.ids:
        query = query.where(or_(*(T.id.startswith(each, autoescape=True) for each in selection.ids)))
    if selection.error is not None:
        query = query.where(T.error.icontains(selection.error, autoescape=True))
    if selection.since_ms is not None:
        query = query.where(T.kept_ms >= selection.since_ms)
    return query if selection.until_ms is None else query.where(T.kept_ms < selection.until_ms)


class SqlShelf:
    """A `SqlStore` as operations: `run` does the work, inline or in a thread."""

    def __init__(self, store: SqlStore, run: Run) -> None:
        self.store = store
        self.name = store.name
        self._run = run

    def apply(self, steps: Sequence[Step]) -> Operation[list[Letter | None]]:
        return work(self._run, partial(self.store.apply, steps))

    def find(
        self, selection: Selection, after: Page = START, count: int = PAGE_LETTERS, *, whole: bool = False
    ) -> Operation[list[Letter]]:
        return work(self._run, partial(self.store.find, selection, after, count, whole=whole))

    def due(self, group: str, now_ms: int, broker: str = "") -> Operation[str | None]:
        return work(self._run, partial(self.store.due, group, now_ms, broker))

    def next_due_ms(self, group: str, broker: str = "") -> Operation[int | None]:
        return work(self._run, partial(self.store.next_due_ms, group, broker))

    def waiting_for_others(self, group: str, broker: str, after: Page = START) -> Operation[list[Letter]]:
        return work(self._run, partial(self.store.waiting_for_others, group, broker, after))

    def get(self, id: str) -> Operation[Letter | None]:
        return work(self._run, partial(self.store.get, id))

    def counts(self) -> Operation[dict[tuple[str, str], int]]:
        return work(self._run, self.store.counts)

    def prune(self, now_ms: int) -> Operation[int]:
        return work(self._run, partial(self.store.prune, now_ms))

    def close(self) -> None:
        self.store.close()
