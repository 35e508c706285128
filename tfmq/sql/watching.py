"""Looks for leftovers now and then: in a thread, or, with an asyncio engine, in a task of the running loop.

Not by the way of the next transaction, because that may be waiting for the very locks that a leftover holds.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from typing import Any, Final
from weakref import ReferenceType, WeakKeyDictionary, ref

from sqlalchemy.engine import Engine
from sqlalchemy.exc import SQLAlchemyError

from tfmq.errors import TfmqError
from tfmq.sql.broker import is_closed
from tfmq.sql.course import walk, walk_async
from tfmq.sql.database import digest
from tfmq.sql.hands import hands_for
from tfmq.sql.leftovers import Leftovers

log = logging.getLogger("tfmq.sql")

LOOK_SECONDS: Final = 30.0
"""One question of the database each; a leftover has to wait for the broker's timeout (60 seconds) anyway."""

_watched: WeakKeyDictionary[Any, set[tuple[str, int]]] = WeakKeyDictionary()
_tasks: set[asyncio.Task[None]] = set()
_over = threading.Event()
atexit.register(_over.set)


def watch(producer: Any, engine: Engine) -> None:
    """Look at once, and then every `LOOK_SECONDS` until the producer is closed. An asyncio engine needs its loop."""
    known = _watched.setdefault(producer, set())
    name = (digest(engine.url), os.getpid())
    if name in known:
        return
    looker = _Looker(producer, engine)
    if not engine.dialect.is_async:
        threading.Thread(target=looker.run, name="tfmq-sql-leftovers", daemon=True).start()
    elif _has_loop():
        task = asyncio.get_running_loop().create_task(looker.run_async(), name="tfmq-sql-leftovers")
        _tasks.add(task)
        task.add_done_callback(_tasks.discard)
    else:
        return
    known.add(name)


def _has_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class _Looker:
    """Holds neither the producer nor, between two looks, a connection."""

    def __init__(self, producer: Any, engine: Engine) -> None:
        self._producer: ReferenceType[Any] = ref(producer)
        self._leftovers = Leftovers(hands_for(engine))
        self._failed = False

    def _open_producer(self) -> Any:
        producer = self._producer()
        return None if producer is None or is_closed(producer) else producer

    def run(self) -> None:
        while (producer := self._open_producer()) is not None:
            try:
                walk(self._leftovers.look(producer))
                self._failed = False
            except (SQLAlchemyError, TfmqError, OSError) as error:
                self._tell(error)
            del producer
            if _over.wait(LOOK_SECONDS):
                return

    async def run_async(self) -> None:
        while (producer := self._open_producer()) is not None:
            try:
                await walk_async(self._leftovers.look(producer))
                self._failed = False
            except (SQLAlchemyError, TfmqError, OSError) as error:
                self._tell(error)
            del producer
            await asyncio.sleep(LOOK_SECONDS)

    def _tell(self, error: Exception) -> None:
        """Once for each outage."""
        if not self._failed:
            log.warning("What PostgreSQL holds prepared of owners that are gone was not looked at: %s", error)
        self._failed = True
