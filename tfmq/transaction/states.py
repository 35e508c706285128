"""Transaction states and the table of permitted transitions, by requests and by written records."""

from enum import StrEnum
from typing import Final


class State(StrEnum):
    """State of a transaction. The values are those of the protocol and of the snapshot."""

    OPEN = "open"
    PREPARING = "preparing"
    PREPARED = "prepared"
    COMMITTING = "committing"
    APPLYING = "applying"
    COMMITTED = "committed"
    ROLLING_BACK = "rolling_back"
    ROLLED_BACK = "rolled_back"
    HEURISTIC_COMMITTED = "heuristic_committed"
    HEURISTIC_ROLLED_BACK = "heuristic_rolled_back"
    READ_ONLY = "read_only"


class Event(StrEnum):
    """What changes a transaction's state. The values are texts for error messages."""

    # Requests: a request has queued its record, or the write of this record has failed.
    REQUEST_PREPARE = "ask to prepare"
    REQUEST_COMMIT = "ask to commit"
    REQUEST_ROLLBACK = "ask to roll back"
    RECORD_FAILED = "the record was not written, nothing was prepared"
    RECORD_FAILED_PREPARED = "the record was not written, the transaction stays prepared"

    # Records: the record of the change is written to the journal.
    PREPARE = "prepare"
    COMMIT = "commit"
    ROLLBACK = "roll back"
    HEURISTIC_COMMIT = "commit by hand"
    HEURISTIC_ROLLBACK = "roll back by hand"

    # Ends without a record: recovery derives them from other records and from the source positions of the targets.
    APPLIED = "all of it is written"
    FINISH_EMPTY = "nothing was in it"


# The members are also names of this module, because on Python 3.11 access to a member through its class costs a call.
OPEN, PREPARING, PREPARED, COMMITTING, APPLYING, COMMITTED, ROLLING_BACK, ROLLED_BACK = list(State)[:8]
HEURISTIC_COMMITTED, HEURISTIC_ROLLED_BACK, READ_ONLY = list(State)[8:]
REQUEST_PREPARE, REQUEST_COMMIT, REQUEST_ROLLBACK, RECORD_FAILED, RECORD_FAILED_PREPARED = list(Event)[:5]
PREPARE, COMMIT, ROLLBACK, HEURISTIC_COMMIT, HEURISTIC_ROLLBACK, APPLIED, FINISH_EMPTY = list(Event)[5:]

STATES: Final = tuple(State)

TRANSITIONS: Final[dict[tuple[str, str], State]] = {
    (OPEN, REQUEST_PREPARE): PREPARING,
    (OPEN, REQUEST_COMMIT): COMMITTING,
    (OPEN, REQUEST_ROLLBACK): ROLLING_BACK,
    (OPEN, FINISH_EMPTY): READ_ONLY,
    (PREPARED, REQUEST_COMMIT): COMMITTING,
    (PREPARED, REQUEST_ROLLBACK): ROLLING_BACK,
    (PREPARING, RECORD_FAILED): OPEN,
    (COMMITTING, RECORD_FAILED): OPEN,
    (ROLLING_BACK, RECORD_FAILED): OPEN,
    (COMMITTING, RECORD_FAILED_PREPARED): PREPARED,
    (ROLLING_BACK, RECORD_FAILED_PREPARED): PREPARED,
    # Some of the next transitions begin in OPEN or PREPARED, because recovery replays records without the requests.
    (OPEN, PREPARE): PREPARED,
    (PREPARING, PREPARE): PREPARED,
    (OPEN, COMMIT): APPLYING,
    (PREPARED, COMMIT): APPLYING,
    (COMMITTING, COMMIT): APPLYING,
    (OPEN, ROLLBACK): ROLLED_BACK,
    (PREPARED, ROLLBACK): ROLLED_BACK,
    (ROLLING_BACK, ROLLBACK): ROLLED_BACK,
    (PREPARED, HEURISTIC_COMMIT): HEURISTIC_COMMITTED,
    (COMMITTING, HEURISTIC_COMMIT): HEURISTIC_COMMITTED,
    (PREPARED, HEURISTIC_ROLLBACK): HEURISTIC_ROLLED_BACK,
    (ROLLING_BACK, HEURISTIC_ROLLBACK): HEURISTIC_ROLLED_BACK,
    (APPLYING, APPLIED): COMMITTED,
    (HEURISTIC_COMMITTED, APPLIED): HEURISTIC_COMMITTED,
}

ENDED_STATES: Final = frozenset((COMMITTED, ROLLED_BACK, READ_ONLY))
"""A transaction in one of these states has ended, and no command can change it."""

HEURISTIC_STATES: Final = frozenset((HEURISTIC_COMMITTED, HEURISTIC_ROLLED_BACK))
"""States of a transaction that an operator has ended. It stays in such a state until the forget command."""

IN_DOUBT_STATES: Final = frozenset((PREPARED, COMMITTING, ROLLING_BACK))
"""A transaction in one of these states is in doubt if it was prepared, that is, has `Transaction.prepared_ms`."""


class InvalidTransition(ValueError):
    """The state machine has no transition for `event` in `state`."""

    def __init__(self, state: str, event: str) -> None:
        super().__init__(f"a transaction that is {state} cannot take the step: {event}")
        self.state = state
        self.event = event


def next_state(state: str, event: str) -> State:
    """Return the state that follows `state` on `event`. Raises InvalidTransition if `state` does not permit `event`."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise InvalidTransition(state, event) from None
