"""What of the transaction journal is durable, and in which order: its entries, its checkpoints, the roll, its stop.

Everything here but `write` does file work and may run in a worker. The journal's files are forced through one
`journal.fsync.Gate`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from journal.clock import Clock
from journal.disk import Bytes, Disk
from journal.errors import Closed, Corrupt, Full, Lost, Stopped
from journal.fsync import Gate
from journal.linux_aio import Begin, Landed
from journal.record.format import BadRecord, Buffer
from journal.wal.checkpoint import (
    KEPT,
    REWRITE_SECONDS,
    Checkpoint,
    JournalSnapshot,
    LiveFile,
    Pointer,
    SnapshotHead,
)
from journal.wal.entry import (
    HEADER_SIZE,
    AppendMsg,
    Content,
    Entry,
    Filler,
    Operation,
    claimed_size,
    decode_entry,
    encode_entries,
)
from journal.wal.file import HEAD_SIZE, Head, JournalFile, find
from journal.wal.recovery import JournalOpening, JournalState
from journal.wal.recovery_rules import JournalRecovery, Kept


class JournalKeeper:
    """See the module."""

    def __init__(self, disk: Disk, folder: str, clock: Clock, opening: JournalOpening) -> None:
        self._disk = disk
        self._folder = folder
        self._clock = clock
        self._files = opening.files
        self.gate = Gate(opening.files.pins)
        self._checkpoint = opening.checkpoint
        self._checkpoint_file = opening.checkpoint_file
        self._snapshots = opening.snapshots
        self._lists = opening.lists
        self._mark_lock = threading.Lock()
        self._checkpoint_lock = threading.Lock()
        self._noted = clock.monotonic()

    @property
    def place(self) -> int:
        """The place of the newest checkpoint: a start replays from there."""
        return self._checkpoint.snapshots[0].place

    @property
    def note_due(self) -> bool:
        """True if the forced mark in the checkpoint may be rewritten."""
        return self._clock.monotonic() - self._noted >= REWRITE_SECONDS

    def fail(self, reason: str) -> Stopped:
        """Stops the journal; answers the error for whoever is the cause. A start makes it true again, or is refused."""
        files = self._files
        with files.lock:
            files.stopped = files.stopped or reason
            return Stopped(files.stopped)

    # Entries.

    def write(self, buffers: Sequence[Bytes], end: int) -> None:
        """Appends whole entries, up to the place `end`, in the owner's thread. Raises Full, Stopped.

        What a full disk took of them is cut off again, durably: no power cut brings back what was refused.
        """
        files = self._files
        active = files.active
        try:
            try:
                active.append(buffers)
            except Full:
                if active.cut():
                    self.gate.force(active)
                    files.forced_to(files.end)
                raise
        except OSError as error:
            raise self.fail(f"a write failed: {error}") from error
        files.end = end

    def roll(self) -> None:
        """The written file forced, the next one made, its name forced. Raises Stopped, Full: then it may be tried
        again."""
        files, checkpoint = self._files, self._checkpoint
        old = files.active
        try:
            self.gate.force(old, self._seal)
            files.forced_to(files.end)
            head = Head(checkpoint.journal_id, checkpoint.salt, old.number + 1, old.end)
            new = JournalFile.create(self._disk, self._folder, head)
            self._disk.force_folder(self._folder)
        except OSError as error:
            raise self.fail(f"a new file of the transaction journal could not be made: {error}") from error
        files.add(new)

    def _seal(self) -> None:
        """The written file's force, after which nobody need force it again. For the gate."""
        files = self._files
        files.active.file.force()
        files.seal()

    # Forces.

    def force_end(self) -> None:
        """Forces everything written so far. Raises Stopped."""
        files = self._files
        if files.stopped is not None:
            raise Stopped(files.stopped)
        # In this order: where a roll comes between, the older end is forced, and the newer file is forced needlessly.
        end, active = files.end, files.active
        if files.forced >= end:
            return
        try:
            self.gate.force(active)
        except OSError as error:
            raise self.fail(f"a force failed: {error}") from error
        files.forced_to(end)

    def note(self) -> None:
        """Rewrites the forced mark, not forced: it only tells rot from a torn tail. A full disk lets it be old."""
        if self.gate.shut:
            return
        try:
            with self._mark_lock:
                self._noted = self._clock.monotonic()
                self._checkpoint_file.note(self._marked())
        except (Full, Closed):
            return
        except OSError as error:
            self.fail(f"the checkpoint cannot be written: {error}")

    # Checkpoints.

    def live(self) -> tuple[LiveFile, ...]:
        """The files that a snapshot of this moment needs; in the owner's thread."""
        files = self._files
        with files.lock:
            *older, active = files.files
            held = [LiveFile(file.number, file.first, file.end) for file in older if file.holds]
            return (*held, LiveFile(active.number, active.first, files.end))

    def checkpoint(self, place: int, live: tuple[LiveFile, ...], state: Callable[[], bytes]) -> None:
        """Makes a snapshot count that describes every entry before `place`; then removes what nothing needs any more.

        Raises Stopped, Full: then the checkpoints before must do.
        """
        with self._checkpoint_lock:
            try:
                self._make_checkpoint(place, live, state)
                self._remove_idle()
            except OSError as error:
                raise self.fail(f"a checkpoint could not be made: {error}") from error

    def _make_checkpoint(self, place: int, live: tuple[LiveFile, ...], state: Callable[[], bytes]) -> None:
        old = self._checkpoint
        if self._files.forced < place:
            self.force_end()
        number = old.snapshots[0].number + 1
        self._snapshots.write(JournalSnapshot(SnapshotHead(old.journal_id, number, place, live), state()))
        if self._files.stopped is not None:
            raise Stopped(self._files.stopped)
        with self._mark_lock:
            pointers = (Pointer(number, place), *old.snapshots)[:KEPT]
            new = self._marked()._replace(snapshots=pointers)
            self._checkpoint_file.settle(new)
            self._checkpoint = new
        self._lists = (live, *self._lists)[:KEPT]

    def _remove_idle(self) -> None:
        """Removes the files and snapshots that neither of the two checkpoints needs."""
        kept = Kept.of(*self._lists)
        for file in self._files.take_idle(kept.has):
            self._disk.unlink(file.path)
        self._snapshots.prune([pointer.number for pointer in self._checkpoint.snapshots])

    def settle(self) -> None:
        """The checkpoint says what is forced, durably. Raises Full, Stopped."""
        try:
            with self._mark_lock:
                self._checkpoint_file.settle(self._marked())
        except OSError as error:
            raise self.fail(f"the checkpoint cannot be written: {error}") from error

    def _marked(self) -> Checkpoint:
        files = self._files
        return self._checkpoint._replace(forced=files.forced, file_number=files.active.number)

    # The end.

    def drop(self, reason: str) -> None:
        """Nothing more is written or forced; the files are closed when nobody uses them."""
        self.gate.shut = True
        self.fail(reason)
        self.let_go()

    def let_go(self) -> None:
        """Gives the files back, but for one with bytes that are not known to be forced: closing it could swallow the
        error."""
        files = self._files
        files.drop(self.gate.keep_unforced(files.files, files.forced))


