"""Queue of entries for the transaction journal, and of callbacks that wait for their fsync."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from journal.errors import Stopped
from journal.record.batch import Batch
from journal.wal import entry as entries
from journal.wal.entry import BLOCK, HEADER_SIZE, MESSAGES, OPERATION, AppendMsg
from journal.wal.store import JournalStore
from tfmq.transaction import journal_records
from tfmq.transaction.model import Piece, Transaction
from tfmq.transaction.transaction_table import Ledger

APPEND_BYTES: Final = 8 << 20
"""Limit of one append, so that the owner's thread is not blocked; one item may exceed it."""

CACHED_BYTES: Final = 64 << 10
"""Up to this size, transactions sent in one request stay in memory until they are applied."""
CACHED_BYTES_MAX: Final = 32 << 20
"""Total of all transactions kept in memory; others are read from the journal again."""

Written: TypeAlias = Callable[[int, BaseException | None], None]
"""written(lsn, None) once an entry is in the journal and applied, not fsynced.

Written(0, error) on failure. After an error nothing has changed. Nothing was written either, unless it is
an UncertainWrite. Errors: journal.errors.Full (retry when there is space), Stopped, other journal errors,
OSError.
"""

Waiter: TypeAlias = Callable[[BaseException | None], None]
"""waiter(None) when the requested data is durable.

Waiter(error) if it cannot become durable.
"""
Run: TypeAlias = Callable[[Callable[[], Any], Callable[[Any, BaseException | None], None]], None]
"""run(work, done): `work()` runs in a worker, `done(result, error)` in the owner's thread."""
Force: TypeAlias = Callable[[JournalStore, int, Waiter], None]
"""force(journal, end, waiter): request an fsync of the journal up to LSN `end`."""


class MaybeWritten(Stopped):
    """The disk failed during an append, so the entries may or may not be in the journal.

    Recovery accepts every entry that it finds complete; until then the outcome is unknown.
    """


class Item:
    """Messages of one transaction and an operation that follows them; either may be absent."""

    __slots__ = (
        "contents",
        "count",
        "messages",
        "operation",
        "refused",
        "size_bytes",
        "transaction",
        "written",
    )

    def __init__(
        self,
        transaction: Transaction | None,
        messages: list[AppendMsg],
        operation: journal_records.Operation | None,
        written: Written,
        refused: Callable[[], None] | None = None,
    ) -> None:
        self.transaction = transaction
        self.messages = messages
        self.operation = operation
        self.written = written
        self.refused = refused
        """Reverts the changes made when the item was queued; called if the write fails."""
        contents: list[entries.Content] = list(messages)
        size = count = 0
        for message in messages:
            count += message.count
            size += HEADER_SIZE + MESSAGES.size + BLOCK.size * len(message.blocks) + len(message.data)
        if operation is not None:
            packed = entries.Operation(*journal_records.pack(operation))
            contents.append(packed)
            size += HEADER_SIZE + OPERATION.size + len(packed.payload)
        self.contents = contents
        self.count = count
        self.size_bytes = size

    def own(self) -> None:
        """Copy message data that the item does not own."""
        for number, message in enumerate(self.messages):
            if not isinstance(message.data, bytes):
                own = message._replace(data=bytes(message.data))
                self.messages[number] = self.contents[number] = own


