"""The transaction journal: append, read, fsync, checkpoints and the removal of files."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from journal.clock import Clock
from journal.disk import Disk
from journal.errors import Closed, Corrupt, Full, Lost, Stopped
from journal.fsync import FsyncGate, FsyncPlan
from journal.record.format import BadRecord, Buffer
from journal.wal.checkpoint import (
    REWRITE_SECONDS,
    SNAPSHOTS_KEPT,
    JournalCheckpoint,
    JournalSnapshot,
    ListedFile,
    SnapshotHead,
    SnapshotPointer,
)
from journal.wal.entry import (
    HEADER_SIZE,
    Content,
    JournalEntry,
    LostEntries,
    claimed_size,
    decode_entry,
    encode_entries,
)
from journal.wal.file import FILE_HEADER_SIZE, JournalFile, JournalFileHeader, find_file
from journal.wal.recovery import JournalRecovery, JournalState
from journal.wal.recovery_rules import JournalRecoveryReport, RequiredFiles

READ_SIZE: Final = 4096
"""Bytes read first for an entry of unknown size. Most entries are not longer."""

RECLAIM_SECONDS: Final = 10.0
"""Minimum time between checkpoints that only serve to remove idle files, because each writes a snapshot and fsyncs."""

RETRY_SECONDS: Final = 1.0
"""Time after which a checkpoint that has failed on a full disk is tried again."""


@dataclass(frozen=True)
class JournalOptions:
    """Limits of the transaction journal, in bytes.

    `file_bytes`: maximum size of a file; a larger append gets a file of its own. `checkpoint_bytes`: a checkpoint is
    due after this many bytes, so a start replays about as many. `flush_bytes`: if more bytes are not durable, an fsync
    is due even if no caller waits for one.
    """

    file_bytes: int = 64 << 20
    checkpoint_bytes: int = 64 << 20
    flush_bytes: int = 16 << 20


DEFAULTS: Final = JournalOptions()


class JournalFileInfo(NamedTuple):
    """A file of the journal: number, LSN of its first byte, size in bytes, number of references."""

    number: int
    first: int
    size: int
    references: int


class JournalStore:
    """The transaction journal: entries in numbered files, addressed by LSN (byte position over all files).

    An append is written completely or rejected. Recovery never discards durable data. A file is removed only when it
    has no references and two newer checkpoints exist. After a failed fsync no writes are accepted. The caller's Forcer
    (`journal.fsync`) makes the fsyncs. One owner thread (in the broker the reactor's) makes all calls. The exceptions
    are methods that are documented as safe in a worker thread or concurrently with the owner.
    """

    def __init__(self, recovery: JournalRecovery, clock: Clock, options: JournalOptions) -> None:
        self.journal_id: Final = recovery.checkpoint.journal_id
        """Random id, made once with the journal. Appends to partitions name this journal as their source by this id."""
        self.recovery: Final[JournalRecoveryReport] = recovery.report
        self.options: Final = options
        self.closed = False
        self._disk = recovery.disk
        self._folder = recovery.folder
        self._seed = recovery.seed
        self._files = recovery.files
        self._gate = FsyncGate(recovery.files.file_references)
        self._clock = clock
        self._state = recovery.state
        self._checkpoint = recovery.checkpoint
        self._checkpoint_file = recovery.checkpoint_file
        self._snapshots = recovery.snapshots
        self._file_lists = recovery.file_lists
        self._checkpoint_file_lock = threading.Lock()
        self._checkpoint_lock = threading.Lock()
        self._checkpoint_written_at = clock.monotonic()
        self._checkpoint_running = False
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
        """Recover the journal in `folder` and return it. If there is none, create one, whose id is `new_id()`.

        Everything before `end_offset` is durable on return. May run in a worker. Raises Corrupt (nothing was changed),
        NewerFormat, Full (only when creating), OSError.
        """
        recovery = JournalRecovery(disk, folder, state, new_id, randomness)
        recovery.run()
        return cls(recovery, clock, options)

    @property
    def end_offset(self) -> int:
        """LSN of the next entry. Everything before this LSN is written, but perhaps not durable."""
        return self._files.end

    @property
    def forced_offset(self) -> int:
        """Durable LSN: everything before it survives a power loss."""
        return self._files.high_watermark

    @property
    def stopped(self) -> str | None:
        """Why the journal accepts no writes; None if it accepts them."""
        return self._files.stopped

    @property
    def size_bytes(self) -> int:
        """Size of all files in bytes."""
        return sum(file.size for file in self._files.files)

    @property
    def files(self) -> list[JournalFileInfo]:
        """The files by ascending number; the last one is active."""
        return [JournalFileInfo(f.number, f.first, f.size, f.references) for f in self._files.files]

    def before_append(self, size: int) -> Callable[[], None] | None:
        """Return the file work that must precede an append of `size` bytes, headers included; None if there is none.

        The work creates a new file and may run in a worker. Until the work returns, no append may run and no checkpoint
        may start; reads, `add_reference` and `release_reference` are possible. The work raises Stopped, Full. `append`
        does the work itself if the caller did not. Raises Stopped, Closed.
        """
        self._writable()
        active = self._files.active
        if not active.sealed and (active.size == FILE_HEADER_SIZE or active.size + size <= self.options.file_bytes):
            return None
        return self._roll

    def append(self, entries: Sequence[Content]) -> list[int]:
        """Append all entries in one write and return their LSNs. After a crash, the last ones or all may be missing.

        Raises TooLarge, Full (nothing was appended; try again when there is space), Stopped, Closed.
        """
        self._writable()
        if not entries:
            return []
        files = self._files
        buffers, lsns, end = encode_entries(entries, files.end, files.durable_lsn, self._seed)
        work = self.before_append(end - files.end)
        if work is not None:
            work()
            buffers, lsns, end = encode_entries(entries, files.end, files.durable_lsn, self._seed)
        active = files.active
        try:
            try:
                active.append(buffers)
            except Full:
                # The truncation is fsynced. Otherwise a power loss could bring back bytes of the rejected append.
                if active.truncate_failed_write():
                    self._gate.fsync(active)
                    files.raise_durable(files.end, is_replicated=self._disk.is_replicated)
                raise
        except OSError as error:
            raise self._stop(f"a write failed: {error}") from error
        files.end = end
        return lsns

    def _writable(self) -> None:
        if self.closed:
            raise Closed("the transaction journal")
        if self._files.stopped is not None:
            raise Stopped(self._files.stopped)

    # Reading: any thread, concurrently with the owner.

    def read(self, lsn: int, size: int = 0) -> JournalEntry:
        """Read and verify the entry at `lsn`. `size`, if known, saves a second read. Any thread.

        Raises Corrupt (Lost if a repair has replaced the entry by a filler), OSError, Closed.
        """
        entry = self._read(lsn, size or READ_SIZE, cached=False)
        assert entry is not None  # only a cached read returns None
        return entry

    def read_cached(self, lsn: int, size: int = 0) -> JournalEntry | None:
        """Read as `read` does, but return None if the read would wait for the disk. Any thread."""
        return self._read(lsn, size or READ_SIZE, cached=True)

    def _read(self, lsn: int, size: int, cached: bool) -> JournalEntry | None:
        with self._files.file_references:
            files = self._files.files
            if not files:
                raise Closed("the transaction journal")
            file = find_file(files, lsn)
            if file is None:
                raise Corrupt(self._files.folder, lsn, lsn, f"no file has the entry at LSN {lsn}")
            pread = file.pread_cached if cached else file.pread
            size = max(size, HEADER_SIZE)
            data: Buffer | None = pread(size, lsn)
            if data is not None and size < (claimed := claimed_size(data)):
                if lsn + claimed > file.end:
                    raise self._unreadable_error(file, lsn, "it is longer than its file")
                data = pread(claimed, lsn)
            if data is None:
                return None
            try:
                entry = decode_entry(data, lsn, self._seed)
            except BadRecord as error:
                raise self._unreadable_error(file, lsn, error.reason) from error
            if type(entry.content) is LostEntries:
                raise self._unreadable_error(file, lsn, "a filler")
            return entry

    def _unreadable_error(self, file: JournalFile, lsn: int, reason: str) -> Corrupt:
        position = lsn - file.first
        if file.filler_end(lsn, self._seed):
            reason = f"the entry at LSN {lsn} was lost and replaced by a repair"
            return Lost(file.path, position, position + HEADER_SIZE, reason)
        return Corrupt(file.path, position, position + HEADER_SIZE, f"the entry at LSN {lsn}: {reason}")

    def add_reference(self, lsn: int) -> None:
        """Keep the file with the entry at `lsn` until `release_reference`. Raises KeyError if no file has this LSN."""
        self._files.add_reference(lsn)

    def release_reference(self, lsn: int) -> None:
        """Release one reference to the file with the entry at `lsn`, made by `add_reference(lsn)`.

        Raises KeyError if there is none.
        """
        self._files.release_reference(lsn)

    @property
    def flush_due(self) -> bool:
        """True if more than `flush_bytes` are not durable: an fsync should start even if no caller waits for one."""
        files = self._files
        return files.end - files.high_watermark > self.options.flush_bytes and files.stopped is None

    def force(self) -> None:
        """Fsync everything written so far, in this thread. Raises Stopped, Closed."""
        self._writable()
        self._fsync_all()

    def force_plan(self) -> FsyncPlan | None:
        """Return the plan of an fsync of all that was written; None if none is needed or the journal is stopped."""
        files = self._files
        if self.closed or files.stopped is not None or files.high_watermark >= files.end:
            return None
        end = files.end
        return FsyncPlan(self, self._gate, files.active, end)

    def force_done(self, plan: FsyncPlan, error: Exception | None) -> Callable[[], None] | None:
        """Record the end of the fsync of `plan`: advance `forced_offset`, or if there is an `error`, stop the journal.

        Returns a function that rewrites the checkpoint, for the caller to run in a worker; None if that is not due.
        """
        files = self._files
        if error is not None:
            self._stop(f"an fsync failed: {error}")
        if files.stopped is not None or self.closed:
            return None
        files.raise_durable(plan.end)
        if self._clock.monotonic() - self._checkpoint_written_at < REWRITE_SECONDS:
            return None
        return self._rewrite_checkpoint_unsynced

    @property
    def checkpoint_due(self) -> bool:
        """True if a checkpoint should start, after `checkpoint_bytes` or to remove idle files. False while one runs."""
        files = self._files
        if self._checkpoint_running or self.closed or files.stopped is not None:
            return False
        if files.end - self._checkpoint.snapshots[0].lsn >= self.options.checkpoint_bytes:
            return self._clock.monotonic() >= self._retry_after
        return files.idle_count > 0 and self._clock.monotonic() >= self._reclaim_after

    def checkpoint(self) -> Callable[[], None]:
        """Capture the state. Return a function, "the work", that writes a checkpoint of this state in a worker.

        Until the work returns, the owner may append, and add and release references, but not start another checkpoint.
        Must not be called while the work of `before_append` runs. After the work, the caller passes its error or None
        to `checkpoint_done`. The caller guarantees that everything the state reports as applied is durable in the
        partitions. The work raises Full, Stopped; this method raises Stopped, Closed.
        """
        self._writable()
        if self._checkpoint_running:
            raise RuntimeError("a checkpoint of the transaction journal is running")
        lsn, live, state = self._files.end, self._listed_files(), self._state.dump()
        self._checkpoint_running = True
        return lambda: self._write_checkpoint(lsn, live, state)

    def checkpoint_done(self, error: BaseException | None) -> None:
        """Record in the owner's thread that the work of `checkpoint` has ended, with `error` or None."""
        self._checkpoint_running = False
        now = self._clock.monotonic()
        self._reclaim_after = now + RECLAIM_SECONDS
        self._retry_after = now if error is None else now + RETRY_SECONDS

    def close(self) -> None:
        """Fsync, write a last checkpoint and close the files. If the journal is stopped, only the files are closed.

        May run in a worker. The journal is closed even if this raises Stopped or Full. Repeated calls do nothing.
        """
        if self.closed:
            return
        self.closed = True
        files = self._files
        try:
            if files.stopped is None:
                self._fsync_all()
                if files.end > self._checkpoint.snapshots[0].lsn or files.idle_count:
                    self._write_checkpoint(files.end, self._listed_files(), self._state.dump())
                else:
                    try:
                        with self._checkpoint_file_lock:
                            self._checkpoint_file.write_durably(self._current_checkpoint())
                    except OSError as error:
                        raise self._stop(f"the checkpoint cannot be written: {error}") from error
        finally:
            self._close_files()

    def abandon(self, reason: str) -> None:
        """Close the journal without another write or fsync. Repeated calls do nothing."""
        if not self.closed:
            self.closed = True
            self._gate.detached = True
            self._stop(reason)
            self._close_files()

    # File work, which may run in a worker.

    def _stop(self, reason: str) -> Stopped:
        """Stop the journal until the next start, and return the error for the caller to raise."""
        files = self._files
        with files.lock:
            files.stopped = files.stopped or reason
            return Stopped(files.stopped)

    def _roll(self) -> None:
        """Fsync and seal the active file, and create the next file. Raises Stopped, Full (then it can be repeated)."""
        files, checkpoint = self._files, self._checkpoint
        old = files.active

        def seal() -> None:
            old.file.force()
            files.seal()

        try:
            self._gate.fsync(old, seal)
            files.raise_durable(files.end, is_replicated=self._disk.is_replicated)
            head = JournalFileHeader(checkpoint.journal_id, checkpoint.salt, old.number + 1, old.end)
            new = JournalFile.create(self._disk, self._folder, head)
            self._disk.force_folder(self._folder)
        except OSError as error:
            raise self._stop(f"a new file of the transaction journal could not be created: {error}") from error
        files.add(new, is_replicated=self._disk.is_replicated)

    def _fsync_all(self) -> None:
        files = self._files
        if files.stopped is not None:
            raise Stopped(files.stopped)
        # The end is read before the active file. If a roll happens in between, the roll has made this end durable, and
        # the new file is fsynced without need.
        end, active = files.end, files.active
        if files.durable_lsn >= end:
            return
        try:
            self._gate.fsync(active)
        except OSError as error:
            raise self._stop(f"an fsync failed: {error}") from error
        files.raise_durable(end, is_replicated=self._disk.is_replicated)

    def _rewrite_checkpoint_unsynced(self) -> None:
        """Rewrite the durable LSN in the checkpoint without an fsync; if the disk is full, do nothing."""
        # A power loss may undo this rewrite. The durable LSN in the checkpoint is only a lower bound.
        if self._gate.detached:
            return
        try:
            with self._checkpoint_file_lock:
                self._checkpoint_written_at = self._clock.monotonic()
                self._checkpoint_file.write_unsynced(self._current_checkpoint())
        except (Full, Closed):
            return
        except OSError as error:
            self._stop(f"the checkpoint cannot be written: {error}")

    def _listed_files(self) -> tuple[ListedFile, ...]:
        files = self._files
        with files.lock:
            *older, active = files.files
            referenced = [ListedFile(file.number, file.first, file.end) for file in older if file.references]
            return (*referenced, ListedFile(active.number, active.first, files.end))

    def _write_checkpoint(self, lsn: int, files: tuple[ListedFile, ...], state: Callable[[], bytes]) -> None:
        """Write a snapshot of the state before `lsn` and the checkpoint; remove files that none of the snapshots needs.

        Raises Stopped, Full; the previous checkpoint stays valid in that case.
        """
        with self._checkpoint_lock:
            try:
                old = self._checkpoint
                if self._files.durable_lsn < lsn:
                    self._fsync_all()
                number = old.snapshots[0].number + 1
                head = SnapshotHead(old.journal_id, number, lsn, files)
                self._snapshots.write(JournalSnapshot(head, state()))
                if self._files.stopped is not None:
                    raise Stopped(self._files.stopped)
                with self._checkpoint_file_lock:
                    pointers = (SnapshotPointer(number, lsn), *old.snapshots)[:SNAPSHOTS_KEPT]
                    new = self._current_checkpoint()._replace(snapshots=pointers)
                    self._checkpoint_file.write_durably(new)
                    self._checkpoint = new
                self._file_lists = (files, *self._file_lists)[:SNAPSHOTS_KEPT]
                kept = RequiredFiles.from_lists(*self._file_lists)
                for file in self._files.remove_idle(kept.contains):
                    self._disk.unlink(file.path)
                self._snapshots.prune([pointer.number for pointer in self._checkpoint.snapshots])
            except OSError as error:
                raise self._stop(f"a checkpoint could not be written: {error}") from error

    def _current_checkpoint(self) -> JournalCheckpoint:
        files = self._files
        return self._checkpoint._replace(durable_lsn=files.durable_lsn, file_number=files.active.number)

    def _close_files(self) -> None:
        # Files with bytes that are not durable stay open, because closing such a file could hide its write error.
        files = self._files
        files.remove_all(self._gate.keep_unsynced_open(files.files, files.durable_lsn))
