"""The states of a transaction and what leads from one to the next, as one table.

An event is either something asked of the broker (its record is on the way to the journal) or a record that
is in the journal. What the table does not list is refused; nothing is guessed.
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

# Asked: the record is queued, and may yet be refused by the disk.
ASK_PREPARE: Final = "ask to prepare"
ASK_COMMIT: Final = "ask to commit"
ASK_ROLLBACK: Final = "ask to roll back"
REFUSED: Final = "the record was not written, nothing was prepared"
REFUSED_PREPARED: Final = "the record was not written, the transaction stays prepared"

# Recorded: the record is in the journal.
PREPARE: Final = "prepare"
DECIDE: Final = "commit"
DROP: Final = "roll back"
DECIDE_BY_HAND: Final = "commit by hand"
DROP_BY_HAND: Final = "roll back by hand"

# Done: no record is needed, since the journal and the partitions prove it.
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
    # A start finds records without the steps that asked for them.
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
"""Nobody can do anything to it any more."""

HEURISTIC: Final = frozenset((HEURISTIC_COMMITTED, HEURISTIC_ROLLED_BACK))
"""Ended by an operator; remembered until somebody says forget."""

IN_DOUBT: Final = frozenset((PREPARED, COMMITTING, ROLLING_BACK))
"""Prepared, or on the way from there; `Transaction.prepared_ms` tells these from unprepared ones."""


class WrongStep(ValueError):
    """`event` cannot happen to a transaction in `state`."""

    def __init__(self, state: str, event: str) -> None:
        super().__init__(f"a transaction that is {state} cannot take the step: {event}")
        self.state = state
        self.event = event


def step(state: str, event: str) -> str:
    """The state that follows. Raises WrongStep."""
    try:
        return TABLE[state, event]
    except KeyError:
        raise WrongStep(state, event) from None
