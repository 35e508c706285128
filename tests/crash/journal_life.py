"""Seeded lives of a transaction journal on a simulated disk, and at each boundary what is known then.

A boundary is the moment after a call that changed something on the disk: the power may go there. It keeps the disk as
it was and what the journal's user knew: what must still be there, and what may be there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from journal.errors import Corrupt, Full
from journal.testing import Moment, crash_states
from journal.wal.entry import COMMIT, HEADER_SIZE, MESSAGES, PREPARE, AppendMsg, Operation
from journal.wal.file import FILE_HEADER_SIZE
from journal.wal.store import JournalOptions
from tests.journal.journals import Journal, Seen, message

EPOCHS = 5
"""So many transactions are distinguished; settled ones begin again."""
STATES_TO_GO_ON_FROM = 8


class Known(NamedTuple):
    """`forced` rows must be there, in this order; after them may come those of `written`, and then those of `pending`:
    (kind, epoch, bytes) of an append that has not been answered. `number`, `end`: the highest file and place of which
    the user knew that they are on the disk."""

    forced: int
    written: tuple[Seen, ...]
    pending: tuple[tuple[int, int, bytes], ...]
    number: int
    end: int
    journal_id: int


class Boundary(NamedTuple):
    number: int
    after: str
    moment: Moment
    known: Known


def content_row(content: AppendMsg | Operation) -> tuple[int, int, bytes]:
    if isinstance(content, AppendMsg):
        return 0, content.epoch, bytes(content.data)
    return content.kind, content.epoch, content.payload


class Life:
    """Runs seeded actions; `boundaries` collects the moments between them and inside them."""

    def __init__(self, generator: random.Random) -> None:
        self.generator = generator
        one = HEADER_SIZE + MESSAGES.size + 12 + 60
        options = JournalOptions(
            file_bytes=FILE_HEADER_SIZE + generator.choice((3, 6, 12)) * one,
            checkpoint_bytes=generator.choice((5, 12)) * one,
            flush_bytes=generator.choice((2, 20)) * one,
        )
        self.boundaries: list[Boundary] = []
        self.reported = "the first opening"
        self.forced_end = self.number = self.sequence = 0
        self.pending: tuple[tuple[int, int, bytes], ...] = ()
        self.journal = Journal(options=options)
        self.journal.open()
        self.journal_id = self.journal.store.journal_id
        self.journal.disk.after = self._boundary

    def run(self, actions: int) -> list[Boundary]:
        """Lives through so many actions."""
        table: list[tuple[int, Callable[[], None]]] = [
            (30, self.append), (10, self.force), (8, self.force_with_appends_between), (6, self.settle),
            (6, self.checkpoint), (5, self.checkpoint_with_appends_between), (4, self.roll_elsewhere), (4, self.move),
            (4, self.wait), (3, self.close_and_open), (3, self.kill), (4, self.power_cut), (4, self.full_disk),
        ]  # fmt: skip
        weights = [weight for weight, _ in table]
        for _ in range(actions):
            action = self.generator.choices(table, weights)[0][1]
            self.reported = action.__name__
            action()
        self.journal.disk.after = None
        return self.boundaries

    # What may happen.

    def append(self) -> None:
        """One to four entries in one append."""
        self._append([self._content() for _ in range(self.generator.randint(1, 4))])

    def force(self) -> None:
        self.journal.store.force()

    def force_with_appends_between(self) -> None:
        """A force in a worker: the owner appends while the system does it."""
        store = self.journal.store
        plan = store.force_plan()
        if plan is None:
            return
        for _ in range(self.generator.randint(0, 2)):
            self.append()
        plan.gate.fsync(plan.file)
        if self.generator.random() < 0.5:
            self.append()
        work = store.force_done(plan, None)
        if work is not None:
            work()

    def settle(self) -> None:
        """A transaction is over; what a power cut must not take of it is forced first, as the caller does."""
        self.journal.store.force()
        live = list(self.journal.state.live())
        if live:
            epoch = self.generator.choice(live)
            self.pending = ((8, epoch, b""),)
            self.journal.settle(epoch)
            self.pending = ()
            self.journal.store.force()

    def checkpoint(self) -> None:
        self.journal.checkpoint()

    def checkpoint_with_appends_between(self) -> None:
        """A checkpoint in a worker: the owner goes on between its capture and its end."""
        store = self.journal.store
        work = store.checkpoint()
        for _ in range(self.generator.randint(1, 4)):
            self.generator.choice((self.append, self.force, self.settle))()
        work()
        store.checkpoint_done(None)

    def roll_elsewhere(self) -> None:
        """A roll in a worker, with a force that was planned before it."""
        plan = self.journal.store.force_plan()
        work = self.journal.store.before_append(self.journal.options.file_bytes)
        if work is not None:
            work()
        if plan is not None:
            plan.gate.fsync(plan.file)
            self.journal.store.force_done(plan, None)

    def move(self) -> None:
        """The pieces of a transaction are carried forward, so that an old file may go."""
        live = self.journal.state.live()
        if not live:
            return
        epoch = self.generator.choice(list(live))
        old = live[epoch]
        copies = []
        for place in old:
            content = self.journal.store.read(place).content
            assert isinstance(content, AppendMsg)
            copies.append(content._replace(data=bytes(content.data), moved_from=place))
        self._append([Operation(8, epoch), *copies])
        self.journal.store.force()
        for place in old:
            self.journal.store.release_reference(place)

    def wait(self) -> None:
        self.journal.clock.advance(self.generator.choice((0.1, 1.5, 20)))

    def close_and_open(self) -> None:
        self.journal.store.close()
        self._open()

    def kill(self) -> None:
        """The process ends; what it wrote is still in the system's memory."""
        self._open()

    def power_cut(self) -> None:
        """The power goes, and life goes on with what is left."""
        disk = self.journal.disk
        disk.after = None
        self.journal.disk = self.generator.choice(list(crash_states(disk, STATES_TO_GO_ON_FROM, self.generator)))
        self.journal.disk.after = self._boundary
        self._open()

    def full_disk(self) -> None:
        """Space for a part of what comes next, then space again."""
        self.journal.disk.space_bytes = self.journal.disk.used_bytes() + self.generator.randint(0, 300)
        try:
            self.generator.choice((self.append, self.append, self.checkpoint_that_may_fail))()
        finally:
            self.journal.disk.space_bytes = None

    def checkpoint_that_may_fail(self) -> None:
        work = self.journal.store.checkpoint()
        try:
            work()
        except Full as error:
            self.journal.store.checkpoint_done(error)
        else:
            self.journal.store.checkpoint_done(None)

    # Helpers.

    def _content(self) -> AppendMsg | Operation:
        epoch = self.generator.randint(1, EPOCHS)
        self.sequence += 1
        if self.generator.random() < 0.3:
            return Operation(self.generator.choice((PREPARE, COMMIT)), epoch, b"%d" % self.sequence)
        return message(epoch, self.sequence, self.generator.randint(20, 150))

    def _append(self, contents: list[AppendMsg | Operation]) -> None:
        self.pending = tuple(content_row(content) for content in contents)
        try:
            self.journal.append(*contents)
        except Full:
            pass
        finally:
            self.pending = ()

    def _open(self) -> None:
        written = list(self.journal.state.seen)
        journal = self.journal
        try:
            journal.open()
        except Corrupt as error:
            raise AssertionError(f"{self.reported}: a crash was taken for damage: {error}") from error
        assert journal.state.seen == written[: len(journal.state.seen)], self.reported
        self.forced_end = journal.store.end_offset

    def _known(self) -> Known:
        journal = self.journal
        store = journal.store
        if not store.closed:
            self.forced_end = max(self.forced_end, store.forced_offset)
            last = store._files.active
            if store.forced_offset >= last.first + FILE_HEADER_SIZE:
                self.number = max(self.number, last.number)
        written = tuple(journal.state.seen)
        forced = sum(1 for row in written if row[0] < self.forced_end)
        return Known(forced, written, self.pending, self.number, self.forced_end, self.journal_id)

    def _boundary(self, kind: str, path: str) -> None:
        after = f"{self.reported}: {kind} {path}"
        moment = Moment(self.journal.disk)
        self.boundaries.append(Boundary(len(self.boundaries), after, moment, self._known()))
