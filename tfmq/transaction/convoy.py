"""A large part of one transaction on its way into one partition: read slice by slice in a worker, and paced.

What it writes has to be forced some day, and whoever else waits for a force meanwhile waits for those bytes,
too: so only a window of bytes may be written and not forced, of all convoys together. Up to CONTIGUOUS_BYTES
nothing else comes between; a larger part lets others in after each slice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from journal.errors import Closed, Corrupt
from tfmq.apply_target import Applied, Destination, Mark
from tfmq.errors import NOT_DONE, StorageStopped
from tfmq.transaction.settling import Part
from tfmq.transaction.transaction import Slice

if TYPE_CHECKING:
    from tfmq.transaction.applying import Applier
    from tfmq.transaction.line import Line

CONTIGUOUS_BYTES: Final = 64 << 20
"""A part up to this lies in one piece in its partition."""
WINDOW_BYTES: Final = 512 << 10
"""Written and not forced: whoever waits for a force meanwhile waits for these, too. Beside 2 GB a neighbour's send took
4.6 ms (p99 9.3) with 8 MiB, 1.6 ms (3.3) with this and slices of 256 KiB, and the 2 GB 6 % longer (measured)."""
CONVOYS_MAX: Final = 4
"""At the same time: each holds a slice in memory and takes a reader."""


class Unreadable(Exception):
    """Messages of a decided transaction cannot be read from the journal."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(
            f"the transaction journal is damaged: {error}. Stop the broker, mend it with `tfmq log repair`, which says"
            " what is lost, and start the broker again"
        )


class Pace:
    """The window that all convoys share, and how many may go at the same time."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._unforced = 0
        self._running = 0
        self._entering: deque[Callable[[], None]] = deque()
        self._writing: deque[tuple[int, Callable[[], None]]] = deque()

    def enter(self, go: Callable[[], None]) -> None:
        """`go()` when a convoy more may start."""
        if self._running < CONVOYS_MAX:
            self._running += 1
            go()
        else:
            self._entering.append(go)

    def leave(self) -> None:
        """A convoy ended."""
        if self._entering:
            self._entering.popleft()()
        else:
            self._running -= 1

    def take(self, size_bytes: int, go: Callable[[], None]) -> None:
        """`go()` when so many bytes fit into the window; one larger than it goes alone."""
        if not self._writing and self._fits(size_bytes):
            self._unforced += size_bytes
            go()
        else:
            self._writing.append((size_bytes, go))

    def written(self, mark: Mark, size_bytes: int) -> None:
        """They are written: the force that frees their room is asked for."""
        self._destination.when_forced(mark, partial(self._give, size_bytes))

    def not_written(self, size_bytes: int) -> None:
        """Their room is free again."""
        self._give(size_bytes, None)

    def _give(self, size_bytes: int, error: BaseException | None) -> None:
        """A target whose force failed has stopped: nothing more comes of these bytes."""
        self._unforced -= size_bytes
        while self._writing and self._fits(self._writing[0][0]):
            size, go = self._writing.popleft()
            self._unforced += size
            go()

    def _fits(self, size_bytes: int) -> bool:
        return not self._unforced or self._unforced + size_bytes <= WINDOW_BYTES


class Convoy:
    """See the module. `done` is called once, as for one effect."""

    def __init__(self, line: Line, applier: Applier, part: Part, after: int, done: Applied) -> None:
        self._line, self._applier, self._part, self._done = line, applier, part, done
        self._after = after
        self._slices: Iterator[Slice] = iter(())
        self._holds = part.target.size_bytes <= CONTIGUOUS_BYTES
        self._mark: Mark | None = None
        self._recalled: StorageStopped | None = None

    def start(self) -> None:
        self._applier.pace.enter(self._begin)

    def recall(self) -> None:
        """Its target stopped and came back: what it had brought may be gone, and the highest place wins, so not one
        slice more goes there. It ends as refused, and its line asks the target how far it is."""
        self._recalled = StorageStopped(reason="it was resumed meanwhile", outcome=NOT_DONE)

    def _begin(self) -> None:
        self._slices = self._applier.store.slices(
            self._part.course.decision, self._line.key, self._after, self._line.slice_bytes
        )
        if self._holds:
            self._applier.destination.hold(self._line.key, self._applier.source)
        self._read()

    def _read(self) -> None:
        self._applier.run(lambda: next(self._slices, None), self._have)

    def _have(self, found: Slice | None, error: BaseException | None) -> None:
        if isinstance(error, Corrupt | OSError):
            error = Unreadable(error)
        if error is not None or self._recalled is not None:
            self._end(None, self._recalled or error)
        elif found is None:
            self._end_of_slices()
        else:
            self._applier.pace.take(found.size_bytes, partial(self._write, found))

    def _write(self, found: Slice) -> None:
        if self._recalled is not None:
            self._written(found, None, self._recalled)
            return
        effect = self._line.effect(self._part, found.batches, found.last)
        self._applier.destination.apply(effect, partial(self._written, found))

    def _written(self, found: Slice, mark: Mark | None, error: BaseException | None) -> None:
        if mark is None:
            self._applier.pace.not_written(found.size_bytes)
            self._end(None, error)
            return
        self._applier.pace.written(mark, found.size_bytes)
        for number, count in found.lost:
            self._part.course.losses[self._line.key, number] = count
        if mark.delayed:
            self._applier.note_delayed(mark, [(self._part.course, found.pieces, mark.delayed)])
        self._mark = mark
        if self._recalled is not None:
            self._end(None, self._recalled)
        elif found.last >= self._part.target.last:
            self._end(mark, None)
        elif self._applier.stopping:
            self._end(None, Closed())
        else:
            self._read()

    def _end_of_slices(self) -> None:
        """Without the last message something is amiss in the journal; nothing that is not there is called written."""
        self._end(None, RuntimeError("the journal has fewer messages of a transaction than were counted"))

    def _end(self, mark: Mark | None, error: BaseException | None) -> None:
        if self._holds:
            self._applier.destination.unhold(self._line.key)
        self._applier.pace.leave()
        self._done(None if mark is None else mark._replace(offsets=(), delayed=()), error)
