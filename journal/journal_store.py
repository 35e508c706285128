"""The transaction journal: entries in numbered files as one space of places, appended at the end, read anywhere.

It guarantees: an append is written as a whole or refused; nothing that was forced is ever given up by itself; a file
goes only when nobody holds anything in it and two checkpoints lie behind it; after a failed force it takes no writes.

Threads: the *owner* (one thread, the reactor's) calls everything, except where a method says that it may run in a
worker or beside the owner.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from journal.clock import Clock
from journal.disk import Disk
from journal.entry import AppendMsg, Entry, Operation


@dataclass(frozen=True)
class JournalOptions:
    """`file_bytes`: a file is followed by the next before it would pass this (one larger append stands alone).

    `checkpoint_bytes`: a checkpoint is due after so many; a start replays about as much. `flush_bytes`: so many
    unforced bytes make a force due that nobody waits for.
    """

    file_bytes: int = 64 << 20
    checkpoint_bytes: int = 64 << 20
    flush_bytes: int = 16 << 20


class JournalState(Protocol):
    """Memory that is rebuilt from the journal.

    At open, `load` comes once, then `apply` for each entry behind what was loaded, in order, then `held`.
    """

    def load(self, data: bytes) -> None:
        """Starts from what `dump` gave; b"" is the state of an empty journal. Raises ValueError if it is no dump."""
        ...

    def apply(self, entry: Entry) -> None:
        """One entry; views in it are valid only during the call. Raises ValueError if it makes no sense."""
        ...

    def dump(self) -> Callable[[], bytes]:
        """Captures the state as all entries appended so far left it; in the owner's thread. What it answers packs it,
        in a worker maybe, once."""
        ...

    def held(self) -> Iterable[int]:
        """The places that are still needed, once for each hold."""
        ...


class JournalFileInfo(NamedTuple):
    """A file: its number, the place of its first byte, its size in bytes, and how many holds keep it."""

    number: int
    first: int
    size: int
    holds: int


class JournalStore:
    """See the module. Made by `JournalStore.open`. It is a `journal.force.Forceable`: a Forcer serves it."""

    journal_id: int
    """Made once, with the journal; names it as a source in the partitions."""

    @classmethod
    def open(
        cls,
        disk: Disk,
        folder: str,
        *,
        new_id: Callable[[], int],
        clock: Clock,
        state: JournalState,
        options: JournalOptions = JournalOptions(),
        randomness: Callable[[int], bytes] = os.urandom,
    ) -> JournalStore:
        """Opens the journal in `folder`, or makes one (`new_id` is called only then); after recovery.

        Everything up to `end_offset` is forced then. Raises Corrupt (nothing was changed), NewerFormat, Stopped, Full,
        OSError. May run in a worker.
        """
        raise NotImplementedError

    @property
    def end_offset(self) -> int:
        """The place where the next entry goes: everything before is written. (Forcers call it so.)"""
        raise NotImplementedError

    @property
    def forced_offset(self) -> int:
        """The place up to which everything is on the disk."""
        raise NotImplementedError

    @property
    def stopped(self) -> str | None:
        """Why the journal takes no writes; None if it does."""
        raise NotImplementedError

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        raise NotImplementedError

    @property
    def files(self) -> list[JournalFileInfo]:
        """The files, by rising numbers; the last one is written."""
        raise NotImplementedError

    def before_append(self, size: int) -> Callable[[], None] | None:
        """File work that must be done before an append of `size` bytes (the sum of `entry_size`); None: append at once.

        The work (a roll to the next file) may run in a worker: until it ends no append may come, and no checkpoint may
        begin; reads, holds and releases may come. It raises Stopped, Full. `append` does it inline if the caller did
        not. Raises Stopped, Closed.
        """
        raise NotImplementedError

    def append(self, entries: Sequence[AppendMsg | Operation]) -> list[int]:
        """Appends all of them in one write; the place of each. They are on the disk once forced up to `end_offset`.

        Raises TooLarge, Full (nothing was appended; go on when there is space), Stopped, Closed. A crash in the middle
        may leave the first few of them.
        """
        raise NotImplementedError

    def read(self, place: int, size: int = 0) -> Entry:
        """The entry at `place`, verified; `size`, if it is known, saves a read. Any thread.

        Raises Corrupt, OSError, Closed.
        """
        raise NotImplementedError

    def read_cached(self, place: int, size: int = 0) -> Entry | None:
        """As `read`, or None if that would have to wait for the disk. Any thread."""
        raise NotImplementedError

    def hold(self, place: int) -> None:
        """The file of the entry at `place` must stay until `release`; holds are counted. Raises KeyError."""
        raise NotImplementedError

    def release(self, place: int) -> None:
        """Takes one `hold` back. Raises KeyError."""
        raise NotImplementedError

    @property
    def flush_due(self) -> bool:
        """True if so much is unforced that a force should begin although nobody waits for one."""
        raise NotImplementedError

    @property
    def checkpoint_due(self) -> bool:
        """True if a checkpoint should begin; never while one is under way."""
        raise NotImplementedError

    def checkpoint(self) -> Callable[[], None]:
        """Captures the state; answers the work that makes a checkpoint of it, for a worker.

        Between the call and the work's end the owner may append, hold and release, but not begin another one. Then
        comes `checkpointed` with how the work ended. The caller guarantees that what the state calls applied is forced
        in the partitions. The work raises Full, Stopped. Raises Stopped, Closed.
        """
        raise NotImplementedError

    def checkpointed(self, error: Exception | None) -> None:
        """The end of the work of a `checkpoint`, in the owner's thread."""
        raise NotImplementedError

    def force(self) -> None:
        """Forces inline. Raises Stopped, Closed."""
        raise NotImplementedError

    def close(self) -> None:
        """Forces, makes a last checkpoint, closes; a stopped journal is only closed. Twice is harmless.

        Raises Stopped if the force fails, Full if the disk is full: closed all the same. May run in a worker.
        """
        raise NotImplementedError

    def abandon(self, reason: str) -> None:
        """Lets go without writing or forcing anything more. Twice is harmless."""
        raise NotImplementedError
