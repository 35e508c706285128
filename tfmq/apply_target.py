"""Effects of transactions, delayed messages and schedules, and the interface through which they are applied.

An effect is a change of one target: an append to a partition or to the arrival log, or new offsets of groups. It has
the key of its target and a `source`: the component from which the effect comes, and the effect's position among all
effects of that component. A target applies the effects of one source by increasing position only. So after a crash the
highest applied position shows which effects must still be applied; an effect at or below it is not applied again. The
sources use only the interfaces `ApplyTarget`, `Timers` and `RunInWorker`, not partitions, topics or groups.
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
"""(kind, id) of a source of effects. Kind: transaction journal, delayed messages or schedule; id: which one of them."""


class Append(NamedTuple):
    """Batches for one partition, to be written in one atomic append that also stores the position of `source`.

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
    """Read positions that a group commits, and the generation of the member that commits them.

    `positions` are (incarnation, partition, offset, index, log epoch) of existing partitions. Index: how many messages
    inside the record at the offset are acked.
    """

    group: str
    generation: int
    positions: Sequence[tuple[int, int, int, int, int]]


class CommitOffsets(NamedTuple):
    """Read positions of groups, to be committed in one atomic append that also stores the position of `source`."""

    groups: Sequence[GroupPositions]
    source: Source

    @property
    def key(self) -> int:
        return OFFSETS_KEY


class AppendDelayed(NamedTuple):
    """Delayed batches from `source`, to be written to the arrival log in one atomic append.

    `data` of a batch is an arrival header (the partition, and the due times as the client requested them), followed by
    the records; `count` counts the records only. `decided_ms` has the time of the commit for each batch, in broker
    time. Relative delays count from that time.
    """

    batches: Sequence[Batch]
    decided_ms: Sequence[int]
    source: Source

    @property
    def key(self) -> int:
        return ARRIVALS_KEY


Effect: TypeAlias = Append | CommitOffsets | AppendDelayed


class StoredDelayedBatch(NamedTuple):
    """What identifies the messages of a delayed batch in the arrival log. Handles are made of these values.

    Message n of the batch, counted from 0, is for the partition with the log `log_id`, has the number `first_number` +
    n, and is due at entry n of `dues` (ms of broker time). If `dues` has a single entry, it is valid for all messages.
    """

    log_id: int
    first_number: int
    dues: "array[int]"


class AppendResult(NamedTuple):
    """The result of a written effect. The effect is durable when the target `key` is fsynced up to `end`.

    `offsets` has the start offset of each batch of the effect, in the order of the batches. It is empty for an effect
    that had been written before, for offsets of groups, and for delayed batches, which are not in their partition yet.
    For delayed batches, `delayed` has one row for each batch.
    """

    key: int
    end: int
    offsets: Sequence[int]
    delayed: Sequence[StoredDelayedBatch] = ()


AppliedCallback: TypeAlias = Callable[[AppendResult | None, BaseException | None], None]
"""Called with (result, None) when the effect is written, with (None, error) when it failed."""

DurableCallback: TypeAlias = Callable[[BaseException | None], None]
"""Called with None when an effect is durable or its target was deleted; with an error if the target is stopped, or was
resumed without the effect."""

RunInWorker: TypeAlias = Callable[[Callable[[], Any], Callable[[Any, BaseException | None], None]], None]
"""run(fn, done): call `fn()` in any thread, then `done(result, error)` in the broker's thread."""


class Timers(Protocol):
    """Timers on the monotonic clock; implemented by `tfmq.broker.timers.Timers`."""

    def now(self) -> float: ...
    def after(self, seconds: float, call: Callable[[], None], *, deferrable: bool = False) -> Any: ...
    def cancel(self, timer: Any) -> None: ...