class JournalQueue:
    """Writes queued items to the transaction journal. Used by one thread only.

    All items queued during a turn are one append, in order; each is in the journal completely or not at
    all. After the append the entries are applied to the table, then the `written` callbacks are called.
    While a worker starts a new journal file, items wait and own their data.

    If an append fails, everything queued fails with it: later items may have been accepted only because of
    the earlier ones.
    """

    def __init__(self, journal: JournalStore, table: Ledger, *, force: Force, run: Run) -> None:
        self._journal = journal
        self._ledger = table
        self._force = force
        self._run = run
        self._queue: deque[Item] = deque()
        self._waiting: list[Waiter] = []
        self._wanted = 0
        self._flushing = False
        self.working = False
        """Whether a worker is starting a new journal file."""
        self.cached_bytes = 0

    # Queue

    def put(
        self,
        operation: journal_records.Operation | None,
        written: Written,
        *,
        transaction: Transaction | None = None,
        pieces: Sequence[Piece] = (),
        refused: Callable[[], None] | None = None,
    ) -> None:
        """Queue messages of `transaction` and an operation; the arguments are as in `WriteRequest`."""
        messages: list[AppendMsg] = []
        if transaction is not None and pieces:
            epoch = transaction.epoch
            stage = self._ledger.streams.stage
            for log_id, _, producer_id, sequence, count, blocks, data in pieces:
                messages.append(AppendMsg(epoch, log_id, producer_id, sequence, count, blocks, data))
                transaction.queued += count
                stage(producer_id, epoch, sequence, count)
        self.add(Item(transaction, messages, operation, written, refused))

    def add(self, item: Item) -> None:
        """Queue an item."""
        if self.working:
            item.own()
        self._queue.append(item)

    @property
    def due(self) -> bool:
        """Whether `write` has something to do now."""
        return bool(self._waiting) or (bool(self._queue) and not self.working)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, being written or waiting for an fsync."""
        return not self._queue and not self.working and not self._waiting

    # Writing

    def write(self) -> bool:
        """Write queued items and request the fsyncs that callbacks wait for.

        False if there was no work.
        """
        if not self.due:
            return False
        while self._queue and not self.working:
            items = self._gather()
            try:
                work = self._journal.before_append(sum(item.size_bytes for item in items))
            except Exception as error:
                self._refuse(items, error)
                continue
            if work is None:
                self._append(items)
            else:
                self._roll(work, items)
        self._ask()
        self._forget_ended()
        return True

    def _gather(self) -> list[Item]:
        """Remove and return the first items that fit one append; at least one."""
        items = [self._queue.popleft()]
        size = items[0].size_bytes
        while self._queue and size + self._queue[0].size_bytes <= APPEND_BYTES:
            items.append(self._queue.popleft())
            size += items[-1].size_bytes
        return items

    def _roll(self, work: Callable[[], None], items: list[Item]) -> None:
        self.working = True
        for item in (*items, *self._queue):
            item.own()
        self._run(work, partial(self._rolled, items))

    def _rolled(self, items: list[Item], result: Any, error: BaseException | None) -> None:
        self.working = False
        if error is not None:
            self._refuse(items, error)
        else:
            assert self._ledger.holds is not None
            self._ledger.holds.rolled()
            self._append(items)
        self.write()

    def _append(self, items: list[Item]) -> None:
        contents = [content for item in items for content in item.contents]
        stopped = self._journal.stopped
        try:
            places = self._journal.append(contents)
        except Exception as error:
            if isinstance(error, Stopped) and stopped is None:
                self._refuse(items, MaybeWritten(error.reason))
            else:
                self._refuse(items, error)
            return
        last = self._fold(items, places)
        for item, lsn in zip(items, last, strict=True):
            item.written(lsn, None)

    def _fold(self, items: list[Item], places: list[int]) -> list[int]:
        """Apply every entry to the table, in order; return the LSN of each item's last entry."""
        table = self._ledger
        at = 0
        last = []
        for item in items:
            for message in item.messages:
                table.message(places[at], message)
                at += 1
            if item.transaction is not None:
                item.transaction.queued -= item.count
            if item.operation is not None:
                if item.messages:
                    self._cache(item)
                table.enter(places[at], item.operation)
                at += 1
            last.append(places[at - 1])
        return last

    def _refuse(self, items: list[Item], error: BaseException) -> None:
        """Fail `items` and everything queued after them."""
        # Only `items` may be partly written; later ones certainly are not.
        behind = Stopped(error.reason) if isinstance(error, MaybeWritten) else error
        count = len(items)
        refused = [*items, *self._queue]
        self._queue.clear()
        self._ledger.streams.unstage()
        for item in refused:
            if item.transaction is not None:
                item.transaction.queued -= item.count
            if item.refused is not None:
                item.refused()
        for number, item in enumerate(refused):
            item.written(0, error if number < count else behind)

    def _cache(self, item: Item) -> None:
        """Keep a small transaction that was sent in one request in memory until it is applied."""
        transaction = item.transaction
        if (
            transaction is not None
            and transaction.size_bytes <= CACHED_BYTES
            and transaction.locations.rows == len(item.messages)
            and self.cached_bytes + transaction.size_bytes <= CACHED_BYTES_MAX
        ):
            self.cached_bytes += transaction.size_bytes
            transaction.cached = [
                Batch(bytes(data), blocks, producer_id, sequence, count)
                for _, _, producer_id, sequence, count, blocks, data, _ in item.messages
            ]

    def uncache(self, transaction: Transaction) -> None:
        """Free the cached batches of an applied transaction."""
        if transaction.cached is not None:
            transaction.cached = None
            self.cached_bytes -= transaction.size_bytes

    # Fsync

    def when_forced(self, lsn: int, waiter: Waiter) -> None:
        """Call `waiter(None)` once the entry at `lsn` is durable.

        Calls `waiter(error)` if the journal stops first.
        """
        if lsn < self._journal.forced_offset:
            waiter(None)
        else:
            self._waiting.append(waiter)
            self._wanted = max(self._wanted, lsn + 1)

    def _ask(self) -> None:
        """Request one fsync for all callbacks added in this turn."""
        if self._journal.flush_due and not self._flushing:
            self._flushing = True
            self.when_forced(self._journal.end_offset - 1, self._flushed)
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            wanted, self._wanted = self._wanted, 0
            self._force(self._journal, wanted, partial(_tell, waiting))

    def _forget_ended(self) -> None:
        """Remove rolled back transactions whose record is durable by now."""
        ending, forced = self._ledger.ending, self._journal.forced_offset
        while ending and (first := next(iter(ending.values()))).place < forced:
            del ending[first.epoch]

    def _flushed(self, error: BaseException | None) -> None:
        self._flushing = False


def _tell(waiting: list[Waiter], error: BaseException | None) -> None:
    for waiter in waiting:
        waiter(error)
