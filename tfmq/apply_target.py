"""Effects of transactions and delayed messages, and the interface through which they are applied.

An effect names its target (the key) and its source: the component that applies it, transactions or delayed messages,
and the position in that source. The positions of one source only grow at a target. After a crash the highest applied
position therefore shows what is still to be applied; an effect at or below that position is not applied again. Sources
do not know partitions, topics or groups: they know an `ApplyTarget`, `Timers` and `RunInWorker`.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from journal.record.batch import Batch, Source
from journal.record.format import make_log_id

OFFSETS_KEY: Final = 0
"""The key of the groups' offsets. No partition's log has the id 0."""

ARRIVALS_KEY: Final = make_log_id(2, 0)
"""The key and the log id of the arrival log of delayed messages. No partition has this log id."""

SourceId: TypeAlias = tuple[int, int]
"""(kind, id) of a source of effects, as in `journal.record.batch.Source`."""


class Append(NamedTuple):
    """Batches for one partition, in one atomic append with the position of `source`.

    The producer sequences need not be contiguous: they were checked when the messages were first stored, in the
    transaction journal or the arrival log.
    """

    topic: str
    incarnation: int
    partition: int
    batches: Sequence[Batch]
    source: Source

    @property
    def key(self) -> int:
        return make_log_id(self.incarnation, self.partition)


class GroupPositions(NamedTuple):
    """The next read positions of a group, and the group generation that committed them.

    `positions` are (incarnation, partition, offset, ordinal, log epoch) of partitions that existed when the commit was
    checked.
    """

    group: str
    generation: int
    positions: Sequence[tuple[int, int, int, int, int]]


class CommitOffsets(NamedTuple):
    """Read positions of groups, to be committed atomically, with the position of `source`."""

    groups: Sequence[GroupPositions]
    source: Source

    @property
    def key(self) -> int:
        return OFFSETS_KEY


class AppendDelayed(NamedTuple):
    """Delayed batches from `source`, in one atomic append; each becomes messages of its partition when it is due.

    `data` of a batch is the arrival header (partition and due times as the client requested them), followed by the
    records; `count` counts the records only. `decided_ms` has one broker time for each batch, from which its relative
    delays count.
    """

    batches: Sequence[Batch]
    decided_ms: Sequence[int]
    source: Source

    @property
    def key(self) -> int:
        return ARRIVALS_KEY


Effect: TypeAlias = Append | CommitOffsets | AppendDelayed


class StoredDelayedBatch(NamedTuple):
    """Where a delayed batch is stored in the arrival log; handles are made of these values.

    Message n is for the partition with the log `log_id`, has the number `first_number` + n, and is due at the n-th of
    `dues` (ms of broker time); a single value is valid for all messages.
    """

    log_id: int
    first_number: int
    dues: "array[int]"


class AppendResult(NamedTuple):
    """The result of a written effect, which is durable when the target `key` is fsynced up to `end`.

    `offsets` has the start offset of each batch of the effect, in their order. It is empty for an effect that was
    written before already, for read positions of groups, and for delayed batches, which are not in their partition
    yet: for those, `delayed` has one row for each batch.
    """

    key: int
    end: int
    offsets: Sequence[int]
    delayed: Sequence[StoredDelayedBatch] = ()


AppliedCallback: TypeAlias = Callable[[AppendResult | None, BaseException | None], None]
"""Called with (result, None) when the effect is written, with (None, error) when it failed."""

DurableCallback: TypeAlias = Callable[[BaseException | None], None]
"""Called with None when an effect is durable; with an error if it cannot be before its target is resumed."""

RunInWorker: TypeAlias = Callable[[Callable[[], Any], Callable[[Any, BaseException | None], None]], None]
"""run(fn, done): call `fn()` in any thread, then `done(result, error)` in the broker's thread."""


class Timers(Protocol):
    """Timers on the monotonic clock; implemented by `tfmq.broker.timers.Timers`."""

    def now(self) -> float: ...
    def after(self, seconds: float, call: Callable[[], None], *, deferrable: bool = False) -> Any: ...
    def cancel(self, timer: Any) -> None: ...


