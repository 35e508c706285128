"""What waits to be written to the transaction journal, and for its force.

Entries queued during a turn are one append, in the order in which they came; each item is in the journal as a whole or
not at all. Then they are folded, and then whoever waits is told. While the journal begins a new file, in a worker,
the queue waits and owns its bytes.

If an append is refused, everything queued is refused with it: what came behind may have been accepted only because of
what was to be written before it.
"""

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
"""One append takes no more, unless one item alone is larger: it does not keep the broker from everything else."""

CACHED_BYTES: Final = 64 << 10
"""Messages of a transaction that came whole, and is not larger, stay in memory until they are in their partitions."""
CACHED_BYTES_MAX: Final = 32 << 20
"""Of all such transactions together; the others are read from the journal again."""

Written: TypeAlias = Callable[[int, BaseException | None], None]
"""written(place, None) once an entry is in the journal at `place` and folded, not forced yet; written(0, error) if
nothing has changed. Nothing was written then, unless it is a MaybeWritten. Errors: journal.errors.Full (go on when
there is space), Stopped, others of the journal, OSError."""

Waiter: TypeAlias = Callable[[BaseException | None], None]
Run: TypeAlias = Callable[[Callable[[], Any], Callable[[Any, BaseException | None], None]], None]
Force: TypeAlias = Callable[[JournalStore, int, Waiter], None]


class MaybeWritten(Stopped):
    """The disk failed in the middle of the append: a start takes every entry that it finds whole, so nobody knows
    before whether this one is among them."""


class Item:
    """Messages of one transaction and an operation behind them, either of which may be missing."""

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
        """Takes back what was changed when it was queued."""
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
        """Takes a copy of bytes that are not its own."""
        for number, message in enumerate(self.messages):
            if not isinstance(message.data, bytes):
                own = message._replace(data=bytes(message.data))
                self.messages[number] = self.contents[number] = own


class JournalQueue:
    """See the module. One owner's thread."""

    def __init__(self, journal: JournalStore, ledger: Ledger, *, force: Force, run: Run) -> None:
        self._journal = journal
        self._ledger = ledger
        self._force = force
        self._run = run
        self._queue: deque[Item] = deque()
        self._waiting: list[Waiter] = []
        self._wanted = 0
        self._flushing = False
        self.working = False
        """The journal begins a new file in a worker."""
        self.cached_bytes = 0

    # What is queued

    def put(
        self,
        operation: journal_records.Operation | None,
        written: Written,
        *,
        transaction: Transaction | None = None,
        pieces: Sequence[Piece] = (),
        refused: Callable[[], None] | None = None,
    ) -> None:
        """Queues messages of `transaction` and an operation; see `Item`."""
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
        if self.working:
            item.own()
        self._queue.append(item)

    @property
    def due(self) -> bool:
        """Whether `write` has something to do now."""
        return bool(self._waiting) or (bool(self._queue) and not self.working)

    @property
    def idle(self) -> bool:
        return not self._queue and not self.working and not self._waiting

    # Writing

    def write(self) -> bool:
        """Writes what is queued, asks for the forces that are waited for; whether there was anything to do."""
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
        """The first of the queue that fit one append; at least one."""
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
        for item, place in zip(items, last, strict=True):
            item.written(place, None)

    def _fold(self, items: list[Item], places: list[int]) -> list[int]:
        """Every entry in order; the place of the last one of each item."""
        ledger = self._ledger
        at = 0
        last = []
        for item in items:
            for message in item.messages:
                ledger.message(places[at], message)
                at += 1
            if item.transaction is not None:
                item.transaction.queued -= item.count
            if item.operation is not None:
                if item.messages:
                    self._cache(item)
                ledger.enter(places[at], item.operation)
                at += 1
            last.append(places[at - 1])
        return last

    def _refuse(self, items: list[Item], error: BaseException) -> None:
        """Nothing of them, and of what came behind, is going to be written; of these, nothing was for sure."""
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
        """A small transaction that came whole goes to its partitions in a moment: it need not be read again."""
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
        """Its messages are in their partitions."""
        if transaction.cached is not None:
            transaction.cached = None
            self.cached_bytes -= transaction.size_bytes

    # Forcing

    def when_forced(self, place: int, waiter: Waiter) -> None:
        """`waiter(None)` once the entry at `place` is on the disk, `waiter(error)` if the journal stops before."""
        if place < self._journal.forced_offset:
            waiter(None)
        else:
            self._waiting.append(waiter)
            self._wanted = max(self._wanted, place + 1)

    def _ask(self) -> None:
        """One force for all who began to wait in this turn."""
        if self._journal.flush_due and not self._flushing:
            self._flushing = True
            self.when_forced(self._journal.end_offset - 1, self._flushed)
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            wanted, self._wanted = self._wanted, 0
            self._force(self._journal, wanted, partial(_tell, waiting))

    def _forget_ended(self) -> None:
        """Those whose end is on the disk by now."""
        ending, forced = self._ledger.ending, self._journal.forced_offset
        while ending and (first := next(iter(ending.values()))).place < forced:
            del ending[first.epoch]

    def _flushed(self, error: BaseException | None) -> None:
        self._flushing = False


def _tell(waiting: list[Waiter], error: BaseException | None) -> None:
    for waiter in waiting:
        waiter(error)
