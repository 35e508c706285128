"""The states of a transaction in the client, and tables of the effect of each step.

open              accepts messages
preparing, committing, rolling_back
                  a step is in progress
prepared          held by the broker until a commit or rollback
read_only         ended: no message or offset was in it
committed         ended and visible
applying          committed; a partition that accepts no writes now gets its part later
rolled_back       ended, and nothing of it is stored
heuristic_committed, heuristic_rolled_back
                  ended by an operator
unknown           the reply to a step was lost: it may have been executed
abandoned         belongs to the parent process after a fork
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from tfmq.errors import (
    UNKNOWN,
    Abandoned,
    Damaged,
    HeuristicOutcome,
    StaleEpoch,
    TfmqError,
    TransactionCommitted,
    TransactionRolledBack,
    TransactionState,
)


class State(StrEnum):
    """State of a transaction in the client, as `Transaction.state` returns its value."""

    OPEN = "open"
    PREPARING = "preparing"
    PREPARED = "prepared"
    READ_ONLY = "read_only"
    COMMITTING = "committing"
    COMMITTED = "committed"
    APPLYING = "applying"
    ROLLING_BACK = "rolling_back"
    ROLLED_BACK = "rolled_back"
    HEURISTIC_COMMITTED = "heuristic_committed"
    HEURISTIC_ROLLED_BACK = "heuristic_rolled_back"
    IN_DOUBT = "unknown"
    ABANDONED = "abandoned"

    __repr__ = str.__repr__
    """Steps return it to users."""


# Names in the module: on Python 3.11 access to a member through its class is a call.
OPEN, PREPARING, PREPARED, READ_ONLY, COMMITTING, COMMITTED, APPLYING, ROLLING_BACK, ROLLED_BACK = list(State)[:9]
HEURISTIC_COMMITTED, HEURISTIC_ROLLED_BACK, IN_DOUBT, ABANDONED = list(State)[9:]

SEND, PREPARE, COMMIT, ROLLBACK = "send", "prepare", "commit", "rollback"
STEP_STATES: Final = {PREPARE: PREPARING, COMMIT: COMMITTING, ROLLBACK: ROLLING_BACK}
IN_PROGRESS: Final = frozenset(STEP_STATES.values())
SUCCEEDED: Final = frozenset((COMMITTED, APPLYING, READ_ONLY, HEURISTIC_COMMITTED))
FAILED: Final = frozenset((ROLLED_BACK, HEURISTIC_ROLLED_BACK))
FINISHED: Final = SUCCEEDED | FAILED

GO, DONE = "go", "done"
"""Results of `check_step`: execute the step; or it was executed before, return the state."""

TABLE: Final[dict[tuple[str, str], str]] = {
    (SEND, OPEN): GO,
    (PREPARE, OPEN): GO,
    (PREPARE, PREPARED): DONE,
    (PREPARE, READ_ONLY): DONE,
    (PREPARE, IN_DOUBT): GO,
    (COMMIT, OPEN): GO,
    (COMMIT, PREPARED): GO,
    (COMMIT, READ_ONLY): DONE,
    (COMMIT, COMMITTED): DONE,
    (COMMIT, APPLYING): GO,
    (COMMIT, IN_DOUBT): GO,
    (COMMIT, HEURISTIC_COMMITTED): GO,
    (COMMIT, HEURISTIC_ROLLED_BACK): GO,
    (ROLLBACK, OPEN): GO,
    (ROLLBACK, PREPARED): GO,
    (ROLLBACK, READ_ONLY): DONE,
    (ROLLBACK, ROLLED_BACK): DONE,
    (ROLLBACK, IN_DOUBT): GO,
    (ROLLBACK, HEURISTIC_COMMITTED): GO,
    (ROLLBACK, HEURISTIC_ROLLED_BACK): GO,
}

_ENDED_OTHERWISE: Final[dict[tuple[str, str], type[TfmqError]]] = {
    (COMMIT, ROLLED_BACK): TransactionRolledBack,
    (ROLLBACK, COMMITTED): TransactionCommitted,
    (ROLLBACK, APPLYING): TransactionCommitted,
}
_DESCRIPTIONS: Final[dict[str, str]] = {
    READ_ONLY: "over, with nothing in it",
    IN_DOUBT: "in doubt (a step got no reply; calling it again returns the outcome)",
}
_ADVICE: Final = {
    SEND: "begin another one for further messages",
    PREPARE: "it cannot be prepared any more",
    COMMIT: "it cannot be committed any more",
    ROLLBACK: "it cannot be rolled back any more",
}


def check_step(step: str, state: str, reason: str = "") -> str:
    """Return `GO` or `DONE`, or raise why (`reason`) `step` is not allowed in `state`."""
    found = TABLE.get((step, state))
    if found is not None:
        return found
    if state == ABANDONED:
        raise Abandoned(reason, outcome="not done")
    error = _ENDED_OTHERWISE.get((step, state), TransactionState)
    words = _DESCRIPTIONS.get(state) or state.replace("_", " ")
    raise error(reason or f"The transaction is {words}: {_ADVICE[step]}.")


def state_after_error(step: str, error: TfmqError) -> str | None:
    """Return the state that the broker's error for `step` proves; None: the state is unchanged."""
    if isinstance(error, TransactionRolledBack):
        return ROLLED_BACK
    if isinstance(error, TransactionCommitted):
        return COMMITTED
    if isinstance(error, HeuristicOutcome) and error.state in (HEURISTIC_COMMITTED, HEURISTIC_ROLLED_BACK):
        return str(error.state)
    if isinstance(error, Damaged) and error.details.get("state") in (COMMITTED, APPLYING):
        return str(error.details["state"])
    if isinstance(error, StaleEpoch) or error.outcome == UNKNOWN:
        return IN_DOUBT
    return None


def with_advice(error: TfmqError, xid: str | None) -> TfmqError:
    """The error of a step, with what to do if its outcome is unknown; `xid` if it can be resumed."""
    if error.outcome != UNKNOWN or isinstance(error, Damaged):
        return error
    again = "calling it again returns the outcome, and cannot execute it twice"
    if xid is not None:
        again = f"calling it again returns the outcome, or producer.resume({xid!r}) in any process"
    told = type(error)(f"{error.sentence} Whether it was executed is not known: {again}.", outcome=UNKNOWN)
    told.details = error.details
    return told
