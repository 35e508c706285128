"""What a transaction or a timer does to the broker, as values, and what the broker must be able to do for it.

An effect names its target and its source: who applied it and at which place of that source. Places of one
source only grow at a target, so the highest applied one tells, after any crash, what is still to do; an effect
at or below it is not done again. Sources do not know partitions, topics or groups: they know a `Destination`.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from journal.record.batch import Batch, Source
from journal.record.format import make_log_id

OFFSETS_KEY: Final = 0
"""The key of what holds the groups' offsets; no partition's log has the id 0."""

ARRIVALS_KEY: Final = make_log_id(2, 0)
"""The key, and the log's id, of where delayed messages arrive; topics' incarnations are above the house's ids."""

SourceName: TypeAlias = tuple[int, int]
"""(kind, id) of a source, as in `journal.record.batch.Source`."""


class Append(NamedTuple):
    """Batches for one partition from `source`, in one atomic append that names the source's position.

    It bypasses the rule of contiguous sequences: what its producers sent was checked where it first landed.
    """

    topic: str
    incarnation: int
    partition: int
    batches: Sequence[Batch]
    source: Source

    @property
    def key(self) -> int:
        """The id of the partition's log."""
        return make_log_id(self.incarnation, self.partition)


class GroupPlaces(NamedTuple):
    """Where a group goes on, under the generation that said so.

    `places` are (incarnation, partition, offset, index, log epoch) of partitions that were there when they
    were checked.
    """

    group: str
    generation: int
    places: Sequence[tuple[int, int, int, int, int]]


class CommitOffsets(NamedTuple):
    """Offsets of groups from `source`, saved together or not at all."""

    groups: Sequence[GroupPlaces]
    source: Source

    @property
    def key(self) -> int:
        """`OFFSETS_KEY`: all groups' offsets lie together."""
        return OFFSETS_KEY


class Schedule(NamedTuple):
    """Delayed batches from `source`, each to become messages of its partition when it is due.

    Of each, `data` is what the broker made of a delayed send: a note that names partition and dues as they were
    asked for, then the records; `count` counts the records alone. `decided_ms`: for each, the broker time from which
    its delays count. Written in one atomic append that names the source's position.
    """

    batches: Sequence[Batch]
    decided_ms: Sequence[int]
    source: Source

    @property
    def key(self) -> int:
        """`ARRIVALS_KEY`: all delayed messages arrive in one log."""
        return ARRIVALS_KEY


Effect: TypeAlias = Append | CommitOffsets | Schedule


class Delayed(NamedTuple):
    """A delayed batch as it waits: message n is for the partition of the log `log_id`, has the number `first_number` +
    n and the n-th of `dues` (ms of broker time; one alone is that of all). A handle is made of these.
    """

    log_id: int
    first_number: int
    dues: "array[int]"


class Mark(NamedTuple):
    """What is written: it survives a power cut once the target `key` is forced up to `end`.

    `offsets`: where each batch of the effect begins, in their order; empty where the effect had been written
    before, for offsets of groups, and for delayed batches, which are not in their partition yet: for those `delayed`
    has one row each, likewise.
    """

    key: int
    end: int
    offsets: Sequence[int]
    delayed: Sequence[Delayed] = ()


Applied: TypeAlias = Callable[[Mark | None, BaseException | None], None]
"""applied(mark, None) when the effect is written, applied(None, error) when it is not."""

Forced: TypeAlias = Callable[[BaseException | None], None]
"""forced(None) when it is on the disk, forced(error) when that is not going to happen before the target
is resumed.
"""


class Destination(Protocol):
    """The targets of effects, by key: the id of a partition's log, `OFFSETS_KEY` or `ARRIVALS_KEY`.

    Everything is called in the owner's thread. Callbacks come in that thread, at once or later.
    """

    def check(self, key: int, size_bytes: int) -> None:
        """Whether `key` would take so many bytes more, as far as that can be told now; nothing is promised.

        Raises UnknownTopic (also where that incarnation is gone), StorageStopped, DiskFull: the latter also
        when what is reserved and `size_bytes` leave no free space.
        """
        ...

    def reserve(self, size_bytes: int) -> None:
        """Counts bytes that decided transactions will still write, so that `check` does not give them away."""
        ...

    def release(self, size_bytes: int) -> None:
        """Takes a reservation back, in part or whole."""
        ...

    def name(self, key: int) -> str | None:
        """The target for people, `topic-partition`; None if the log's incarnation is gone, for ever."""
        ...

    def applied(self, key: int, source: SourceName) -> tuple[int, int] | None:
        """The highest place (high, low) written there from that source; None if there is none."""
        ...

    def settled(self, key: int, source: SourceName) -> tuple[int, int] | None:
        """As `applied`, but the highest place that no power cut and no resumption can take back any more. Of groups'
        offsets for a source that did not write there since the start; None while those are stopped, or wait for space.
        """
        ...

    def apply(self, effect: Effect, done: Applied) -> None:
        """Writes the effect, unless it was written before, at the end of the turn; never raises.

        Effects of one key are written in the order of the calls. Those of one source that are queued for
        one partition in the same turn are joined in one append under the last one's place. The bytes of
        `effect.batches` stay unchanged until `done`.
        Errors: UnknownTopic (gone for ever: whoever asks drops it), StorageStopped and DiskFull (not done,
        unless the error's outcome says "unknown": then `applied` tells once the target is resumed), anything
        else as StorageStopped. Since the highest place wins, a source that must not lose one never calls this
        for a key while an earlier call for it has no answer, unless both are to be joined. For the same reason
        a stopped target answers StorageStopped until its sources were told that it is resumed: what it had
        written, but not forced, may be gone, and is to be written again before anything later.
        """
        ...

    def slice_bytes(self, key: int) -> int:
        """The most bytes of batches that one `Append` to `key` should have; a single block may be larger."""
        ...

    def hold(self, key: int, source: SourceName) -> None:
        """From now on only effects of that source are appended to that partition, so that those of one big
        transaction lie together; whatever else arrives waits until `unhold`. Holds do not nest. No effect on a key
        that is gone, nor on `ARRIVALS_KEY`, where nothing need lie together.
        """
        ...

    def unhold(self, key: int) -> None:
        """Ends `hold`; harmless without one."""
        ...

    def forced(self, mark: Mark) -> bool:
        """Whether what the mark stands for is on the disk, or its target gone for ever. Cheap."""
        ...

    def when_forced(self, mark: Mark, done: Forced) -> None:
        """Asks for a force up to the mark; `done(None)` also where the target is gone for ever."""
        ...

    def check_offsets(self, rows: Sequence[Any], session: Any) -> list[GroupPlaces]:
        """What rows of offsets (as they came with the request) mean, if `session` may commit them.

        Raises Fenced (the generation is over), NotAllowed, Busy (locked by another transaction).
        """
        ...

    def lock_offsets(self, epoch: int, xid: str, groups: Sequence[GroupPlaces]) -> None:
        """Until `unlock_offsets`, reading, saving and resetting the offsets of these groups and partitions is
        answered Busy, naming `xid`. Adds to what the epoch holds already; never fails.
        """
        ...

    def unlock_offsets(self, epoch: int) -> None:
        """Ends every lock of that transaction; harmless without one."""
        ...