class ApplyTarget(Protocol):
    """The targets of effects, by key. All methods are called, and all callbacks run, in the broker's thread."""

    def check_space(self, key: int, size_bytes: int) -> None:
        """Raise an error if `key` cannot accept `size_bytes` more bytes now. Reserves nothing.

        Raises UnknownTopic (this incarnation of the topic was deleted), StorageStopped, DiskFull (the reserved bytes
        and `size_bytes` together exceed the free space).
        """
        ...

    def reserve_bytes(self, size_bytes: int) -> None:
        """Reserve bytes that transactions will write; `check_space` does not count them as free."""
        ...

    def release_bytes(self, size_bytes: int) -> None:
        """Release bytes that `reserve_bytes` has reserved."""
        ...

    def display_name(self, key: int) -> str | None:
        """Return `topic-partition` for log lines, or None if the log's incarnation was deleted."""
        ...

    def last_applied(self, key: int, source: SourceId) -> tuple[int, int] | None:
        """Return the highest position (high, low) of `source` that is written in the target `key`; None if none is."""
        ...

    def last_durable(self, key: int, source: SourceId) -> tuple[int, int] | None:
        """Return the highest position (high, low) from `source` that is durable in the target `key`; None if none is.

        Neither a power failure nor a resumption of the target can lower that position. The groups' offsets are an
        exception: for them, the result is the highest written position. So it is durable only until `source` writes
        offsets for the first time since the start. The result is None while their log is stopped or waits for space.
        """
        ...

    def apply(self, effect: Effect, done: AppliedCallback) -> None:
        """Write the effect at the end of the turn, unless it was written before. Never raises.

        Effects of one key are written in the order of the calls. Effects of one source that are queued for one
        partition in the same turn are written in one append, with the position of the last effect. The bytes of
        `effect.batches` must not change until `done` is called.

        `done` gets UnknownTopic if the topic was deleted: the caller must discard the effect. It gets StorageStopped or
        DiskFull if the write failed. If that error has the outcome "unknown", the effect may have been written:
        after the target is resumed, `last_applied` shows it. Any other error means the same as StorageStopped.

        A target stores only the highest position of a source. So if an effect failed and a later one was written, the
        failed effect would count as applied. A source that must not lose an effect therefore waits for `done` before it
        applies the next effect to the same key, unless both may be written in one append. A stopped target reports
        StorageStopped until its sources were notified of the resumption: effects that were written but not fsynced may
        be lost, and have to be written again before any later effect.
        """
        ...

    def append_bytes_max(self, key: int) -> int:
        """Return the maximum bytes of one `Append` to the partition `key`. An append of one block may be larger."""
        ...

    def begin_exclusive(self, key: int, source: SourceId) -> None:
        """Let only effects of `source` be appended to the partition, until `end_exclusive`; other appends wait.

        So the appends of one large transaction are contiguous in the log. Calls do not nest. The call has no effect on
        a deleted key, nor on `ARRIVALS_KEY`, where the appends need not be contiguous.
        """
        ...

    def end_exclusive(self, key: int) -> None:
        """Let effects of all sources be appended again after `begin_exclusive`. Do nothing if it was not called."""
        ...

    def is_durable(self, result: AppendResult) -> bool:
        """Return whether the effect with this result is durable, or its target was deleted. Cheap."""
        ...

    def fsync_to(self, result: AppendResult, done: DurableCallback) -> None:
        """Fsync the target up to the end of `result`, then call `done`. For a deleted target, call `done(None)`."""
        ...

    def check_offsets(self, rows: Sequence[Any], session: Any) -> list[GroupPositions]:
        """Return the read positions in a client's `rows`. Raises Fenced if a member does not own its partitions,
        NotAllowed if the broker would store more offsets than its limit, Busy if an offset is locked."""
        ...

    def lock_offsets(self, epoch: int, xid: str, groups: Sequence[GroupPositions]) -> None:
        """Lock the offsets of these groups and partitions for the transaction `epoch`. Never fails.

        Until `unlock_offsets`, reading, committing and resetting these offsets raises Busy, which names `xid`. Locks
        that this transaction already has remain.
        """
        ...

    def unlock_offsets(self, epoch: int) -> None:
        """Release all offset locks of the transaction `epoch`."""
        ...