__all__ = [
    "AppendMsg",
    "Entry",
    "JournalFileInfo",
    "JournalOptions",
    "JournalState",
    "JournalStore",
    "Operation",
]

READ_SIZE: Final = 4096
"""What a read of an entry of unknown size begins with: most fit."""

RECLAIM_SECONDS: Final = 10.0
"""A checkpoint only to get rid of idle files at most this often: each costs a snapshot and some forces."""

RETRY_SECONDS: Final = 1.0
"""After a checkpoint that a full disk prevented, the next one waits as long."""


@dataclass(frozen=True)
class JournalOptions:
    """`file_bytes`: a file is followed by the next before it would pass this (one larger append stands alone).

    `checkpoint_bytes`: a checkpoint is due after so many; a start replays about as much. `flush_bytes`: so many
    unforced bytes make a force due that nobody waits for.
    """

    file_bytes: int = 64 << 20
    checkpoint_bytes: int = 64 << 20
    flush_bytes: int = 16 << 20


DEFAULTS: Final = JournalOptions()


class JournalFileInfo(NamedTuple):
    """A file: its number, the place of its first byte, its size in bytes, and how many holds keep it."""

    number: int
    first: int
    size: int
    holds: int


class JournalPlan(NamedTuple):
    """What one force covers: everything up to the place `end`, as the journal was when the plan was made."""

    log: JournalStore
    keeper: JournalKeeper
    file: JournalFile
    end: int

    def force(self) -> None:
        """Forces the file; in a worker. Raises OSError, for ever after the first time."""
        self.keeper.gate.force(self.file)

    def begin(self, begin: Begin, landed: Landed) -> bool:
        """As `force`, without a thread; `landed(error)` when it has ended. False: nothing was begun."""
        return self.keeper.gate.begin(self.file, begin, landed)


