"""What PostgreSQL holds prepared of owners that are gone, and that the broker will never ask about.

The database prepares before the broker. An owner that dies between the two leaves a transaction that holds its locks in
the database, while the broker, which never prepared, lets its part end by time and asks nobody. So whoever uses the
database in two phases looks now and then, and finishes what the broker says is over:

    at the broker                        in the database
    committed, applying, read only       commit
    rolled back                          roll back
    unknown, at the node that began it   roll back: it was never prepared there, or is long over
    unknown, at another node             leave it, and say so
    open, prepared, in between           leave it: its owner goes on, or the broker asks
"""

from __future__ import annotations

import logging
from typing import Any, Final, NamedTuple

from sqlalchemy.engine import Connection

from tfmq.sql.broker import describe, node_of
from tfmq.sql.course import Course, Step
from tfmq.sql.prepared import Decision, Prepared, finish, prepared_in

log = logging.getLogger("tfmq.sql")

DECISIONS: Final[dict[str, Decision]] = {
    "committed": "commit",
    "applying": "commit",
    "read_only": "commit",
    "heuristic_committed": "commit",
    "rolled_back": "rollback",
    "heuristic_rolled_back": "rollback",
}
"""What becomes of the database's part, by the state at the broker; other states: nothing."""


class Looked(NamedTuple):
    """What a look found: how many it finished, and how many wait for their owner or for the broker."""

    finished: int = 0
    waiting: int = 0


class Leftovers:
    """Those of one database."""

    def __init__(self, hands: Any) -> None:
        self._hands = hands
        self._told: set[str] = set()

    def look(self, producer: Any) -> Course[Looked]:
        """Ask the broker of `producer`, and finish what is over.

        Raises what SQLAlchemy raises, and what the broker answers.
        """
        found = yield Step("look for what is prepared", lambda: self._hands.on_connection(prepared_in))
        finished = waiting = 0
        for each in found:
            decision = yield from self._decision(each, producer)
            if decision in ("commit", "rollback"):
                yield from self._finish(each, decision)
                finished += 1
            waiting += decision == "wait"
        return Looked(finished, waiting)

    def _decision(self, left: Prepared, producer: Any) -> Course[Any]:
        """What becomes of it; or "wait", or "leave" it to its own broker."""
        found = yield Step("ask the broker", lambda: describe(producer, left.xid))
        if found.state != "unknown":
            return DECISIONS.get(found.state, "wait")
        if left.node == node_of(producer):
            return "rollback"
        self._tell(left)
        return "leave"

    def _finish(self, left: Prepared, decision: Decision) -> Course[None]:
        def work(connection: Connection) -> None:
            finish(connection, left.gid, decision)

        yield Step("finish it", lambda: self._hands.on_connection(work))
        log.warning(
            "PostgreSQL held %s prepared, whose owner is gone: %s, as the broker did.", left.gid, decision
        )

    def _tell(self, left: Prepared) -> None:
        """Once: an operator must look."""
        if left.gid not in self._told:
            self._told.add(left.gid)
            log.error(
                "PostgreSQL holds %s prepared, begun at another broker (node %s): if that one knows nothing of it"
                " (tfmq tx show %s), ROLLBACK PREPARED '%s'. It holds locks.",
                left.gid,
                left.node,
                left.xid,
                left.gid,
            )
