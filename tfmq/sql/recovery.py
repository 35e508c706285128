"""Recovery of shared transactions whose owner, the client that ran them, is lost.

A transaction that is prepared at the broker is decided by check-back: the broker asks a producer of the owner's group.
A transaction that is prepared in the database only, an orphan, is found by a regular scan of the database.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import sys
import threading
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Table
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

import tfmq.producer
from tfmq.errors import BadRequest, TfmqError
from tfmq.sql import database as rows
from tfmq.sql.commit_protocol import Step, Steps, executor_for, run_steps, run_steps_async
from tfmq.sql.database import PREFIX, address_digest, has_two_phase_driver, is_in_memory
from tfmq.sql.in_doubt import Decision, PreparedTransaction, decide, find_prepared, finish_prepared
from tfmq.sql.session import broker_node, describe_transaction, is_closed, join_group
from tfmq.transaction import states

log = logging.getLogger("tfmq.sql")

_registered: WeakKeyDictionary[Any, set[tuple[str, str]]] = WeakKeyDictionary()
"""Producer -> (digest of the address, table name) of each database and table for which it answers check-back."""


def check(producer: Any, engine: Any, *, table: Table = rows.TABLE) -> None:
    """Let `producer` answer check-back for transactions of this database from now on.

    Call it at each start of a program, before its consumer reads. If a crash left the commit of a consumer's offsets in
    doubt, the consumer delivers no message until that commit is decided. `tfmq.sql.transaction` registers its producer,
    too, but a program that begins a transaction only for a message would wait without end.

    Args: `engine`: an `Engine`, or an `AsyncEngine` with a `tfmq.aio.Producer`.
    """
    kind = sys.modules.get("sqlalchemy.ext.asyncio")
    if kind is not None and isinstance(engine, kind.AsyncEngine):
        engine = engine.sync_engine
    if not isinstance(engine, Engine):
        raise BadRequest(f"An engine of SQLAlchemy is wanted, not {engine!r}.")
    require_matching_producer(producer, engine.dialect.is_async, "engine")
    register_check_back(producer, engine, table)


def require_matching_producer(producer: Any, is_async: bool, other: str) -> None:
    """Raise BadRequest if the producer is for asyncio and the session or engine (`other`) is not, or vice versa."""
    aio = sys.modules.get("tfmq.aio")
    blocks = isinstance(producer, tfmq.producer.Producer)
    if not blocks and (aio is None or not isinstance(producer, aio.Producer)):
        raise BadRequest(f"A tfmq.Producer or tfmq.aio.Producer is wanted, not {producer!r}.")
    if is_async and blocks:
        raise BadRequest(f"The {other} is for asyncio, the producer is not: use a tfmq.aio.Producer.")
    if not is_async and not blocks:
        raise BadRequest(f"The producer is for asyncio, the {other} is not: use a tfmq.Producer, or an async {other}.")


def register_check_back(producer: Any, engine: Engine, table: Table) -> None:
    """Let the producer answer check-back for this database and table; a repeated call changes nothing."""
    # A database in memory ends with this process, so no check-back is needed. The thread that answers check-back would
    # also open another, empty database, or use the session's own connection if the engine has a StaticPool.
    if is_in_memory(engine.url):
        return
    known = _registered.setdefault(producer, set())
    name = (address_digest(engine.url), table.fullname)
    if name not in known:
        join_group(producer, engine.url)
        responder = CheckBackResponder(engine, table)
        producer.transaction_check(responder.decide_async if engine.dialect.is_async else responder.decide)
        known.add(name)
    if has_two_phase_driver(engine):
        start_scanner(producer, engine)


class CheckBackResponder:
    """Answers check-back for one database and table, by the transaction's row (`tfmq.sql.in_doubt`).

    The broker may ask any producer of the group, so all of them must be able to read the row.
    """

    def __init__(self, engine: Engine, table: Table) -> None:
        self._engine, self._table = engine, table
        self._executor = executor_for(engine)

    def decide(self, asked: Any) -> Decision | None:
        return run_steps(self._decision_steps(asked.xid))

    async def decide_async(self, asked: Any) -> Decision | None:
        return await run_steps_async(self._decision_steps(asked.xid))

    def _decision_steps(self, xid: str) -> Steps[Decision | None]:
        if not xid.startswith(PREFIX):
            return None  # This is not a transaction of tfmq.sql.

        def read(connection: Connection) -> Decision | None:
            return decide(connection, self._table, xid, "commit")

        try:
            decision: Decision | None = yield Step("row answers", lambda: self._executor.on_connection(read))
        except (SQLAlchemyError, OSError) as error:
            log.warning("The outcome of %s cannot be read from the database, check-back is repeated: %s", xid, error)
            return None
        return decision


DECISION_BY_BROKER_STATE: Final[dict[str, Decision]] = {
    states.COMMITTED: "commit",
    states.APPLYING: "commit",
    states.READ_ONLY: "commit",
    states.HEURISTIC_COMMITTED: "commit",
    states.ROLLED_BACK: "rollback",
    states.HEURISTIC_ROLLED_BACK: "rollback",
}
"""State at the broker -> how to end the transaction in the database. In other states it stays prepared."""


class ScanResult(NamedTuple):
    """How many transactions a scan finished in the database, and how many have not ended at the broker yet."""

    finished: int = 0
    waiting: int = 0


class OrphanedTransactions:
    """Finishes transactions that one database has prepared and whose owner is lost, without check-back.

    The database prepares before the broker. If the owner crashes between the two, the transaction prepared in the
    database keeps its locks. The broker has not prepared it, so the broker rolls it back by timeout, without
    check-back. Clients that use two-phase commit therefore scan the database regularly. The state at the broker decides
    what a scan does with a transaction that the database has prepared:

        at the broker                          in the database
        committed, applying, read only         commit
        rolled back                            roll back
        unknown, to the broker that began it   roll back: it was never prepared there, or has ended long ago
        unknown, to another broker             leave it, and log an error
        open, prepared, or a record is queued  leave it: the owner continues, or check-back ends it
    """

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._logged: set[str] = set()

    def scan(self, producer: Any) -> Steps[ScanResult]:
        """Scan the database once. Raises errors of SQLAlchemy, and of the broker to which `producer` is connected."""
        found = yield Step("look for what is prepared", lambda: self._executor.on_connection(find_prepared))
        finished = waiting = 0
        for each in found:
            decision = yield from self._decision(each, producer)
            if decision in ("commit", "rollback"):
                finish = partial(finish_prepared, gid=each.gid, decision=decision)
                yield Step("finish it", partial(self._executor.on_connection, finish))
                log.warning(
                    "PostgreSQL had %s prepared, whose owner is lost: %s, as at the broker.", each.gid, decision
                )
                finished += 1
            waiting += decision == "wait"
        return ScanResult(finished, waiting)

    def _decision(self, prepared: PreparedTransaction, producer: Any) -> Steps[Any]:
        """Return the decision for a prepared transaction, from its state at the broker.

        The result is "commit", "rollback", "wait" (unfinished at the broker) or "leave" (it belongs to another broker).
        """
        found = yield Step("ask the broker", lambda: describe_transaction(producer, prepared.xid))
        if found.state != "unknown":
            return DECISION_BY_BROKER_STATE.get(found.state, "wait")
        if prepared.node == broker_node(producer):
            return "rollback"
        if prepared.gid not in self._logged:  # An operator must end this transaction. It is logged only once.
            self._logged.add(prepared.gid)
            log.error(
                "PostgreSQL has %s prepared, begun at another broker (node %s): if it is unknown there"
                " (tfmq tx show %s), ROLLBACK PREPARED '%s'. It holds locks.",
                prepared.gid,
                prepared.node,
                prepared.xid,
                prepared.gid,
            )
        return "leave"


SCAN_SECONDS: Final = 30.0
"""Pause between scans. It may be long, because an orphan is not ended before the broker's timeout (60 s) anyway."""

