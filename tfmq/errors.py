"""Every error that tfmq raises or sends: one tree, one row a class.

    TfmqError
    ├── ConnectionFailed      also a ConnectionError
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
    ├── Busy
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
    └── ConfigError

Each class has a stable `code` (what programs compare), a `number` (what travels), `retriable` (the same call may
succeed later without a change), `outcome` ("not done", or "unknown": it may have happened), `closes` (the server ends
the connection behind it), and two sentences: what happened and what to do. Codes and numbers are never given to
another meaning; a code that this release does not know arrives as a plain `TfmqError` that keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, overload

# What every error of tfmq has: a stable code, a sentence, whether it may have happened, and its details.
#
# The tree of errors stands in `tfmq.errors`, which is where programs import all of this from.

Outcome = Literal["not done", "unknown"]
NOT_DONE: Outcome = "not done"
UNKNOWN: Outcome = "unknown"


class TfmqError(Exception):
    """An error of tfmq. `str(error)` is a sentence that says what happened and, where it helps, what to do.

    `sentence` replaces the class's own; `outcome` and `retriable` may be given where the place that raises
    knows better than the class. Everything else given by name becomes a detail: it travels with the error, so
    it must be plain (numbers, text, lists and maps of them).
    """

    number: int = 1
    code: str = "error"
    retriable: bool = False
    outcome: Outcome = UNKNOWN
    closes: ClassVar[bool] = False
    happened: ClassVar[str] = "Something went wrong that this release has no name for."
    advice: ClassVar[str] = "Read the sentence that came with it; a newer client may know more."

    def __init__(
        self,
        sentence: str = "",
        *,
        outcome: Outcome | None = None,
        retriable: bool | None = None,
        **details: Any,
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


class Detail:
    """A number that travels in `details`, read as an attribute; -1 where it is not known."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Detail: ...
    @overload
    def __get__(self, instance: TfmqError, owner: type) -> int: ...
    def __get__(self, instance: TfmqError | None, owner: type) -> Detail | int:
        if instance is None:
            return self
        value = instance.details.get(self.name, -1)
        return value if isinstance(value, int) else -1


