"""Transaction states and the table of permitted transitions.

An event is a request (its record is queued for the journal) or a record that was written. Transitions that
the table does not list are rejected.
"""

from typing import Final

OPEN: Final = "open"
PREPARING: Final = "preparing"
PREPARED: Final = "prepared"
COMMITTING: Final = "committing"
APPLYING: Final = "applying"
COMMITTED: Final = "committed"
ROLLING_BACK: Final = "rolling_back"
ROLLED_BACK: Final = "rolled_back"
HEURISTIC_COMMITTED: Final = "heuristic_committed"
HEURISTIC_ROLLED_BACK: Final = "heuristic_rolled_back"
READ_ONLY: Final = "read_only"

STATES: Final = (
    OPEN,
    PREPARING,
    PREPARED,
    COMMITTING,
    APPLYING,
    COMMITTED,
    ROLLING_BACK,
    ROLLED_BACK,
    HEURISTIC_COMMITTED,
    HEURISTIC_ROLLED_BACK,
    READ_ONLY,
)

# Requests: the record is queued; writing it may still fail.
ASK_PREPARE: Final = "ask to prepare"
ASK_COMMIT: Final = "ask to commit"
ASK_ROLLBACK: Final = "ask to roll back"
REFUSED: Final = "the record was not written, nothing was prepared"
REFUSED_PREPARED: Final = "the record was not written, the transaction stays prepared"

# Records: the record is written to the journal.
PREPARE: Final = "prepare"
DECIDE: Final = "commit"
DROP: Final = "roll back"
DECIDE_BY_HAND: Final = "commit by hand"
DROP_BY_HAND: Final = "roll back by hand"

# Completion without a record: the journal and the partitions prove it.
APPLIED: Final = "all of it is written"
FINISH_EMPTY: Final = "nothing was in it"

TABLE: Final[dict[tuple[str, str], str]] = {
    (OPEN, ASK_PREPARE): PREPARING,
    (OPEN, ASK_COMMIT): COMMITTING,
    (OPEN, ASK_ROLLBACK): ROLLING_BACK,
    (OPEN, FINISH_EMPTY): READ_ONLY,
    (PREPARED, ASK_COMMIT): COMMITTING,
    (PREPARED, ASK_ROLLBACK): ROLLING_BACK,
    (PREPARING, REFUSED): OPEN,
    (COMMITTING, REFUSED): OPEN,
    (ROLLING_BACK, REFUSED): OPEN,
    (COMMITTING, REFUSED_PREPARED): PREPARED,
    (ROLLING_BACK, REFUSED_PREPARED): PREPARED,
    # Recovery replays records without the requests that led to them.
    (OPEN, PREPARE): PREPARED,
    (PREPARING, PREPARE): PREPARED,
    (OPEN, DECIDE): APPLYING,
    (PREPARED, DECIDE): APPLYING,
    (COMMITTING, DECIDE): APPLYING,
    (OPEN, DROP): ROLLED_BACK,
    (PREPARED, DROP): ROLLED_BACK,
    (ROLLING_BACK, DROP): ROLLED_BACK,
    (PREPARED, DECIDE_BY_HAND): HEURISTIC_COMMITTED,
    (COMMITTING, DECIDE_BY_HAND): HEURISTIC_COMMITTED,
    (PREPARED, DROP_BY_HAND): HEURISTIC_ROLLED_BACK,
    (ROLLING_BACK, DROP_BY_HAND): HEURISTIC_ROLLED_BACK,
    (APPLYING, APPLIED): COMMITTED,
    (HEURISTIC_COMMITTED, APPLIED): HEURISTIC_COMMITTED,
}

ENDED: Final = frozenset((COMMITTED, ROLLED_BACK, READ_ONLY))
"""No command can change a transaction in one of these states."""

HEURISTIC: Final = frozenset((HEURISTIC_COMMITTED, HEURISTIC_ROLLED_BACK))
"""States set by an operator's decision; they are kept until the forget command."""

IN_DOUBT: Final = frozenset((PREPARED, COMMITTING, ROLLING_BACK))
"""Prepared, or ending after the prepare; unprepared ones have `Transaction.prepared_ms` 0."""


class WrongStep(ValueError):
    """The state machine has no transition for `event` in `state`."""

    def __init__(self, state: str, event: str) -> None:
        super().__init__(f"a transaction that is {state} cannot take the step: {event}")
        self.state = state
        self.event = event


def step(state: str, event: str) -> str:
    """Return the state that follows `state` on `event`.

    Raises: InvalidTransition.
    """
    try:
        return TABLE[state, event]
    except KeyError:
        raise WrongStep(state, event) from None