WAITING_SCAN_SECONDS: Final = 2.0
"""Pause between scans while a prepared transaction has not ended at the broker: it holds locks, and ends soon."""

ScannerKey = tuple[str, Any]
_scanners: dict[ScannerKey, _OrphanScanner] = {}
"""(digest of the database's address, event loop or None) -> running scanner. Protected by `_lock`."""
_lock = threading.Lock()


def _reset_after_fork() -> None:
    """Reset the module in a forked child, which has no scanner threads and may have inherited a locked `_lock`."""
    global _lock
    _lock = threading.Lock()
    _scanners.clear()


os.register_at_fork(after_in_child=_reset_after_fork)


def start_scanner(producer: Any, engine: Engine) -> None:
    """Scan the database now, and then every SCAN_SECONDS until the producer is closed.

    With an asyncio engine and no running event loop, does nothing; the first transaction then starts the scanner.
    """
    loop = None
    if engine.dialect.is_async:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
    name = (address_digest(engine.url), loop)
    with _lock:
        known = _scanners.get(name)
        if known is None:
            known = _scanners[name] = (
                _OrphanScanner(name, engine) if loop is None else _AsyncOrphanScanner(name, engine)
            )
            known.producers.add(producer)
            known.start()
        elif producer not in known.producers:
            known.producers.add(producer)
            known.scan_now()


