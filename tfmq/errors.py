"""All errors that tfmq raises or sends.

    TfmqError
    ├── ConnectionFailed      also a ConnectionError
    │   └── NotPrimary        .primary
    ├── TimedOut              also a TimeoutError
    ├── BadRequest
    │   └── NotARecord        .offset
    ├── UnknownTopic
    │   └── UnknownPartition
    ├── TopicExists
    ├── Damaged               .first .next
    ├── OffsetOutOfRange      .first .end
    ├── LogTruncated          .cut
    ├── MessageTooLarge
    ├── StorageStopped
    ├── DiskFull
    ├── Busy                  .wait_ms
    ├── Closed
    │   └── Abandoned
    ├── Fenced
    ├── UnknownProducer
    ├── SequenceGap
    ├── StaleProducer         .successor
    ├── NotAllowed
    ├── NotSupported
    │   └── UnknownCommand
    ├── DecodeFailed
    ├── DeliveryFailed        .deliveries
    ├── TransactionError
    │   ├── UnknownTransaction
    │   ├── TransactionRolledBack
    │   ├── TransactionCommitted
    │   ├── HeuristicOutcome  .state
    │   ├── TransactionExists
    │   ├── TransactionState
    │   ├── TransactionTooLarge
    │   ├── StaleEpoch
    │   ├── GroupStale
    │   ├── GroupFenced
    │   └── GroupIncomplete
    ├── UnknownSchedule
    ├── StoreFailed
    ├── BadFrame
    ├── VersionMismatch
    ├── ServerError
    ├── ConfigError
    ├── LoginFailed
    └── Forbidden             .right

Each class has a stable `code` (which programs compare), a `number` (which is sent), `retriable` (the same
call may succeed later without a change), `outcome` ("not done", or "unknown": it may have been done),
`closes` (the server closes the connection after it), and two sentences: what happened and what to do. Codes
and numbers are never reused for another error. A code that this release does not know becomes a plain
`TfmqError` with that code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar, overload

Outcome = Literal["not done", "unknown"]
NOT_DONE: Outcome = "not done"
UNKNOWN: Outcome = "unknown"

DetailValue = TypeVar("DetailValue", int, str)


class TfmqError(Exception):
    """An error of tfmq. `str(error)` is a sentence: what happened and, where it helps, what to do.

    `sentence` replaces the sentence of the class. `outcome` and `retriable` replace the values of the class where the
    caller has more exact ones. All other keyword arguments become details, which are sent with the error: numbers,
    text, or lists and dicts of these.
    """

    number: int = 1
    code: str = "error"
    retriable: bool = False
    outcome: Outcome = UNKNOWN
    closes: ClassVar[bool] = False
    happened: ClassVar[str] = "An error occurred that this release does not know."
    advice: ClassVar[str] = "Read the sentence of the error, or use a newer client."

    def __init__(
        self, sentence: str = "", *, outcome: Outcome | None = None, retriable: bool | None = None, **details: Any
    ) -> None:
        self.sentence = sentence or f"{self.happened} {self.advice}"
        self.details: dict[str, Any] = details
        if outcome is not None:
            self.outcome = outcome
        if retriable is not None:
            self.retriable = retriable
        super().__init__(self.sentence)

    def __str__(self) -> str:
        return self.sentence


class Detail(Generic[DetailValue]):
    """Descriptor that reads a value in `details`; `unknown` if there is none, or one of another type than `unknown`."""

    def __init__(self, unknown: DetailValue) -> None:
        self.unknown: DetailValue = unknown

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Detail[DetailValue]: ...
    @overload
    def __get__(self, instance: TfmqError, owner: type) -> DetailValue: ...
    def __get__(self, instance: TfmqError | None, owner: type) -> Detail[DetailValue] | DetailValue:
        if instance is None:
            return self
        value: DetailValue = instance.details.get(self.name, self.unknown)
        return value if isinstance(value, type(self.unknown)) else self.unknown


class ConnectionFailed(TfmqError, ConnectionError):
    number, code, retriable = 2, "connection_failed", True
    happened = "The connection to the broker failed or was lost."
    advice = "Check that tfmq-server runs and that the address is right; repeated sends are stored once."


class NotPrimary(ConnectionFailed):
    """No primary of a replicated broker is reached. `primary`: HOST:PORT of the primary; "" where it is not known.

    It is a `ConnectionFailed`, because a client follows the primary by itself: where it cannot reach one, it has no
    broker to work with.
    """

    number, code, outcome = 47, "not_primary", NOT_DONE
    happened = "This server is a standby, which takes no requests before it is primary."
    advice = (
        "Give clients the addresses of all servers; they find the primary. `tfmq replica status` shows the servers."
    )
    primary = Detail("")


class TimedOut(TfmqError, TimeoutError):
    number, code, retriable = 3, "timed_out", True
    happened = "The broker did not reply in time."
    advice = "It may still be executed: repeat it with the same producer, which stores it once, or allow more time."


class BadRequest(TfmqError):
    number, code, outcome = 4, "bad_request", NOT_DONE
    happened = "The request has an invalid value."
    advice = "Correct the value that the sentence names."


class UnknownTopic(TfmqError):
    number, code, outcome = 5, "unknown_topic", NOT_DONE
    happened = "There is no topic of that name, or it was deleted and created again."
    advice = "List the topics (tfmq topic list), or create the topic (tfmq topic create)."


class UnknownPartition(UnknownTopic):
    number, code = 6, "unknown_partition"
    happened = "The topic has no partition of that number."
    advice = "List the partitions (tfmq topic show); tfmq topic grow adds partitions."


class Damaged(TfmqError):
    """The records from offset `first` up to, not including, `next` cannot be read.

    If a transaction has lost messages, the details have its `state`, the number of `lost` messages, and the number of
    all its `messages`; `str(error)` contains both numbers.
    """

    number, code, outcome = 7, "damaged", NOT_DONE
    happened = "A range of the partition is damaged on the disk."
    advice = 'Skip the range with on_damage="skip", or run tfmq log repair.'
    first = Detail(-1)
    next = Detail(-1)


class OffsetOutOfRange(TfmqError):
    """The partition has offsets from `first` up to, not including, `end`."""

    number, code, outcome = 8, "offset_out_of_range", NOT_DONE
    happened = "The offset is outside of the range that the partition has."
    advice = "Seek to an offset in the range, for example to the earliest; this reader missed the messages in between."
    first = Detail(-1)
    end = Detail(-1)


class LogTruncated(TfmqError):
    """The log was truncated at offset `cut` after this reader had read past that offset."""

    number, code, outcome = 9, "log_truncated", NOT_DONE
    happened = "The log was truncated after a crash, at an offset before the read position of this reader."
    advice = "Continue at the offset of the truncation, and discard the messages that were read after it."
    cut = Detail(-1)


class MessageTooLarge(TfmqError):
    number, code, outcome = 10, "message_too_large", NOT_DONE
    happened = "The message or the batch is larger than the broker accepts."
    advice = "Send a smaller message or batch, or raise limits.message_bytes on the server."


class StorageStopped(TfmqError):
    """The partition accepts no writes until an operator resumes it. Its default sentence contains its `reason`."""

    number, code = 11, "storage_stopped"
    happened = "The partition is stopped and accepts no writes; tfmq topic show prints the reason."
    advice = "Correct the cause, then run tfmq topic resume. Durable messages can still be read."

    def __init__(self, sentence: str = "", **given: Any) -> None:
        reason = given.get("reason")
        if not sentence and reason:
            sentence = f"The partition accepts no writes: {str(reason).rstrip('.')}. {self.advice}"
        super().__init__(sentence, **given)


class DiskFull(TfmqError):
    number, code, retriable, outcome = 12, "disk_full", True, NOT_DONE
    happened = "There is no space left on the broker's disk."
    advice = "Free disk space, or shorten the retention; sends succeed as soon as there is space."


class Busy(TfmqError):
    number, code, retriable, outcome = 13, "busy", True, NOT_DONE
    happened = "The broker or the client has reached a limit for pending work."
    advice = "Wait a little and try again."
    wait_ms = Detail(0)
    """After how many milliseconds the broker will accept the request; 0 if that is not known. The client waits so long
    before it tries again."""


class Closed(TfmqError):
    number, code, outcome = 14, "closed", NOT_DONE
    happened = "The object is closed."
    advice = "Create a new one."


class Abandoned(Closed):
    number, code, outcome = 15, "abandoned", UNKNOWN
    happened = "The caller stopped waiting, or closed the client, before the reply arrived."
    advice = "The request may have been executed; to find out, send it again with the same producer id and sequence."


class Fenced(TfmqError):
    number, code, outcome = 16, "fenced", NOT_DONE
    happened = "This member of the group was replaced: its partitions may be assigned to another member."
    advice = "Discard unfinished work on these partitions, and join the group again if necessary."


class UnknownProducer(TfmqError):
    number, code = 17, "unknown_producer"
    happened = "The broker no longer has the producer id; messages that were sent with it earlier may have been stored."
    advice = "Lease a new producer id; check by content whether the last batch was stored."


class SequenceGap(TfmqError):
    number, code, outcome = 18, "sequence_gap", NOT_DONE
    happened = "A batch before this one is missing."
    advice = "Send the missing batch first, or take a successor id."


class StaleProducer(TfmqError):
    """The producer id was closed; `successor` is the id that replaces it."""

    number, code, outcome = 19, "stale_producer", NOT_DONE
    happened = "The producer id was closed and replaced by its successor."
    advice = "Continue with the successor."
    successor = Detail(-1)


class NotAllowed(TfmqError):
    number, code, outcome = 20, "not_allowed", NOT_DONE
    happened = "That is not allowed here."
    advice = "The sentence of the error names the rule."


class NotSupported(TfmqError):
    number, code, outcome = 21, "not_supported", NOT_DONE
    happened = "This release of the broker does not support that."
    advice = "Do not use the feature, or use a release that supports it."


class UnknownCommand(NotSupported):
    number, code = 22, "unknown_command"
    happened = "The broker does not know that command."
    advice = "Use a client that is not newer than the broker."


class DecodeFailed(TfmqError):
    number, code, outcome = 23, "decode_failed", NOT_DONE
    happened = "A message could not be decoded."
    advice = "Check that sender and reader use the same codec; the bytes are in .payload."


class DeliveryFailed(TfmqError):
    """Deliveries failed, and the caller had not read their results. `deliveries`: the handles of the failed deliveries;
    empty after unpickling, because the handles cannot be pickled."""

    number, code = 24, "delivery_failed"
    happened = "Messages could not be delivered, and their results had not been read."
    advice = "Read .deliveries: each has its own error."

    def __init__(self, sentence: str = "", *, deliveries: Sequence[Any] = (), **details: Any) -> None:
        super().__init__(sentence, **details)
        self.deliveries = list(deliveries)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.sentence,), {**self.__dict__, "deliveries": []}


class TransactionError(TfmqError):
    number, code = 25, "transaction_error"
    happened = "The transaction operation failed."
    advice = "Check its state (tfmq tx show), then commit or roll back."


class UnknownTransaction(TransactionError):
    """No live transaction and no stored outcome has that xid. A transaction with that xid may have ended long ago."""

    number, code = 32, "unknown_transaction"
    happened = "The broker has no transaction with that xid, and no outcome of one."
    advice = "List the transactions (tfmq tx list); outcomes are kept for transaction.outcome_seconds."


class TransactionRolledBack(TransactionError):
    number, code, outcome = 33, "transaction_rolled_back", NOT_DONE
    happened = "The transaction was rolled back: none of its messages is or will be visible."
    advice = "Do the work again in a new transaction."


class TransactionCommitted(TransactionError):
    number, code, outcome = 34, "transaction_committed", NOT_DONE
    happened = "The transaction is committed: it cannot be rolled back any more."
    advice = "Compensate for it with messages of a new transaction."


class HeuristicOutcome(TransactionError):
    """An operator ended the transaction: `state` is "heuristic_committed" or "heuristic_rolled_back"."""

    number, code, outcome = 35, "heuristic_outcome", NOT_DONE
    happened = "An operator ended the transaction by hand before its owner did."
    advice = "Compare .state with the outcome in the other systems; when they agree, run tfmq tx forget."
    state = Detail("")


class TransactionExists(TransactionError):
    number, code, outcome = 36, "transaction_exists", NOT_DONE
    happened = "There already is a live transaction with that xid."
    advice = "Resume it (producer.resume), end it, or choose another xid."


class TransactionState(TransactionError):
    number, code, outcome = 37, "transaction_state", NOT_DONE
    happened = "The transaction is in the wrong state for this operation."
    advice = "Check its state (tfmq tx show): send before prepare, and prepare before a two-phase commit."


class TransactionTooLarge(TransactionError):
    number, code, outcome = 38, "transaction_too_large", NOT_DONE
    happened = "The transaction has more bytes or batches than the broker accepts."
    advice = "Split it, or raise limits.transaction_bytes or limits.transaction_pieces on the server."


class StaleEpoch(TransactionError):
    number, code, outcome = 39, "stale_epoch", NOT_DONE
    happened = "The request belongs to an earlier transaction with the same xid."
    advice = "Discard the request: that transaction ended, and the newer one is unchanged."


class GroupStale(TransactionError):
    number, code, outcome = 40, "group_stale", NOT_DONE
    happened = "The commit group already committed a later sequence, or this one with different contents."
    advice = "The checkpoint was reset: start with a new one, or forget the group (tfmq tx forget-group)."


class GroupFenced(TransactionError):
    number, code, outcome = 41, "group_fenced", NOT_DONE
    happened = "That run of the commit group was aborted: its requests are rejected."
    advice = "Start a new run; tasks of the old one end by themselves."


class GroupIncomplete(TransactionError):
    number, code, outcome = 42, "group_incomplete", NOT_DONE
    happened = "Not every transaction of the commit group is prepared, so none was committed."
    advice = "Run the missing parts again, or abort this run of the group."


class UnknownSchedule(TfmqError):
    number, code, outcome = 43, "unknown_schedule", NOT_DONE
    happened = "There is no schedule of that name."
    advice = "List the schedules (tfmq schedule list), or add it (tfmq schedule add)."


class StoreFailed(TfmqError):
    number, code, retriable = 44, "store_failed", True
    happened = "A store outside of the broker (dead letters, offsets) failed."
    advice = "Correct the cause that the sentence names; the operation did not count as done and is repeated."


class BadFrame(TfmqError):
    number, code, closes = 26, "bad_frame", True
    happened = "The bytes that arrived are not a frame of this protocol."
    advice = "Check that both ends speak tfmq and that nothing in between alters the bytes."


class TopicExists(TfmqError):
    number, code, outcome = 27, "topic_exists", NOT_DONE
    happened = "There already is a topic of that name."
    advice = "Use it, or choose another name."


class VersionMismatch(TfmqError):
    number, code, outcome, closes = 28, "version_mismatch", NOT_DONE, True
    happened = "Client and broker have no common protocol version."
    advice = "Upgrade the older of the two."


class NotARecord(BadRequest):
    """No record starts at `offset`."""

    number, code = 29, "not_a_record"
    happened = "No record starts at that offset."
    advice = "Use the offset of a message, or seek, which finds the nearest record before the offset."
    offset = Detail(-1)


class ServerError(TfmqError):
    number, code = 30, "internal_error"
    happened = "The broker had an internal error."
    advice = "The broker's log has the details; please report it."


class ConfigError(TfmqError):
    number, code, outcome = 31, "config_error", NOT_DONE
    happened = "The configuration is wrong."
    advice = "Correct the key that the sentence names; tfmq-server --check-config shows the source of each value."


class LoginFailed(TfmqError):
    number, code, outcome, closes = 45, "login_failed", NOT_DONE, True
    happened = "The broker did not accept the login: there is no such user, or the password is wrong."
    advice = "Check the user and the password in the address, or in $TFMQ_PASSWORD; `tfmq user password` sets another."


class Forbidden(TfmqError):
    """A right is missing."""

    number, code, outcome = 46, "forbidden", NOT_DONE
    happened = "The user of this connection has no right to do that."
    advice = "`tfmq user grant` gives a right to a user."
    right = Detail("")
    """The right that is missing, as `tfmq user grant` takes it, such as "write:orders"."""


def _all_subclasses(root: type[TfmqError]) -> Iterator[type[TfmqError]]:
    yield root
    for child in root.__subclasses__():
        if child.__module__ == __name__:
            yield from _all_subclasses(child)


CLASSES: tuple[type[TfmqError], ...] = tuple(sorted(_all_subclasses(TfmqError), key=lambda each: each.number))
BY_CODE: Mapping[str, type[TfmqError]] = {each.code: each for each in CLASSES}


class ErrorReply(NamedTuple):
    """The fields of an error reply. It is sent as [-number, correlation, code, outcome, sentence, details]."""

    number: int
    code: str
    outcome: str
    sentence: str
    details: dict[str, Any]


def to_error_reply(error: BaseException) -> ErrorReply:
    """Return the fields of an error reply. An error that is no `TfmqError` is sent as `internal_error`."""
    if not isinstance(error, TfmqError):
        error = ServerError()
    return ErrorReply(error.number, error.code, error.outcome, error.sentence, dict(error.details))


def from_error_reply(number: int, code: str, outcome: str, sentence: str, details: Mapping[str, Any]) -> TfmqError:
    """Return the error for an error reply.

    The code determines the class; an unknown code becomes a `TfmqError` with that code and number. An outcome other
    than "not done" becomes "unknown".
    """
    error = BY_CODE.get(code, TfmqError)(sentence)
    error.details = dict(details)
    error.number, error.code = number, code
    error.outcome = NOT_DONE if outcome == NOT_DONE else UNKNOWN
    return error
