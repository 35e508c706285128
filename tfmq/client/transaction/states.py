"""The states of a transaction in the client, and tables of the states in which each step may be executed."""

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
    """State of a transaction in the client. `Transaction.state` returns its value."""

    OPEN = "open"  # accepts messages
    PREPARING = "preparing"  # a prepare is in progress
    PREPARED = "prepared"  # kept by the broker until a commit or rollback
    READ_ONLY = "read_only"  # ended, and had no message or offset
    COMMITTING = "committing"  # a commit is in progress
    COMMITTED = "committed"  # ended and visible
    APPLYING = "applying"  # committed; a partition that accepts no writes now gets its messages later
    ROLLING_BACK = "rolling_back"  # a rollback is in progress
    ROLLED_BACK = "rolled_back"  # ended, and none of its messages is stored
    HEURISTIC_COMMITTED = "heuristic_committed"  # ended by an operator
    HEURISTIC_ROLLED_BACK = "heuristic_rolled_back"
    IN_DOUBT = "unknown"  # the reply to a step was lost, so the step may have been executed
    ABANDONED = "abandoned"  # belongs to the parent process after a fork

    __repr__ = str.__repr__
    """The `repr` of plain text, because steps return states to users as text."""


# Names for the members, because on Python 3.11 access to a member through its class is a call.
OPEN, PREPARING, PREPARED, READ_ONLY, COMMITTING, COMMITTED, APPLYING, ROLLING_BACK, ROLLED_BACK = list(State)[:9]
HEURISTIC_COMMITTED, HEURISTIC_ROLLED_BACK, IN_DOUBT, ABANDONED = list(State)[9:]

SEND, PREPARE, COMMIT, ROLLBACK = "send", "prepare", "commit", "rollback"
STEP_STATES: Final = {PREPARE: PREPARING, COMMIT: COMMITTING, ROLLBACK: ROLLING_BACK}
IN_PROGRESS: Final = frozenset(STEP_STATES.values())
SUCCEEDED: Final = frozenset((COMMITTED, APPLYING, READ_ONLY, HEURISTIC_COMMITTED))
FAILED: Final = frozenset((ROLLED_BACK, HEURISTIC_ROLLED_BACK))
FINISHED: Final = SUCCEEDED | FAILED

GO, DONE = "go", "done"
"""Results of `check_step`. GO: execute the step. DONE: the step was executed before, so only return the state."""

EXECUTED_IN: Final[dict[str, tuple[str, ...]]] = {
    SEND: (OPEN,),
    PREPARE: (OPEN, IN_DOUBT),
    COMMIT: (OPEN, PREPARED, APPLYING, IN_DOUBT, HEURISTIC_COMMITTED, HEURISTIC_ROLLED_BACK),
    ROLLBACK: (OPEN, PREPARED, IN_DOUBT, HEURISTIC_COMMITTED, HEURISTIC_ROLLED_BACK),
}
DONE_IN: Final[dict[str, tuple[str, ...]]] = {
    SEND: (),
    PREPARE: (PREPARED, READ_ONLY),
    COMMIT: (READ_ONLY, COMMITTED),
    ROLLBACK: (READ_ONLY, ROLLED_BACK),
}
"""The states in which a step was executed before. In states neither here nor in `EXECUTED_IN` the step is rejected."""

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
    if state in EXECUTED_IN[step]:
        return GO
    if state in DONE_IN[step]:
        return DONE
    if state == ABANDONED:
        raise Abandoned(reason, outcome="not done")
    error = _ENDED_OTHERWISE.get((step, state), TransactionState)
    words = _DESCRIPTIONS.get(state) or state.replace("_", " ")
    raise error(reason or f"The transaction is {words}: {_ADVICE[step]}.")


def state_after_error(step: str, error: TfmqError) -> str | None:
    """Return the transaction's state after a step that failed with `error`; None: the state before the step."""
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
    """Return the error of a step. If the outcome is unknown, its text also says how the caller gets the outcome.

    `xid`: the transaction's name if another process can resume it, else None.
    """
    if error.outcome != UNKNOWN or isinstance(error, Damaged):
        return error
    again = "calling it again returns the outcome, and cannot execute it twice"
    if xid is not None:
        again = f"calling it again returns the outcome, or producer.resume({xid!r}) in any process"
    failure = type(error)(f"{error.sentence} Whether it was executed is not known: {again}.", outcome=UNKNOWN)
    failure.details = error.details
    return failure