def scan_pause(result: ScanResult) -> float:
    return min(WAITING_SCAN_SECONDS, SCAN_SECONDS) if result.waiting else SCAN_SECONDS


class _OrphanScanner:
    """Scans one database, in a thread, until all `producers` are closed.

    The thread is needed because the threads of transactions may be waiting for locks that an orphan holds.
    """

    def __init__(self, name: ScannerKey, engine: Engine) -> None:
        self.producers: WeakSet[Any] = WeakSet()
        self._name = name
        self._orphans = OrphanedTransactions(executor_for(engine))
        self._stopped = False
        self._woken: Any = threading.Event()

    def start(self) -> None:
        atexit.register(self.stop)
        threading.Thread(target=run_steps, args=(self._scans(),), name="tfmq-sql-leftovers", daemon=True).start()

    def scan_now(self) -> None:
        """Let the scanner scan at once instead of after its pause."""
        self._woken.set()

    def stop(self) -> None:
        self._stopped = True
        self.scan_now()

    def _pause(self, seconds: float) -> Any:
        self._woken.wait(seconds)

    def _scans(self) -> Steps[None]:
        failed = False
        try:
            while (producer := self._open_producer()) is not None:
                self._woken.clear()
                result = ScanResult()
                try:
                    result = yield from self._orphans.scan(producer)
                    failed = False
                except (SQLAlchemyError, TfmqError, OSError) as error:
                    if not failed:  # After a successful scan, only the first failure is logged.
                        log.warning("The scan for orphaned prepared transactions of PostgreSQL failed: %s", error)
                    failed = True
                del producer  # A reference would keep the producer alive during the pause.
                yield Step("pause", partial(self._pause, scan_pause(result)))
        finally:
            atexit.unregister(self.stop)
            with _lock:
                if _scanners.get(self._name) is self:
                    del _scanners[self._name]

    def _open_producer(self) -> Any:
        """Return a producer that is open; None if all are closed or the scanner is stopped: then the scanner ends."""
        with _lock:
            if not self._stopped:
                for each in self.producers:
                    if not is_closed(each):
                        return each
            _scanners.pop(self._name, None)
            return None


class _AsyncOrphanScanner(_OrphanScanner):
    """Does the same as `_OrphanScanner`, in a task of the running event loop."""

    def start(self) -> None:
        self._woken = asyncio.Event()
        scans = run_steps_async(self._scans())
        self._task = asyncio.get_running_loop().create_task(scans, name="tfmq-sql-leftovers")

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), seconds)