class TextDetail:
    """A word that travels in `details`, read as an attribute; "" where it is not known."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> TextDetail: ...
    @overload
    def __get__(self, instance: TfmqError, owner: type) -> str: ...
    def __get__(self, instance: TfmqError | None, owner: type) -> TextDetail | str:
        if instance is None:
            return self
        value = instance.details.get(self.name, "")
        return value if isinstance(value, str) else ""


class ConnectionFailed(TfmqError, ConnectionError):
    number, code, retriable = 2, "connection_failed", True
    happened = "The connection to the broker could not be made, or broke."
    advice = "Check that tfmq-server runs and that the address is right; sends are repeated without doubling."


class TimedOut(TfmqError, TimeoutError):
    number, code, retriable = 3, "timed_out", True
    happened = "The answer did not come in time."
    advice = "It may still happen: repeat with the same producer, which cannot double it, or allow more time."


class BadRequest(TfmqError):
    number, code, outcome = 4, "bad_request", NOT_DONE
    happened = "The request asks for something that makes no sense."
    advice = "Correct the value that is named."


class UnknownTopic(TfmqError):
    number, code, outcome = 5, "unknown_topic", NOT_DONE
    happened = "There is no topic of that name, or it was deleted and made again."
    advice = "Look at the list of topics (tfmq topic list), or create it (tfmq topic create)."


class UnknownPartition(UnknownTopic):
    number, code = 6, "unknown_partition"
    happened = "The topic has no partition of that number."
    advice = "Ask for the partitions again; tfmq topic grow adds some."


class Damaged(TfmqError):
    """The records from offset `first` up to, not including, `next` cannot be read. Of a transaction, the sentence says
    what of its messages damage took; then the details have `state`, `lost` and `messages`.
    """

    number, code, outcome = 7, "damaged", NOT_DONE
    happened = "A range of the partition is damaged on the disk."
    advice = 'Read on behind it with on_damage="skip", or mend it with tfmq log repair.'
    first = Detail()
    next = Detail()


class OffsetOutOfRange(TfmqError):
    """The partition holds offsets from `first` up to, not including, `end`."""

    number, code, outcome = 8, "offset_out_of_range", NOT_DONE
    happened = "The offset lies outside what the partition holds."
    advice = (
        "Seek to an offset inside it, for example to the earliest; what lies between was lost to this reader."
    )
    first = Detail()
    end = Detail()


class LogTruncated(TfmqError):
    """The log was cut at offset `cut` after this reader had read beyond it."""

    number, code, outcome = 9, "log_truncated", NOT_DONE
    happened = "The end of the log was cut off after a crash, below the place that this reader had reached."
    advice = "Go on from the cut, and distrust what was read beyond it."
    cut = Detail()


class MessageTooLarge(TfmqError):
    number, code, outcome = 10, "message_too_large", NOT_DONE
    happened = "The message, or the batch, is larger than the broker takes."
    advice = "Send less at once, or raise limits.message_bytes on the server."


class StorageStopped(TfmqError):
    """With a detail `reason` and no sentence of its own, the sentence gives the reason."""

    number, code = 11, "storage_stopped"
    happened = "The partition takes no writes: it was stopped, and tfmq topic show has the reason."
    advice = "Mend what the reason names, then run tfmq topic resume. What is on the disk can be read."

    def __init__(self, sentence: str = "", **given: Any) -> None:
        reason = given.get("reason")
        if not sentence and reason:
            sentence = f"The partition takes no writes: {str(reason).rstrip('.')}. {self.advice}"
        super().__init__(sentence, **given)


class DiskFull(TfmqError):
    number, code, retriable, outcome = 12, "disk_full", True, NOT_DONE
    happened = "There is no space left on the broker's disk."
    advice = "Make space, or shorten the retention; sending goes on as soon as there is some."


class Busy(TfmqError):
    number, code, retriable, outcome = 13, "busy", True, NOT_DONE
    happened = "There is no room for more work at the moment."
    advice = "Wait a little and try again."


class Closed(TfmqError):
    number, code, outcome = 14, "closed", NOT_DONE
    happened = "It was closed before."
    advice = "Make a new one."


class Abandoned(Closed):
    number, code, outcome = 15, "abandoned", UNKNOWN
    happened = "The caller gave up, or closed, before the answer came."
    advice = "It may have happened; whoever must know sends it again with the same producer id and sequence."


class Fenced(TfmqError):
    number, code, outcome = 16, "fenced", NOT_DONE
    happened = "What this member of a group held may be another one's by now."
    advice = "Drop work begun with it, and join again if the place is lost."


class UnknownProducer(TfmqError):
    number, code = 17, "unknown_producer"
    happened = (
        "The broker does not remember the producer id; what was sent with it earlier may have been stored."
    )
    advice = "Lease a new producer id; check by content whether the last batch arrived."


class SequenceGap(TfmqError):
    number, code, outcome = 18, "sequence_gap", NOT_DONE
    happened = "A batch before this one is missing."
    advice = "Send the missing batch first, or take a successor id."


class StaleProducer(TfmqError):
    """The producer id was closed; `successor` is the id that follows it."""

    number, code, outcome = 19, "stale_producer", NOT_DONE
    happened = "The producer id was closed in favour of its successor."
    advice = "Go on with the successor."
    successor = Detail()


class NotAllowed(TfmqError):
    number, code, outcome = 20, "not_allowed", NOT_DONE
    happened = "That is not allowed here."
    advice = "The sentence that comes with it names the rule."


class NotSupported(TfmqError):
    number, code, outcome = 21, "not_supported", NOT_DONE
    happened = "This release of the broker cannot do that yet."
    advice = "Leave it out, or use a release that can."


class UnknownCommand(NotSupported):
    number, code = 22, "unknown_command"
    happened = "The broker does not know that command."
    advice = "Use a client that is not newer than the broker."


class DecodeFailed(TfmqError):
    number, code, outcome = 23, "decode_failed", NOT_DONE
    happened = "A message could not be decoded."
    advice = "Check that sender and reader use the same codec; the bytes are in .payload."


class DeliveryFailed(TfmqError):
    """Some deliveries failed and nobody had looked; `deliveries` lists them. They stay behind when it is
    pickled.
    """

    number, code = 24, "delivery_failed"
    happened = "Messages could not be delivered, and nobody had looked at their results."
    advice = "Look at .deliveries: each says what became of it."

    def __init__(self, sentence: str = "", *, deliveries: Sequence[Any] = (), **details: Any) -> None:
        super().__init__(sentence, **details)
        self.deliveries = list(deliveries)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.sentence,), {**self.__dict__, "deliveries": []}


class TransactionError(TfmqError):
    number, code = 25, "transaction_error"
    happened = "The transaction could not do that."
    advice = "Ask for its state (tfmq tx show), then commit or roll back."


class UnknownTransaction(TransactionError):
    """Neither a live transaction nor a remembered outcome bears that name: it may have ended long ago."""

    number, code = 32, "unknown_transaction"
    happened = "The broker knows no transaction of that name, and remembers no outcome of one."
    advice = "Look at the list (tfmq tx list); outcomes are remembered for transaction.outcome_seconds."


class TransactionRolledBack(TransactionError):
    number, code, outcome = 33, "transaction_rolled_back", NOT_DONE
    happened = "The transaction was rolled back: nothing of it is visible, or ever will be."
    advice = "Do the work again in a new transaction."


class TransactionCommitted(TransactionError):
    number, code, outcome = 34, "transaction_committed", NOT_DONE
    happened = "The transaction is committed: it cannot be rolled back any more."
    advice = "Undo what it did by messages of a new transaction."


class HeuristicOutcome(TransactionError):
    """An operator decided it: `state` is "heuristic_committed" or "heuristic_rolled_back"."""

    number, code, outcome = 35, "heuristic_outcome", NOT_DONE
    happened = "An operator ended the transaction by hand before its owner did."
    advice = "Compare .state with what the other systems did; when they agree again: tfmq tx forget."
    state = TextDetail()


class TransactionExists(TransactionError):
    number, code, outcome = 36, "transaction_exists", NOT_DONE
    happened = "There is a live transaction of that name already."
    advice = "Go on with it (producer.resume), end it, or choose another xid."


class TransactionState(TransactionError):
    number, code, outcome = 37, "transaction_state", NOT_DONE
    happened = "The transaction is in another state than that step needs."
    advice = "Ask for its state (tfmq tx show): sends come before prepare, prepare before a two-phase commit."


class TransactionTooLarge(TransactionError):
    number, code, outcome = 38, "transaction_too_large", NOT_DONE
    happened = "The transaction has more bytes or batches than the broker takes."
    advice = "Split it, or raise limits.transaction_bytes or limits.transaction_pieces on the server."


class StaleEpoch(TransactionError):
    number, code, outcome = 39, "stale_epoch", NOT_DONE
    happened = "The request belongs to an earlier transaction of the same name."
    advice = "Drop it: that transaction ended, and a newer one is not touched by it."


class GroupStale(TransactionError):
    number, code, outcome = 40, "group_stale", NOT_DONE
    happened = "The commit group has a later sequence already, or committed this one with other contents."
    advice = "A checkpoint was set back: start with a new one, or forget the group (tfmq tx forget-group)."


class GroupFenced(TransactionError):
    number, code, outcome = 41, "group_fenced", NOT_DONE
    happened = "That run of the commit group was aborted: nothing of it is taken any more."
    advice = "Begin a new run; tasks of the old one end by themselves."


class GroupIncomplete(TransactionError):
    number, code, outcome = 42, "group_incomplete", NOT_DONE
    happened = "Not every transaction of the commit group is prepared, so none was committed."
    advice = "Run the missing parts again, or abort this run of the group."


class UnknownSchedule(TfmqError):
    number, code, outcome = 43, "unknown_schedule", NOT_DONE
    happened = "There is no schedule of that name."
    advice = "Look at the list of schedules (tfmq schedule list), or add it (tfmq schedule add)."


class StoreFailed(TfmqError):
    number, code, retriable = 44, "store_failed", True
    happened = "A store beside the broker (dead letters, offsets) could not do it."
    advice = "Mend what the sentence names; nothing was taken for done, so it is done again."


class BadFrame(TfmqError):
    number, code, closes = 26, "bad_frame", True
    happened = "The bytes that arrived are not a frame of this protocol."
    advice = "Check that both ends speak tfmq and that nothing in between alters the bytes."


class TopicExists(TfmqError):
    number, code, outcome = 27, "topic_exists", NOT_DONE
    happened = "There is a topic of that name already."
    advice = "Use it, or choose another name."


class VersionMismatch(TfmqError):
    number, code, outcome, closes = 28, "version_mismatch", NOT_DONE, True
    happened = "Client and broker have no protocol version in common."
    advice = "Upgrade the older of the two."


class NotARecord(BadRequest):
    """No record starts at `offset`."""

    number, code = 29, "not_a_record"
    happened = "No record starts at that offset."
    advice = "Use an offset that came with a message, or seek, which takes the nearest record before."
    offset = Detail()


class ServerError(TfmqError):
    number, code = 30, "internal_error"
    happened = "The broker met an error of its own."
    advice = "Its log has the details; please report it."


class ConfigError(TfmqError):
    number, code, outcome = 31, "config_error", NOT_DONE
    happened = "The configuration is wrong."
    advice = "Correct the key that is named; tfmq-server --check-config shows where each value comes from."


def _tree(root: type[TfmqError]) -> Iterator[type[TfmqError]]:
    yield root
    for child in root.__subclasses__():
        if child.__module__ == __name__:
            yield from _tree(child)


CLASSES: tuple[type[TfmqError], ...] = tuple(sorted(_tree(TfmqError), key=lambda each: each.number))
BY_CODE: Mapping[str, type[TfmqError]] = {each.code: each for each in CLASSES}
BY_NUMBER: Mapping[int, type[TfmqError]] = {each.number: each for each in CLASSES}


class WireError(NamedTuple):
    """An error as it travels in an error reply: [-number, correlation, code, outcome, sentence, details]."""

    number: int
    code: str
    outcome: str
    sentence: str
    details: dict[str, Any]


def to_wire(error: BaseException) -> WireError:
    """The fields of an error reply. What is not a `TfmqError` becomes `internal_error` and shows nothing
    inside.
    """
    if not isinstance(error, TfmqError):
        error = ServerError()
    return WireError(error.number, error.code, error.outcome, error.sentence, dict(error.details))


def from_wire(number: int, code: str, outcome: str, sentence: str, details: Mapping[str, Any]) -> TfmqError:
    """The error that an error reply stands for.

    The code decides the class; a code that is not known here makes a `TfmqError` with that code and number.
    An outcome that is not "not done" is "unknown": in doubt it may have happened.
    """
    error = BY_CODE.get(code, TfmqError)(sentence)
    error.details = dict(details)
    error.number, error.code = number, code
    error.outcome = NOT_DONE if outcome == NOT_DONE else UNKNOWN
    return error
