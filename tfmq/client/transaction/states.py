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

OPEN: Final = "open"
PREPARED: Final = "prepared"
READ_ONLY: Final = "read_only"
COMMITTED: Final = "committed"
APPLYING: Final = "applying"
ROLLED_BACK: Final = "rolled_back"
HEURISTIC_COMMITTED: Final = "heuristic_committed"
HEURISTIC_ROLLED_BACK: Final = "heuristic_rolled_back"
IN_DOUBT: Final = "unknown"
ABANDONED: Final = "abandoned"

SEND, PREPARE, COMMIT, ROLLBACK = "send", "prepare", "commit", "rollback"
STEP_STATES: Final = {PREPARE: "preparing", COMMIT: "committing", ROLLBACK: "rolling_back"}
IN_PROGRESS: Final = frozenset(STEP_STATES.values())
LIVE: Final = frozenset((OPEN, *IN_PROGRESS))
"""The transaction is rolled back when its producer is closed or its last handle is deleted."""
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
_DESCRIPTIONS: Final = {
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
    """Return `GO` or `DONE`. Raises the error of a step that is not allowed in `state`.

    `reason`: the error message that says why the transaction is in this state.
    """
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
