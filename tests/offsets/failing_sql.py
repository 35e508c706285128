"""A storage in a database whose statements and commits fail at random, done or not."""

from random import Random
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.exc import OperationalError

from tfmq.offsets.sql import SqlOffsets


class ShakySql(SqlOffsets):
    """One statement in twenty fails, and one commit in five, half of these after it was done."""

    def __init__(self, url: str, random: Random) -> None:
        super().__init__(url)
        self.random = random

    def _create_engine(self) -> Engine:
        engine = super()._create_engine()
        really = engine.dialect.do_commit

        def commit(connection: Any) -> None:
            self._perhaps(0.1)
            really(connection)
            self._perhaps(0.1)

        engine.dialect.do_commit = commit  # type: ignore[method-assign]
        event.listen(engine, "before_cursor_execute", lambda *_: self._perhaps(0.05))
        return engine

    def _perhaps(self, chance: float) -> None:
        if self.random.random() < chance:
            raise OperationalError("planted", {}, Exception("planted"))