class ApplyTarget(Protocol):
    """The targets of effects, by key: a log id, `OFFSETS_KEY` or `ARRIVALS_KEY`.

    All methods are called in the broker's thread. Callbacks run in that thread, immediately or later.
    """

    def check_space(self, key: int, size_bytes: int) -> None:
        """Raise an error if `key` cannot accept `size_bytes` more bytes now. Reserves nothing.

        Raises UnknownTopic (also where that incarnation was deleted), StorageStopped, DiskFull: the last also when
        the reserved bytes and `size_bytes` together exceed the free space.
        """
        ...

    def reserve_bytes(self, size_bytes: int) -> None:
        """Reserve bytes that transactions will write; `check_space` does not count them as free."""
        ...

    def release_bytes(self, size_bytes: int) -> None:
        """Release a reservation, in part or whole."""
        ...

    def display_name(self, key: int) -> str | None:
        """Return `topic-partition` for log lines, or None if the log's incarnation was deleted."""
        ...

    def last_applied(self, key: int, source: SourceId) -> tuple[int, int] | None:
        """Return the highest position (high, low) from `source` that is written in `key`, or None."""
        ...

    def last_durable(self, key: int, source: SourceId) -> tuple[int, int] | None:
        """Return the highest position (high, low) from `source` that is durable in `key`, or None.

        No power failure and no resumption of the target can take that position back. For groups' offsets it is the
        highest position if `source` did not write there since the start, and None while the offsets are stopped or
        wait for disk space.
        """
        ...

    def apply(self, effect: Effect, done: AppliedCallback) -> None:
        """Write the effect at the end of the turn, unless it was written before. Never raises.

        Effects of one key are written in the order of the calls. Effects of one source that are queued for one
        partition in the same turn are written in one append with the last one's position. The bytes of
        `effect.batches` must not change until `done` is called.

        `done` gets UnknownTopic (deleted; the caller must discard the effect), StorageStopped or DiskFull (not
        written, unless the error's outcome is "unknown": then `last_applied` shows it after the target is resumed);
        any other error means the same as StorageStopped.

        Because only the highest position counts, a source that must not lose an effect does not call this for a key
        while an earlier call for that key is not answered, unless both may be joined. For the same reason a stopped
        target answers StorageStopped until its sources were notified of the resumption: effects that were written but
        not fsynced may be lost, and have to be written again before any later effect.
        """
        ...

    def append_bytes_max(self, key: int) -> int:
        """Return the maximum bytes of batches in one `Append` to `key`; a single block may be larger."""
        ...

    def begin_exclusive(self, key: int, source: SourceId) -> None:
        """Let only effects of `source` be appended to the partition, until `end_exclusive`.

        So the slices of one large transaction are contiguous in the log. Other appends wait. Calls do not nest. Has
        no effect on a deleted key, nor on `ARRIVALS_KEY`, where slices need not be contiguous.
        """
        ...

    def end_exclusive(self, key: int) -> None:
        """End `begin_exclusive`, if it was called."""
        ...

    def is_durable(self, result: AppendResult) -> bool:
        """Return whether the effect with this result is durable, or its target was deleted. Cheap."""
        ...

    def fsync_to(self, result: AppendResult, done: DurableCallback) -> None:
        """Fsync up to the end of `result`. `done(None)` is also called if the target was deleted."""
        ...

    def check_offsets(self, rows: Sequence[Any], session: Any) -> list[GroupPositions]:
        """Return the read positions in `rows`, as a client sent them in its `session`, if it may commit them.

        Raises Fenced (the generation is over), NotAllowed, Busy (locked by another transaction).
        """
        ...

    def lock_offsets(self, epoch: int, xid: str, groups: Sequence[GroupPositions]) -> None:
        """Lock the offsets of these groups and partitions for the transaction `epoch`. Never fails.

        Until `unlock_offsets`, reading, committing and resetting these offsets raises Busy, which names `xid`. Locks
        that the epoch already has remain.
        """
        ...

    def unlock_offsets(self, epoch: int) -> None:
        """Release all offset locks of the transaction `epoch`."""
        ...
