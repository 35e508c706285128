"""The log of one partition: segments as one space of offsets, appended at the end, read anywhere, cut nowhere.

It guarantees: an append is whole or not there; offsets and ordinals are never used twice for what a reader may have
seen; nothing that was forced is ever given up by itself; after a failed force it takes no writes until `resume`.

Threads: the *owner* (one thread, the reactor's) calls everything, except where a method says that it may run in a
worker or beside the owner. Reads may run in another thread beside appends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from journal.shapes import PLAIN, Appended, Batch, Chunk, Source, succession
from journal.clock import Clock
from journal.disk import Disk
from journal.options import LogOptions
from journal.state import State

Upto = Literal["forced", "written"]


class Dirty(NamedTuple):
    """What a power cut could take: `records` not forced, the first of them appended at `since` (monotonic, s)."""

    records: int
    since: float


class Log:
    """See the module. Opened by `Log.open`, never directly."""

    recovery: Recovery
    """What opening found: `.labels` (rows of the table in journal.recovery), `.cut_bytes`, `.torn_path`, `.damage`."""

    @classmethod
    def open(cls, disk: Disk, folder: str, *, log_id: int, clock: Clock, options: LogOptions = LogOptions(),
             state: State | None = None, start_offset: int = 0) -> Log:
        """Opens or makes the log in the existing `folder`, after recovery. `start_offset`: where a new one begins.

        `state.load` is called once, then `state.apply` for each verified block behind the snapshot.
        Raises NewerFormat, Corrupt (a log of another id), OSError, Full. May run in a worker.
        """

    # first_offset, end_offset, forced_offset, first_ordinal, end_ordinal, epoch, size_bytes, count: int
    # stopped: str | None; damage: list[tuple[int, int, str]]; dirty: Dirty | None; log_id, folder, closed
    # oldest_ms, newest_ms: int | None (append times); segment_count: int

    def before_append(self, size_bytes: int) -> Callable[[], None] | None:
        """File work that must be done before an append of `size_bytes` of records; None: append at once.

        The work (a roll with its force and snapshot, taking back `clean`) may run in a worker: until it ends no
        append may come; reads may. It raises Stopped, Full; then the append fails alike. `append` does it
        inline if the caller did not.
        """

    def check(self, batch: Batch) -> None:
        """Every bound, flag, id and block checksum of `batch`. Raises BadBatch. Any thread."""

    def append(self, batches: Sequence[Batch], source: Source = PLAIN, checked: bool = False) -> list[Appended]:
        """Appends all batches in one write, atomic; one answer a batch.

        `checked`: the caller has called `check`. Raises BadBatch, TooLarge, Full (nothing was appended, go on later),
        Stopped, Closed.
        """

    def append_control(self, source: Source) -> Appended:
        """Appends a control record without records, as for `succession`. Raises as `append`."""

    def append_payloads(self, payloads: Sequence[bytes]) -> Appended:
        """For use without a broker: appends under a producer id of the log's own, drawn at its first use."""

    def read(self, offset: int, max_bytes: int, *, upto: Upto = "forced", epoch: int | None = None) -> Chunk:
        """Whole control blocks from the one that holds `offset`; one larger than `max_bytes` comes alone.

        `epoch`: the highest that the reader knows. Raises BelowStart, BeyondEnd, NotARecord, CutAway, Corrupt
        (a damaged range; `.next` is where to go on), OSError. May run beside the owner.
        """

    def read_cached(self, offset: int, max_bytes: int, *, upto: Upto = "forced",
                    epoch: int | None = None) -> Chunk | None:
        """As `read`, or None if that would have to wait for the disk."""

    def seek_offset(self, offset: int) -> int:
        """The nearest start of a record at or before `offset`, within the log. May read the disk."""

    def offset_of_ordinal(self, ordinal: int) -> tuple[int, int]:
        """(offset, ordinal) of that record; below the first: the first; at or above the end: the end. Damaged: next."""

    def offset_of_time(self, ms: int) -> int:
        """The offset of the first block appended at or after `ms`, else the end."""

    def truncate_before(self, offset: int) -> int:
        """Gives up what lies before the block that holds `offset`; answers the new first offset."""

    def retain(self, now_ms: int) -> list[str]:
        """Removes or archives sealed segments by the options; answers their names."""

    def flush_due(self, now: float) -> float | None:
        """When (monotonic, s) the log wants to be forced: <= now means now; None: nothing to force."""

    def force(self) -> None:
        """Forces inline. Raises Stopped."""

    def stop(self, reason: str) -> None:
        """No more writes, over restarts too, until `resume`."""

    def resume(self) -> None:
        """Recovery again, with writes allowed: `recovery` and `state` are new. May run in a worker. Raises OSError."""

    def applied(self, kind: int, id: int) -> tuple[int, int] | None:
        """The highest position of a source that was appended, or None."""

    def close(self) -> None:
        """Forces, writes the snapshot, sets `clean`. Raises Stopped if the force fails. May run in a worker."""
