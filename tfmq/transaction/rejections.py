"""The errors of rejected transaction commands: functions that return them, none raises."""

import logging
from typing import Final

from journal import errors as journal
from tfmq.errors import (
    NOT_DONE,
    UNKNOWN,
    Busy,
    Damaged,
    DiskFull,
    GroupStale,
    HeuristicOutcome,
    Outcome,
    ServerError,
    StaleEpoch,
    StorageStopped,
    TfmqError,
    TransactionState,
    UnknownTransaction,
)
from tfmq.transaction import states
from tfmq.transaction.journal_writer import UncertainWrite
from tfmq.transaction.requests import CommitGroupMember

logger = logging.getLogger("tfmq.transaction")

STOPPING: Final = "The broker is stopping. Connect again when it is back."
FORCE_BY_HAND: Final = "Only an operator commits what is left of a transaction: `force` needs `heuristic`."


def from_journal_error(error: BaseException, outcome: Outcome = NOT_DONE) -> TfmqError:
    """Convert an error of the transaction journal to an error for clients; return these unchanged."""
    if isinstance(error, TfmqError):
        return error
    refusal: TfmqError
    if isinstance(error, journal.Full):
        refusal = DiskFull(outcome=outcome)
    elif isinstance(error, journal.Stopped):
        refusal = journal_stopped(error.reason, UNKNOWN if isinstance(error, UncertainWrite) else outcome)
    elif isinstance(error, journal.Closed):
        refusal = Busy(STOPPING, outcome=outcome)
    else:
        refusal = ServerError(outcome=outcome)
    refusal.__cause__ = error
    return refusal


def from_command_error(error: BaseException) -> TfmqError:
    """Convert any exception raised by a command to an error for clients; log unexpected ones."""
    if isinstance(error, TfmqError):
        return error
    if isinstance(error, states.InvalidTransition):
        return TransactionState(state=error.state)
    if not isinstance(error, journal.JournalError | OSError):
        logger.error("a step of a transaction failed", exc_info=error)
    return from_journal_error(error)


def journal_stopped(reason: str, outcome: Outcome = NOT_DONE) -> StorageStopped:
    """Return the error for a stopped transaction journal."""
    sentence = f"The transaction journal accepts no writes: {reason}. Repair the disk and restart the broker."
    return StorageStopped(sentence, outcome=outcome, reason=reason)


def durability_unknown(error: BaseException) -> TfmqError:
    """Return the error for a record with a failed fsync: its outcome is unknown."""
    return from_journal_error(error, UNKNOWN)


def not_open(epoch: int) -> UnknownTransaction:
    """Return the error for a send to a transaction that is not open; the batch was not stored."""
    why = "it was prepared, ended, timed out, or its session closed"
    sentence = f"No open transaction has the epoch {epoch}: {why}."
    return UnknownTransaction(sentence, outcome=NOT_DONE, epoch=epoch)


def wrong_state(xid: str, state: str, rule: str) -> TransactionState:
    """Return the error for a command in the wrong state; `rule` completes the sentence."""
    return TransactionState(f"The transaction {xid} is {state}; {rule}.", state=state)


def member_rule(member: CommitGroupMember) -> str:
    """Return the `rule` for `wrong_state`: a member of a commit group is not committed alone.

    Its messages could not be reverted, and the commit of the group would be rejected as incomplete.
    """
    return (
        f"it belongs to the commit group {member.group}, whose commit of sequence {member.sequence} commits it with the"
        " others"
    )


def missing_batch(xid: str) -> TransactionState:
    """Return the error for a transaction with a batch that could not be written or resent."""
    sentence = f"The transaction {xid} lacks a batch that could not be written. Send that batch again, or roll back."
    return TransactionState(sentence, state=states.OPEN)


def lost(xid: str, lost: int, messages: int) -> Damaged:
    """Return the error for the commit of a prepared transaction of which a repair lost messages.

    A transaction is all or nothing: only an operator can commit what is left.
    """
    sentence = (
        f"The transaction {xid} was not committed: {lost} of its {messages} messages were lost with damage in the"
        f" transaction journal. Roll it back, or commit what is left by hand: tfmq tx commit {xid} --force."
    )
    return Damaged(sentence, state=states.PREPARED, lost=lost, messages=messages)


def lost_since(xid: str, state: str, lost: int, messages: int) -> Damaged:
    """Return the error for a transaction that lost messages by damage after it was committed.

    It is not known which of its messages its partitions had before.
    """
    sentence = (
        f"The transaction {xid or 'without a name'} is committed, but damage in the transaction journal took up to"
        f" {lost} of its {messages} messages before their partitions had them. Look at what its topics have."
    )
    return Damaged(sentence, outcome=UNKNOWN, state=state, lost=lost, messages=messages)


def unreadable(damage: str) -> Damaged:
    """Return the error for a committed transaction whose messages cannot be read from the journal."""
    sentence = f"The transaction is committed, but not all of its messages can be brought to their partitions: {damage}"
    return Damaged(sentence, outcome=UNKNOWN, state=states.APPLYING)


def heuristic_outcome(state: str) -> HeuristicOutcome:
    """Return the error for a transaction that an operator committed or rolled back."""
    # A heuristic commit is visible whatever the client asked for, so the outcome is not "not done".
    outcome: Outcome = UNKNOWN if state == states.HEURISTIC_COMMITTED else NOT_DONE
    return HeuristicOutcome(state=state, outcome=outcome)


def stale_epoch(epoch: int, newest: int) -> StaleEpoch:
    """Return the error for an epoch that a newer transaction of the same name has replaced."""
    # The older outcome is no longer remembered, so it may have been a commit.
    return StaleEpoch(epoch=epoch, newest=newest, outcome=UNKNOWN)


def group_committed(member: CommitGroupMember) -> GroupStale:
    """Return the error for a member whose sequence was committed without it."""
    sentence = f"The commit group {member.group} has committed its sequence {member.sequence} already, without this"
    return GroupStale(f"{sentence} transaction.", sequence=member.sequence)
