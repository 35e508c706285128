"""The check-back: asked by the broker, over the open connection, what is to become of prepared transactions.

A request of the producer's group is parked at the broker all the time. It costs no thread: whoever reads sees its
answer, and where nobody does, somebody looks every `LOOK_SECONDS`. What the broker names is given to the functions of
the user, where they may take their time (see `work`); the first that says "commit" or "rollback" decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from tfmq.client.connection.connection import Call, Link
from tfmq.client.connection.requests import answered
from tfmq.client.operation import Operation, Run, Wait, work
from tfmq.errors import TfmqError
from tfmq.protocol.commands import AwaitChecks, CommitTransaction, RollbackTransaction

log = logging.getLogger("tfmq.transaction")

WAIT_SECONDS: Final = 30.0
"""How long the broker holds one request; its limit is a minute."""
LOOK_SECONDS: Final = 5.0
"""How late an answer may be seen while nobody sends: the broker asks about what is a minute old."""
GRACE_SECONDS: Final = 30.0
PAUSE_SECONDS: Final = 5.0
"""Behind a failure: the broker is away, or has too many that wait."""


class InDoubt(NamedTuple):
    """A prepared transaction that the broker asks about: its name, its epoch, when it was prepared, and the topics
    that it sends to (the first ones).
    """

    xid: str
    epoch: int
    prepared_at: datetime
    topics: Sequence[str]


Check = Callable[[InDoubt], Any]
"""Says "commit", "rollback", or None: ask again later."""
REQUESTS: Final[Mapping[Any, Callable[[InDoubt], Any]]] = {
    "commit": lambda asked: CommitTransaction(asked.xid, asked.epoch, False, False, []),
    "rollback": lambda asked: RollbackTransaction(asked.xid, asked.epoch, False),
}


class Checks:
    """The functions of one producer; `run` calls them where they disturb nobody. `watch` is a task."""

    def __init__(self, link: Link, group: str, run: Run, functions: Sequence[Check]) -> None:
        self._functions = functions
        self._link = link
        self._group = group
        self._run = run

    def watch(self) -> Operation[None]:
        """Asks the broker for questions and answers them, until it is cancelled."""
        told = ""
        while True:
            try:
                asked = yield from self._asked()
                for each in asked:
                    yield from self._answer(each)
                told = ""
            except TfmqError as error:
                if error.code != told:  # once for each outage
                    log.warning("The check of transactions of group %s waits: %s", self._group, error)
                told = error.code
                yield Wait((), PAUSE_SECONDS)
            except Exception:  # no thread to be had, for example: the next question may be answered
                log.exception("The check of transactions of group %s failed; it goes on.", self._group)
                yield Wait((), PAUSE_SECONDS)

    def _asked(self) -> Operation[list[InDoubt]]:
        request = AwaitChecks(self._group, int(WAIT_SECONDS * 1000))
        call = self._link.call(request, seconds=WAIT_SECONDS + GRACE_SECONDS)
        try:
            while not call.done:
                yield Wait((call,), LOOK_SECONDS)
        finally:
            self._link.abandon(call)
        return [in_doubt(each) for each in call.result().checks]

    def _answer(self, asked: InDoubt) -> Operation[None]:
        decision = yield from work(self._run, lambda: self._decide(asked))
        make = REQUESTS.get(decision)
        if make is None:
            return
        until = self._link.now() + GRACE_SECONDS
        call: Call = yield from answered(self._link, make(asked), until=until, unattended=True)
        if call.error is None:
            log.info("Transaction %s: %s, as the check said.", asked.xid, call.reply.state)
        else:
            log.warning("Transaction %s: the check said %s, the broker: %s", asked.xid, decision, call.error)

    def _decide(self, asked: InDoubt) -> str | None:
        """What the first function says that knows; one that raises does not."""
        for function in list(self._functions):
            try:
                decision = function(asked)
            except BaseException:  # SystemExit, too: no program ends by a check
                log.exception("The check of transaction %s raised; it is asked again later.", asked.xid)
                continue
            if isinstance(decision, str) and decision in REQUESTS:
                return decision
            if decision is not None:
                log.error(
                    'The check of transaction %s said %r: it says "commit", "rollback" or None.',
                    asked.xid,
                    decision,
                )
        return None


def in_doubt(row: Mapping[str, Any]) -> InDoubt:
    """What AWAIT_CHECKS answered of one transaction."""
    prepared_at = datetime.fromtimestamp(int(row.get("prepared_ms", 0)) / 1000, UTC)
    return InDoubt(str(row["xid"]), int(row["epoch"]), prepared_at, tuple(row.get("topics", ())))
