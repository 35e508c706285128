"""Looks for leftovers now and then: in one thread for each database, or, with an asyncio engine, in a task of the loop.

Not by the way of the next transaction, because that may be waiting for the very locks that a leftover holds.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from contextlib import suppress
from typing import Any, Final
from weakref import WeakSet

from sqlalchemy.engine import Engine
from sqlalchemy.exc import SQLAlchemyError

from tfmq.errors import TfmqError
from tfmq.sql.broker import is_closed
from tfmq.sql.course import walk, walk_async
from tfmq.sql.database import digest
from tfmq.sql.hands import hands_for
from tfmq.sql.leftovers import Leftovers, Looked

log = logging.getLogger("tfmq.sql")

LOOK_SECONDS: Final = 30.0
"""One question of the database each; a leftover has to wait for the broker's timeout (60 seconds) anyway."""

SOON_SECONDS: Final = 2.0
"""While something waits: it holds locks, and its time is running out."""

Name = tuple[str, Any]
_watches: dict[Name, _Watch] = {}
"""Those at work, by database and event loop. Behind `_lock`."""
_lock = threading.Lock()


def _forked() -> None:
    """The child has none of its parent's threads, and its lock may be held for ever."""
    global _lock
    _lock = threading.Lock()
    _watches.clear()


os.register_at_fork(after_in_child=_forked)


def watch(producer: Any, engine: Engine) -> None:
    """Look at once, and then every `LOOK_SECONDS` until the producer is closed. An asyncio engine needs its loop."""
    loop = None
    if engine.dialect.is_async:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # the first transaction will have one
    name = (digest(engine.url), loop)
    with _lock:
        known = _watches.get(name)
        if known is None:
            known = _watches[name] = _Watch(name, engine) if loop is None else _AsyncWatch(name, engine)
            known.producers.add(producer)
            known.start()
        elif producer not in known.producers:
            known.producers.add(producer)
            known.wake()


def pause(looked: Looked) -> float:
    """How long to wait for the next look."""
    return min(SOON_SECONDS, LOOK_SECONDS) if looked.waiting else LOOK_SECONDS


class _Watch:
    """Of one database, for the producers that are open; ends with the last of them."""

    def __init__(self, name: Name, engine: Engine) -> None:
        self.producers: WeakSet[Any] = WeakSet()
        self._name = name
        self._leftovers = Leftovers(hands_for(engine))
        self._failed = False
        self._over = False
        self._woken = threading.Event()

    def start(self) -> None:
        atexit.register(self.stop)
        threading.Thread(target=self._run, name="tfmq-sql-leftovers", daemon=True).start()

    def wake(self) -> None:
        """Look now."""
        self._woken.set()

    def stop(self) -> None:
        """The program ends."""
        self._over = True
        self.wake()

    def _run(self) -> None:
        while (producer := self._open_producer()) is not None:
            self._woken.clear()
            looked = Looked()
            try:
                looked = walk(self._leftovers.look(producer))
                self._failed = False
            except (SQLAlchemyError, TfmqError, OSError) as error:
                self._tell(error)
            del producer  # nobody is kept by being watched for
            self._woken.wait(pause(looked))
        atexit.unregister(self.stop)

    def _open_producer(self) -> Any:
        """One that can ask the broker; None: the watch is over, and whoever comes next begins another."""
        with _lock:
            if not self._over:
                for each in self.producers:
                    if not is_closed(each):
                        return each
            _watches.pop(self._name, None)
            return None

    def _tell(self, error: Exception) -> None:
        """Once for each outage."""
        if not self._failed:
            log.warning("What PostgreSQL holds prepared of owners that are gone was not looked at: %s", error)
        self._failed = True


class _AsyncWatch(_Watch):
    """The same, in a task of the running loop."""

    def start(self) -> None:
        self._soon = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run_async(), name="tfmq-sql-leftovers")

    def wake(self) -> None:
        self._soon.set()

    async def _run_async(self) -> None:
        try:
            while (producer := self._open_producer()) is not None:
                self._soon.clear()
                looked = Looked()
                try:
                    looked = await walk_async(self._leftovers.look(producer))
                    self._failed = False
                except (SQLAlchemyError, TfmqError, OSError) as error:
                    self._tell(error)
                del producer
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._soon.wait(), pause(looked))
        finally:
            with _lock:
                _watches.pop(self._name, None)