class JournalStore:
    """The transaction journal: entries in numbered files as one space of places, appended at the end, read anywhere.

    It guarantees: an append is written as a whole or refused; nothing that was forced is ever given up by itself; a
    file goes only when nobody holds anything in it and two checkpoints lie behind it; after a failed force it takes no
    writes.

    Threads: the *owner* (one thread, the reactor's) calls everything, except where a method says that it may run in a
    worker or beside the owner.

    Made by `JournalStore.open`. It is a `journal.fsync.Forceable`: a Forcer serves it.
    """

    def __init__(
        self,
        opening: JournalOpening,
        keeper: JournalKeeper,
        clock: Clock,
        options: JournalOptions,
        state: JournalState,
    ) -> None:
        self.journal_id: Final = opening.checkpoint.journal_id
        """Made once, with the journal; names it as a source in the partitions."""
        self.recovery: Final[JournalRecovery] = opening.report
        """What the opening found."""
        self.options: Final = options
        self.closed = False
        self._seed = opening.seed
        self._files = opening.files
        self._keeper = keeper
        self._clock = clock
        self._state = state
        self._under_way = False
        self._retry_after = self._reclaim_after = clock.monotonic()

    @classmethod
    def open(
        cls,
        disk: Disk,
        folder: str,
        *,
        new_id: Callable[[], int],
        clock: Clock,
        state: JournalState,
        options: JournalOptions = DEFAULTS,
        randomness: Callable[[int], bytes] = os.urandom,
    ) -> JournalStore:
        """Opens the journal in `folder`, or makes one (`new_id` is called only then); after recovery.

        Everything up to `end_offset` is forced then. Raises Corrupt (nothing was changed), NewerFormat, Full (only
        where one is made), OSError. May run in a worker.
        """
        opening = JournalOpening(disk, folder, state, new_id, randomness)
        opening.run()
        keeper = JournalKeeper(disk, folder, clock, opening)
        return cls(opening, keeper, clock, options, state)

    @property
    def end_offset(self) -> int:
        """The place where the next entry goes: everything before is written. (Forcers call it so.)"""
        return self._files.end

    @property
    def forced_offset(self) -> int:
        """The place up to which everything is on the disk."""
        return self._files.forced

    @property
    def stopped(self) -> str | None:
        """Why the journal takes no writes; None if it does."""
        return self._files.stopped

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self._files.files)

    @property
    def files(self) -> list[JournalFileInfo]:
        """The files, by rising numbers; the last one is written."""
        return [JournalFileInfo(f.number, f.first, f.size, f.holds) for f in self._files.files]

    # Writing.

    def before_append(self, size: int) -> Callable[[], None] | None:
        """File work that must be done before an append of `size` bytes (the sum of `entry_size`); None: append at once.

        The work (a roll to the next file) may run in a worker: until it ends no append may come, and no checkpoint may
        begin; reads, holds and releases may. It raises Stopped, Full. `append` does it inline if the caller did not.
        Raises Stopped, Closed.
        """
        self._writable()
        active = self._files.active
        if not active.sealed and (active.size == HEAD_SIZE or active.size + size <= self.options.file_bytes):
            return None
        return self._keeper.roll

    def append(self, entries: Sequence[Content]) -> list[int]:
        """Appends all of them in one write; the place of each. They are on the disk once forced up to `end_offset`.

        Raises TooLarge, Full (nothing was appended; go on when there is space), Stopped, Closed. A crash in the middle
        may leave the first few of them.
        """
        self._writable()
        if not entries:
            return []
        files = self._files
        buffers, places, end = encode_entries(entries, files.end, files.forced, self._seed)
        work = self.before_append(end - files.end)
        if work is not None:
            work()
            buffers, places, end = encode_entries(entries, files.end, files.forced, self._seed)
        self._keeper.write(buffers, end)
        return places

    def _writable(self) -> None:
        if self.closed:
            raise Closed("the transaction journal")
        if self._files.stopped is not None:
            raise Stopped(self._files.stopped)

    # Reading: any thread, also beside the owner.

    def read(self, place: int, size: int = 0) -> Entry:
        """The entry at `place`, verified; `size`, if it is known, saves a read. Any thread.

        Raises Corrupt (Lost: and a repair has given it up), OSError, Closed.
        """
        entry = self._read(place, size or READ_SIZE, cached=False)
        if entry is None:
            raise ValueError("a read that may wait has no answer")
        return entry

    def read_cached(self, place: int, size: int = 0) -> Entry | None:
        """As `read`, or None if that would have to wait for the disk. Any thread."""
        return self._read(place, size or READ_SIZE, cached=True)

    def _read(self, place: int, size: int, cached: bool) -> Entry | None:
        with self._files.reading() as files:
            if not files:
                raise Closed("the transaction journal")
            file = find(files, place)
            if file is None:
                raise Corrupt(self._files.folder, place, place, f"no file has the entry at place {place}")
            pread = file.pread_cached if cached else file.pread
            size = max(size, HEADER_SIZE)
            data: Buffer | None = pread(size, place)
            if data is not None and size < (claimed := claimed_size(data)):
                if place + claimed > file.end:
                    raise self._bad(file, place, "it says that it is longer than its file")
                data = pread(claimed, place)
            if data is None:
                return None
            try:
                entry = decode_entry(data, place, self._seed)
            except BadRecord as error:
                raise self._bad(file, place, error.reason) from error
            if type(entry.content) is Filler:
                raise self._bad(file, place, "a filler")
            return entry

    def _bad(self, file: JournalFile, place: int, reason: str) -> Corrupt:
        """The entry at `place` of a file cannot be read."""
        position = place - file.first
        if file.lost(place, self._seed):
            reason = f"the entry at place {place} was lost, a repair has closed the gap"
            return Lost(file.path, position, position + HEADER_SIZE, reason)
        return Corrupt(file.path, position, position + HEADER_SIZE, f"the entry at place {place}: {reason}")

    # Holding.

    def hold(self, place: int) -> None:
        """The file of the entry at `place` must stay until `release`; holds are counted. Raises KeyError."""
        self._files.hold(place)

    def release(self, place: int) -> None:
        """Takes one `hold` back. Raises KeyError."""
        self._files.release(place)

    # Forcing: see journal.fsync.

    @property
    def flush_due(self) -> bool:
        """True if so much is unforced that a force should begin although nobody waits for one."""
        files = self._files
        return files.end - files.forced > self.options.flush_bytes and files.stopped is None

    def force(self) -> None:
        """Forces inline. Raises Stopped, Closed."""
        self._writable()
        self._keeper.force_end()

    def force_plan(self) -> JournalPlan | None:
        """What a force that starts now would cover; None if there is nothing to force, or no use in it."""
        files = self._files
        if self.closed or files.stopped is not None or files.forced >= files.end:
            return None
        end = files.end
        return JournalPlan(self, self._keeper, files.active, end)

    def force_done(self, plan: JournalPlan, error: Exception | None) -> Callable[[], None] | None:
        """Takes note of a force's end: `forced_offset` moves, or the journal stops. Answers work for a worker."""
        files = self._files
        if error is not None:
            self._keeper.fail(f"a force failed: {error}")
        if files.stopped is not None or self.closed:
            return None
        files.forced_to(plan.end)
        return self._keeper.note if self._keeper.note_due else None

    # Checkpoints.

    @property
    def checkpoint_due(self) -> bool:
        """True if a checkpoint should begin; never while one is under way."""
        files = self._files
        if self._under_way or self.closed or files.stopped is not None:
            return False
        if files.end - self._keeper.place >= self.options.checkpoint_bytes:
            return self._clock.monotonic() >= self._retry_after
        return files.idle > 0 and self._clock.monotonic() >= self._reclaim_after

    def checkpoint(self) -> Callable[[], None]:
        """Captures the state; answers the work that makes a checkpoint of it, for a worker.

        Between the call and the work's end the owner may append, hold and release, but not begin another one; it may
        not be called while the work of `before_append` is under way. Then comes `checkpointed` with how the work ended.
        The caller guarantees that what the state calls applied is forced in the partitions. The work raises Full,
        Stopped. Raises Stopped, Closed.
        """
        self._writable()
        if self._under_way:
            raise RuntimeError("a checkpoint of the transaction journal is under way")
        self._under_way = True
        place, live, state = self._files.end, self._keeper.live(), self._state.dump()
        return lambda: self._keeper.checkpoint(place, live, state)

    def checkpointed(self, error: Exception | None) -> None:
        """The end of the work of a `checkpoint`, in the owner's thread."""
        self._under_way = False
        now = self._clock.monotonic()
        self._reclaim_after = now + RECLAIM_SECONDS
        self._retry_after = now if error is None else now + RETRY_SECONDS

    # Ending.

    def close(self) -> None:
        """Forces, makes a last checkpoint, closes; a stopped journal is only closed. Twice is harmless.

        Raises Stopped if that fails, Full if the disk is full: closed all the same. May run in a worker.
        """
        if self.closed:
            return
        self.closed = True
        files, keeper = self._files, self._keeper
        try:
            if files.stopped is None:
                keeper.force_end()
                if files.end > keeper.place or files.idle:
                    keeper.checkpoint(files.end, keeper.live(), self._state.dump())
                else:
                    keeper.settle()
        finally:
            keeper.let_go()

    def abandon(self, reason: str) -> None:
        """Lets go without writing or forcing anything more. Twice is harmless."""
        if not self.closed:
            self.closed = True
            self._keeper.drop(reason)
