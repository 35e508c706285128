"""The check-back: the broker asks a producer group how its prepared transactions ended.

A producer with check functions always has a request waiting at the broker, which replies when it has transactions to
ask about. No thread waits for this reply: it is read together with other replies, at the latest after `POLL_SECONDS`.
The check functions run in another thread, because they may block. They are called in turn until one decides.
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
"""How long a request waits at the broker. The broker permits at most a minute."""
POLL_SECONDS: Final = 5.0
"""How long a reply waits while no thread reads it. It matters little: a check arrives a minute after the prepare."""
GRACE_SECONDS: Final = 30.0
PAUSE_SECONDS: Final = 5.0
"""The pause after an error, for example because the broker is unreachable or has too many waiting requests."""


class InDoubt(NamedTuple):
    """A prepared transaction that the broker asks about.

    `xid`: the transaction's name · `epoch`: its number · `topics`: up to 8 of the topics to which it sends messages.
    """

    xid: str
    epoch: int
    prepared_at: datetime
    topics: Sequence[str]


Check = Callable[[InDoubt], Any]
"""A check function returns "commit" or "rollback", or None if it does not know yet; then it is called again later."""
DECISION_REQUESTS: Final[Mapping[Any, Callable[[InDoubt], Any]]] = {
    "commit": lambda asked: CommitTransaction(asked.xid, asked.epoch, False, False, []),
    "rollback": lambda asked: RollbackTransaction(asked.xid, asked.epoch, False),
}


def answer_checks(link: ClientConnection, group: str, run: Executor, functions: Sequence[Check]) -> Operation[None]:
    """Answer the broker's checks with the decisions of `functions`, until cancelled. `run` calls the functions."""
    logged_code = ""
    while True:
        try:
            for in_doubt in (yield from _wait_for_checks(link, group)):
                yield from _answer_check(link, run, functions, in_doubt)
            logged_code = ""
        except TfmqError as error:
            if error.code != logged_code:  # Log once per outage.
                log.warning("The check of transactions of group %s is paused: %s", group, error)
            logged_code = error.code
            yield Wait((), PAUSE_SECONDS)
        except Exception:  # For example because no thread can be started. The next check may succeed.
            log.exception("The check of transactions of group %s failed; it continues.", group)
            yield Wait((), PAUSE_SECONDS)


def _wait_for_checks(link: ClientConnection, group: str) -> Operation[list[InDoubt]]:
    request = AwaitChecks(group, int(WAIT_SECONDS * 1000))
    pending = link.send_request(request, seconds=WAIT_SECONDS + GRACE_SECONDS)
    try:
        while not pending.done:
            yield Wait((pending,), POLL_SECONDS)
    finally:
        link.abandon(pending)
    return [parse_in_doubt(each) for each in pending.result().checks]


def _answer_check(
    link: ClientConnection, run: Executor, functions: Sequence[Check], in_doubt: InDoubt
) -> Operation[None]:
    decision = yield from run_work(run, lambda: _decide(functions, in_doubt))
    make = DECISION_REQUESTS.get(decision)
    if make is None:
        return
    until = link.now() + GRACE_SECONDS
    pending = yield from request_until_not_busy(link, make(in_doubt), until=until, in_background=True)
    if pending.error is None:
        log.info("Transaction %s: %s, as the check decided.", in_doubt.xid, pending.reply.state)
    else:
        text = "Transaction %s: the check returned %s, but the broker replied: %s"
        log.warning(text, in_doubt.xid, decision, pending.error)


def _decide(functions: Sequence[Check], in_doubt: InDoubt) -> str | None:
    """Call the functions until one returns "commit" or "rollback". Return this decision, else None. Log errors."""
    for function in list(functions):
        try:
            decision = function(in_doubt)
        except BaseException:  # Also SystemExit: a check function must not end the program.
            log.exception("The check of transaction %s raised; it is called again later.", in_doubt.xid)
            continue
        if isinstance(decision, str) and decision in DECISION_REQUESTS:
            return decision
        if decision is not None:
            text = 'The check of transaction %s returned %r: it must return "commit", "rollback" or None.'
            log.error(text, in_doubt.xid, decision)
    return None


def parse_in_doubt(row: Mapping[str, Any]) -> InDoubt:
    prepared_at = datetime.fromtimestamp(int(row.get("prepared_ms", 0)) / 1000, UTC)
    return InDoubt(str(row["xid"]), int(row["epoch"]), prepared_at, tuple(row.get("topics", ())))
