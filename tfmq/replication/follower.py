"""Follows a primary: reads its entries from the store, in order, and applies them to the local folder."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from journal.clock import Clock
from journal.disk import Disk
from tfmq.replication.entries import Entry, EntryKind, Fence, Position, decode_entry, entry_key
from tfmq.replication.errors import InvalidObject, ReplicationError
from tfmq.replication.materialize import apply_entry
from tfmq.replication.operations import OperationApplier
from tfmq.replication.store import Store
from tfmq.replication.task import CallLater, Run

logger = logging.getLogger("tfmq.replication")

PAUSE_SECONDS: Final = 0.01
PAUSE_SECONDS_MAX: Final = 0.25
"""Pause before the next look for an entry, after one was found, and the longest after many that found none."""
AHEAD: Final = 4
"""Maximum entries that are read before they can be applied, while this server is behind."""
AHEAD_BYTES: Final = 16 << 20
"""No further entry is read while this number of bytes waits to be applied."""
SILENCE_SECONDS: Final = 2.0
"""A standby whose store has not answered for this time says that it is behind, by an unknown amount."""
LATE_SECONDS: Final = 5.0
"""A standby that is behind by this is in the log."""


class Poll(NamedTuple):
    """The result of a look for the next entry. `asked`, `answered`: monotonic seconds; `found`: if there was one."""

    asked: float
    answered: float
    found: bool


class Follower:
    """Applies the entries of one term after another. All methods are called in the owner's thread.

    `run` executes store calls and file work in workers. Callbacks, in the owner's thread:

    - `polled(poll)`, after each look for the next entry that the store has answered
    - `ended(position, fence)`, at the FENCE of the term; the owner calls `continue_in` when it knows the next term
    - `rebased(position)`, at a BASE; the owner materializes the folder, and calls `continue_in`
    - `failed(error)`, if an entry cannot be read or applied; nothing more is applied
    """

    def __init__(
        self,
        store: Store,
        disk: Disk,
        folder: str,
        run: Run,
        clock: Clock,
        call_later: CallLater,
        *,
        position: Position,
        time_ms: int,
        polled: Callable[[Poll], None],
        ended: Callable[[Position, Fence], None],
        rebased: Callable[[Position], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._store, self._run, self._clock, self._call_later = store, run, clock, call_later
        self.applier = OperationApplier(disk, folder)
        self._polled, self._ended, self._rebased, self._failed = polled, ended, rebased, failed
        self.position = position
        """The last entry that was applied."""
        self.time_ms = time_ms
        """The time of that entry, by the clock of its primary."""
        self.applied_count = 0
        """How many entries were applied."""
        self._read: dict[int, bytes] = {}
        """Entries that were read and not applied, by slot."""
        self._reading: set[int] = set()
        self._is_applying = False
        self.is_stopped = False
        self._is_paused = False
        self.is_held = False
        """Whether it has come to a FENCE or a BASE, has told its owner, and waits for `continue_in`."""
        self._idle: Callable[[], None] | None = None
        self._pause_seconds = PAUSE_SECONDS
        self.is_behind = False
        """Whether the last look found an entry, so that there may be more."""
        self.trouble = ""
        """Why the last look has failed; "" if it has not."""
        self._answered_at = clock.monotonic()
        """When the last look began that the store has answered, in monotonic seconds."""
        self._is_late = False
        self._life = 0
        """Counts the continuations that were followed, so that results of reads before the last one are ignored."""

    @property
    def behind_seconds(self) -> float:
        """How much older than now the folder is, by the clocks of both servers; 0 if the store has nothing newer."""
        if self.is_behind and self.time_ms:
            return max(0.0, (self._clock.wall_ms() - self.time_ms) / 1000)
        silent = self._clock.monotonic() - self._answered_at
        return silent if silent > SILENCE_SECONDS else 0.0

    def start(self) -> None:
        self._read_from(self.position.slot + 1)

    def stop(self, done: Callable[[], None]) -> None:
        """Apply nothing more. Call `done()` when no work is in progress."""
        self.is_stopped = True
        self.when_idle(done)

    def when_idle(self, callback: Callable[[], None]) -> None:
        """Call `callback()` between two entries, at once if none is being applied. At most one may wait."""
        if self._is_applying:
            self._idle = callback
        else:
            callback()

    def pause(self) -> None:
        """Apply no further entry until `continue_in`."""
        self._is_paused = True

    def close(self) -> None:
        """Fsync what was changed, and close all files, in this thread. To be called when idle and stopped. Raises
        OSError."""
        self.applier.close()

    def continue_in(self, position: Position, time_ms: int) -> None:
        """Follow on after `position`: the BEGIN of the next term, or where the folder was materialized to."""
        self.position, self.time_ms = position, time_ms
        self._life += 1
        self._read.clear()
        self._reading.clear()
        self._pause_seconds, self.is_behind, self._is_paused, self.is_held = PAUSE_SECONDS, True, False, False
        self._read_from(position.slot + 1)

    def _read_from(self, first: int) -> None:
        """Request the entry in slot `first`, and those after it while this server is behind."""
        for slot in range(first, first + (AHEAD if self.is_behind else 1)):
            is_full = len(self._reading) >= AHEAD or sum(map(len, self._read.values())) >= AHEAD_BYTES
            if self.is_stopped or (is_full and slot != self.position.slot + 1):
                return
            if slot not in self._read and slot not in self._reading:
                self._reading.add(slot)
                key = entry_key(self.position._replace(slot=slot))
                self._run(
                    partial(self._store.get, key), partial(self._was_read, self._life, self._clock.monotonic(), slot)
                )

    def _was_read(self, life: int, asked: float, slot: int, data: bytes | None, error: BaseException | None) -> None:
        if self.is_stopped or life != self._life:
            return
        self._reading.discard(slot)
        is_next = slot == self.position.slot + 1
        if isinstance(error, ReplicationError) and not isinstance(error, InvalidObject):
            if is_next and str(error) != self.trouble:
                self.trouble = str(error)
                key = entry_key(self.position._replace(slot=slot))
                logger.error("%s cannot be read, and is looked for again: %s", key, error)
            self._look_later(is_next)
            return
        if error is not None:
            self._fail(error)
            return
        if is_next:
            self._note_answer(asked)
        if data is None:
            if is_next:
                self.is_behind = False
                self._tell_lag()
                self._polled(Poll(asked, self._clock.monotonic(), False))
                self._look_later(is_next)
        else:
            self._read[slot] = data
            if is_next:
                # An entry that was there at the first look is likely to be one of several.
                self.is_behind, self._pause_seconds = self._pause_seconds == PAUSE_SECONDS, PAUSE_SECONDS
                self._polled(Poll(asked, self._clock.monotonic(), True))
                self._apply_next()

    def _note_answer(self, asked: float) -> None:
        self._answered_at = asked
        if self.trouble:
            self.trouble = ""
            logger.info("the store %s works again", self._store.name)

    def _tell_lag(self) -> None:
        """Say in the log that this server has fallen behind, and that it has caught up."""
        seconds = self.behind_seconds
        if seconds >= LATE_SECONDS and not self._is_late:
            self._is_late = True
            logger.warning(
                "this standby is %.0f s behind: it was away, or changes come faster than it applies", seconds
            )
        elif self._is_late and not self.is_behind:
            self._is_late = False
            logger.info("this standby has caught up with the primary")

    def _look_later(self, is_next: bool) -> None:
        # What was read ahead and was not there is read again when it is the next one.
        if is_next and not self.is_stopped:
            self._call_later(self._pause_seconds, partial(self._look, self._life))
            self._pause_seconds = min(PAUSE_SECONDS_MAX, 2 * self._pause_seconds)

    def _look(self, life: int) -> None:
        if life == self._life:
            self._read_from(self.position.slot + 1)

    def _apply_next(self) -> None:
        if self._is_applying or self.is_stopped or self._is_paused:
            return
        position = self.position._replace(slot=self.position.slot + 1)
        data = self._read.pop(position.slot, None)
        if data is None:
            self._read_from(position.slot)
            return
        self._is_applying = True
        self._run(partial(self._apply, data, position), partial(self._applied, len(data)))
        if self.is_behind:
            self._read_from(position.slot + 1)

    def _apply(self, data: bytes, position: Position) -> tuple[Entry, Fence | None]:
        """Decode an entry, and apply its operations. Runs in a worker. Raises InvalidObject, OSError, Full."""
        entry = decode_entry(data, position)
        if entry.kind == EntryKind.OPERATIONS:
            apply_entry(self.applier, entry)
        return entry, Fence.decode(entry) if entry.kind == EntryKind.FENCE else None

    def _applied(self, size: int, result: tuple[Entry, Fence | None] | None, error: BaseException | None) -> None:
        self._is_applying = False
        entry, fence = result or (None, None)
        if entry is None:
            self._fail(error or InvalidObject("an entry was not applied"))
        elif fence is not None:
            self._is_paused = self.is_held = True
            self._ended(entry.position, fence)
        elif entry.kind == EntryKind.BEGIN:
            self._fail(InvalidObject(f"{entry_key(entry.position)} begins a term in the middle of one"))
        elif entry.kind == EntryKind.BASE:
            # The folder is that of the entry before, until the owner has made it again.
            self._is_paused = self.is_held = True
            self._rebased(entry.position)
        else:
            self.position, self.time_ms = entry.position, entry.time_ms
            self.applied_count += 1
            self._tell_lag()
        idle, self._idle = self._idle, None
        if idle is not None:
            idle()
        self._apply_next()

    def _fail(self, error: BaseException) -> None:
        self.is_stopped = True
        idle, self._idle = self._idle, None
        self._failed(error)
        if idle is not None:
            idle()
