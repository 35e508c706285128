"""What of the transaction journal is durable, and in which order: its entries, its checkpoints, the roll, its stop.

Everything here but `write` does file work and may run in a worker. The journal's files are forced through one
`journal.gate.Gate`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from journal.clock import Clock
from journal.disk import Bytes, Disk
from journal.errors import Closed, Full, Stopped
from journal.gate import Gate
from journal.journal_checkpoint import KEPT, REWRITE_SECONDS, Checkpoint, Pointer
from journal.journal_file import Head, JournalFile
from journal.journal_opening import JournalOpening
from journal.journal_recovery import Kept
from journal.journal_snapshot import JournalSnapshot, LiveFile, SnapshotHead


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
