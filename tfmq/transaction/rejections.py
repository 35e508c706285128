"""The errors of rejected transaction commands. The functions return errors; their callers raise or send them."""

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
    """Convert an error of the transaction journal to an error for clients; return an error for clients unchanged."""
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
    """Convert any exception of a command to an error for clients; log unexpected exceptions."""
    if isinstance(error, TfmqError):
        return error
    if isinstance(error, states.InvalidTransition):
        return TransactionState(state=error.state)
    if not isinstance(error, journal.JournalError | OSError):
        logger.error("a step of a transaction failed", exc_info=error)
    return from_journal_error(error)


def journal_stopped(reason: str, outcome: Outcome = NOT_DONE) -> StorageStopped:
    sentence = f"The transaction journal accepts no writes: {reason}. Repair the disk and restart the broker."
    return StorageStopped(sentence, outcome=outcome, reason=reason)


def durability_unknown(error: BaseException) -> TfmqError:
    """Return the error for a command whose record is written, but whose fsync failed: the outcome is unknown."""
    return from_journal_error(error, UNKNOWN)


def not_open(epoch: int) -> UnknownTransaction:
    why = "it was prepared, ended, timed out, or its session closed"
    sentence = f"No open transaction has the epoch {epoch}: {why}."
    return UnknownTransaction(sentence, outcome=NOT_DONE, epoch=epoch)


def wrong_state(xid: str, state: states.State, rule: str) -> TransactionState:
    """Return the error for a command that `state` does not permit. `rule`: the reason, which ends the error's text."""
    return TransactionState(f"The transaction {xid} is {state}; {rule}.", state=state)


def member_rule(member: CommitGroupMember) -> str:
    """Return the `rule` for `wrong_state` if a client tries to commit one member of a commit group by itself."""
    return (
        f"it belongs to the commit group {member.group}, whose commit of sequence {member.sequence} commits it with the"
        " others"
    )


def missing_batch(xid: str) -> TransactionState:
    sentence = f"The transaction {xid} lacks a batch that could not be written. Send that batch again, or roll back."
    return TransactionState(sentence, state=states.OPEN)


def lost(xid: str, lost: int, messages: int) -> Damaged:
    """Return the error for the commit of a prepared transaction whose messages were partly lost by damage."""
    sentence = (
        f"The transaction {xid} was not committed: {lost} of its {messages} messages were lost with damage in the"
        f" transaction journal. Roll it back, or commit what is left by hand: tfmq tx commit {xid} --force."
    )
    return Damaged(sentence, state=states.PREPARED, lost=lost, messages=messages)


def lost_since(xid: str, state: states.State, lost: int, messages: int) -> Damaged:
    """Return the error for a committed transaction that lost messages, perhaps before its partitions had them all."""
    sentence = (
        f"The transaction {xid or 'without a name'} is committed, but damage in the transaction journal took up to"
        f" {lost} of its {messages} messages before their partitions had them. Look at what its topics have."
    )
    return Damaged(sentence, outcome=UNKNOWN, state=state, lost=lost, messages=messages)


def unreadable(damage: str) -> Damaged:
    sentence = f"The transaction is committed, but not all of its messages can be brought to their partitions: {damage}"
    return Damaged(sentence, outcome=UNKNOWN, state=states.APPLYING)


def heuristic_outcome(state: states.State) -> HeuristicOutcome:
    # After a heuristic commit the messages are visible to consumers, so the outcome cannot be "not done".
    outcome: Outcome = UNKNOWN if state == states.HEURISTIC_COMMITTED else NOT_DONE
    return HeuristicOutcome(state=state, outcome=outcome)


def stale_epoch(epoch: int, newest: int) -> StaleEpoch:
    # The outcome of the older transaction is not stored any more, so that transaction may have been committed.
    return StaleEpoch(epoch=epoch, newest=newest, outcome=UNKNOWN)


def group_committed(member: CommitGroupMember) -> GroupStale:
    sentence = f"The commit group {member.group} has committed its sequence {member.sequence} already, without this"
    return GroupStale(f"{sentence} transaction.", sequence=member.sequence)
