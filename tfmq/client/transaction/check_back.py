"""The check-back: the broker asks a producer to decide prepared transactions.

One request of the producer's group always waits at the broker. It needs no thread: any thread that reads sees its
reply, and otherwise the reply is polled every `POLL_SECONDS`. The user's functions run in an executor, because they may
block. The first one that returns "commit" or "rollback" decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from tfmq.client.connection.connection import ClientConnection
from tfmq.client.connection.requests import request_until_not_busy
from tfmq.client.operation import Executor, Operation, Wait, run_work
from tfmq.errors import TfmqError
from tfmq.protocol.commands import AwaitChecks, CommitTransaction, RollbackTransaction

log = logging.getLogger("tfmq.transaction")

WAIT_SECONDS: Final = 30.0
"""How long the broker holds one request; its limit is a minute."""
POLL_SECONDS: Final = 5.0
"""Delay of reading a reply while no thread sends: the broker asks after a minute anyway."""
GRACE_SECONDS: Final = 30.0
PAUSE_SECONDS: Final = 5.0
"""The pause after an error: the broker is unreachable, or has too many waiting requests."""


class InDoubt(NamedTuple):
    """A prepared transaction that the broker asks about.

    Its name, its epoch, when it was prepared, and the first of the topics that it sends to.
    """

    xid: str
    epoch: int
    prepared_at: datetime
    topics: Sequence[str]


Check = Callable[[InDoubt], Any]
"""Returns "commit", "rollback", or None to be asked again later."""
DECISION_REQUESTS: Final[Mapping[Any, Callable[[InDoubt], Any]]] = {
    "commit": lambda asked: CommitTransaction(asked.xid, asked.epoch, False, False, []),
    "rollback": lambda asked: RollbackTransaction(asked.xid, asked.epoch, False),
}


def answer_checks(link: ClientConnection, group: str, run: Executor, functions: Sequence[Check]) -> Operation[None]:
    """Answer the checks of the broker with `functions`, which `run` executes, until cancelled."""
    told = ""
    while True:
        try:
            for asked in (yield from _wait_for_checks(link, group)):
                yield from _answer_check(link, run, functions, asked)
            told = ""
        except TfmqError as error:
            if error.code != told:  # Log once per outage.
                log.warning("The check of transactions of group %s is paused: %s", group, error)
            told = error.code
            yield Wait((), PAUSE_SECONDS)
        except Exception:  # For example no thread can be started: the next check may succeed.
            log.exception("The check of transactions of group %s failed; it continues.", group)
            yield Wait((), PAUSE_SECONDS)


def _wait_for_checks(link: ClientConnection, group: str) -> Operation[list[InDoubt]]:
    request = AwaitChecks(group, int(WAIT_SECONDS * 1000))
    call = link.send_request(request, seconds=WAIT_SECONDS + GRACE_SECONDS)
    try:
        while not call.done:
            yield Wait((call,), POLL_SECONDS)
    finally:
        link.abandon(call)
    return [parse_in_doubt(each) for each in call.result().checks]


def _answer_check(link: ClientConnection, run: Executor, functions: Sequence[Check], asked: InDoubt) -> Operation[None]:
    decision = yield from run_work(run, lambda: _decide(functions, asked))
    make = DECISION_REQUESTS.get(decision)
    if make is None:
        return
    until = link.now() + GRACE_SECONDS
    call = yield from request_until_not_busy(link, make(asked), until=until, in_background=True)
    if call.error is None:
        log.info("Transaction %s: %s, as the check decided.", asked.xid, call.reply.state)
    else:
        text = "Transaction %s: the check returned %s, but the broker replied: %s"
        log.warning(text, asked.xid, decision, call.error)


def _decide(functions: Sequence[Check], asked: InDoubt) -> str | None:
    """Return the decision of the first function that has one. A function that raises has none."""
    for function in list(functions):
        try:
            decision = function(asked)
        except BaseException:  # Also SystemExit: a check function must not end the program.
            log.exception("The check of transaction %s raised; it is called again later.", asked.xid)
            continue
        if isinstance(decision, str) and decision in DECISION_REQUESTS:
            return decision
        if decision is not None:
            text = 'The check of transaction %s returned %r: it must return "commit", "rollback" or None.'
            log.error(text, asked.xid, decision)
    return None


def parse_in_doubt(row: Mapping[str, Any]) -> InDoubt:
    """Return the transaction in one row of the AWAIT_CHECKS reply."""
    prepared_at = datetime.fromtimestamp(int(row.get("prepared_ms", 0)) / 1000, UTC)
    return InDoubt(str(row["xid"]), int(row["epoch"]), prepared_at, tuple(row.get("topics", ())))
