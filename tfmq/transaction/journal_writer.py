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
from tfmq.apply_target import DurableCallback, RunInWorker
from tfmq.transaction import journal_records
from tfmq.transaction.model import IncomingBatch, Transaction
from tfmq.transaction.transaction_table import TransactionTable

APPEND_BYTES: Final = 8 << 20
"""Limit of one append, so that the broker's thread is not blocked; a single item may exceed it."""

CACHED_TRANSACTION_BYTES: Final = 64 << 10
"""Up to this size, transactions sent in one request stay in memory until they are applied."""
CACHED_TOTAL_BYTES: Final = 32 << 20
"""Total size of transactions in memory; others are read from the journal to be applied."""

WrittenCallback: TypeAlias = Callable[[int, BaseException | None], None]
"""written(lsn, None): the item's last entry is in the journal, at `lsn`, and applied; not fsynced.

written(0, error) on failure: then the table is unchanged, and nothing was written, unless the error is an
UncertainWrite. Errors: journal.errors.Full (retry when there is space), Stopped, other journal errors,
OSError.
"""

RequestFsync: TypeAlias = Callable[[JournalStore, int, DurableCallback], None]
"""request_fsync(journal, end, waiter): request an fsync of the journal up to LSN `end`."""


class UncertainWrite(Stopped):
    """The disk failed during an append, so the entries may or may not be in the journal.

    Recovery accepts every entry that it finds complete; until then the outcome is unknown.
    """


class WriteRequest:
    """An item of the queue: messages of one transaction, and the operation (step) after them.

    Either may be absent. The entries of an item are written in one append.
    """

    __slots__ = ("contents", "message_count", "messages", "operation", "revert", "size_bytes", "transaction", "written")

    def __init__(
        self,
        transaction: Transaction | None,
        messages: list[AppendMsg],
        operation: journal_records.Operation | None,
        written: WrittenCallback,
        revert: Callable[[], None] | None = None,
    ) -> None:
        self.transaction = transaction
        self.messages = messages
        self.operation = operation
        self.written = written
        self.revert = revert
        """Called if the write fails, to revert what was changed when the item was queued."""
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
        self.message_count = count
        self.size_bytes = size

    def copy_data(self) -> None:
        """Copy message data whose buffers belong to the caller, because the turn ends before the write."""
        for number, message in enumerate(self.messages):
            if not isinstance(message.data, bytes):
                own = message._replace(data=bytes(message.data))
                self.messages[number] = self.contents[number] = own


class JournalWriter:
    """Writes queued items to the transaction journal. Used by one thread only.

    All items queued during a turn are one append, or several if it is too large, in order; each is in the journal
    completely or not at all. After the append the entries are applied to the table, then the `written` callbacks are
    called. While a worker starts a new journal file, items wait, with copies of their data.

    If an append fails, everything queued fails with it: later items may have been accepted only because of
    the earlier ones.
    """

    def __init__(
        self,
        journal: JournalStore,
        table: TransactionTable,
        *,
        request_fsync: RequestFsync,
        run: RunInWorker,
        mark_ready: Callable[[], None],
    ) -> None:
        self._journal = journal
        self._table = table
        self._request_fsync = request_fsync
        self._run, self._mark_ready = run, mark_ready
        self._queue: deque[WriteRequest] = deque()
        self._durable_callbacks: list[DurableCallback] = []
        self._wanted_end = 0
        self._fsync_pending = False
        self.starting_file = False
        """Whether a worker is starting a new journal file."""
        self.cached_bytes = 0

    # Adding to the queue

    def enqueue(
        self,
        operation: journal_records.Operation | None,
        written: WrittenCallback,
        *,
        transaction: Transaction | None = None,
        batches: Sequence[IncomingBatch] = (),
        revert: Callable[[], None] | None = None,
    ) -> None:
        """Queue `batches` as messages of `transaction`, and an operation; else as `WriteRequest`."""
        messages: list[AppendMsg] = []
        if transaction is not None and batches:
            epoch = transaction.epoch
            stage = self._table.producer_states.stage_batch
            for log_id, _, producer_id, sequence, count, blocks, data in batches:
                messages.append(AppendMsg(epoch, log_id, producer_id, sequence, count, blocks, data))
                transaction.queued_messages += count
                stage(producer_id, epoch, sequence, count)
        self.enqueue_request(WriteRequest(transaction, messages, operation, written, revert))

    def enqueue_request(self, item: WriteRequest) -> None:
        """Add an item to the queue; the next `write` appends it."""
        if self.starting_file:
            item.copy_data()
        self._queue.append(item)
        self._mark_ready()

    @property
    def due(self) -> bool:
        """Whether `write` has something to do now."""
        return bool(self._durable_callbacks) or (bool(self._queue) and not self.starting_file)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, being written or waiting for an fsync."""
        return not self._queue and not self.starting_file and not self._durable_callbacks

    # Writing

    def write(self) -> bool:
        """Write queued items and request the fsyncs that callbacks wait for; False if there was no work.

        Rolled back transactions whose record is durable by now are removed.
        """
        if not self.due:
            return False
        while self._queue and not self.starting_file:
            items = self._next_append()
            try:
                work = self._journal.before_append(sum(item.size_bytes for item in items))
            except Exception as error:
                self._fail(items, error)
                continue
            if work is None:
                self._append(items)
            else:
                self.starting_file = True
                for item in (*items, *self._queue):
                    item.copy_data()
                self._run(work, partial(self._file_started, items))
        self._request_fsyncs()
        ending, forced = self._table.pending_rollbacks, self._journal.forced_offset
        while ending and (first := next(iter(ending.values()))).lsn < forced:
            del ending[first.epoch]
        return True

    def _next_append(self) -> list[WriteRequest]:
        """Remove and return the first items that fit one append; at least one."""
        items = [self._queue.popleft()]
        size = items[0].size_bytes
        while self._queue and size + self._queue[0].size_bytes <= APPEND_BYTES:
            items.append(self._queue.popleft())
            size += items[-1].size_bytes
        return items

    def _file_started(self, items: list[WriteRequest], result: Any, error: BaseException | None) -> None:
        self.starting_file = False
        if error is not None:
            self._fail(items, error)
        else:
            assert self._table.file_references is not None
            self._table.file_references.refresh_files()
            self._append(items)
        self.write()

    def _append(self, items: list[WriteRequest]) -> None:
        contents = [content for item in items for content in item.contents]
        stopped = self._journal.stopped
        try:
            places = self._journal.append(contents)
        except Exception as error:
            if isinstance(error, Stopped) and stopped is None:
                self._fail(items, UncertainWrite(error.reason))
            else:
                self._fail(items, error)
            return
        last = self._apply(items, places)
        for item, lsn in zip(items, last, strict=True):
            item.written(lsn, None)

    def _apply(self, items: list[WriteRequest], places: list[int]) -> list[int]:
        """Apply every entry to the table, in order; return the LSN of each item's last entry."""
        table = self._table
        at = 0
        last = []
        for item in items:
            for message in item.messages:
                table.apply_batch(places[at], message)
                at += 1
            if item.transaction is not None:
                item.transaction.queued_messages -= item.message_count
            if item.operation is not None:
                if item.messages:
                    self._cache_batches(item)
                table.apply_operation(places[at], item.operation)
                at += 1
            last.append(places[at - 1])
        return last

    def _fail(self, items: list[WriteRequest], error: BaseException) -> None:
        """Fail `items` and everything queued after them."""
        # Only `items` may be partly written; later ones certainly are not.
        later_error = Stopped(error.reason) if isinstance(error, UncertainWrite) else error
        count = len(items)
        refused = [*items, *self._queue]
        self._queue.clear()
        self._table.producer_states.discard_staged()
        for item in refused:
            if item.transaction is not None:
                item.transaction.queued_messages -= item.message_count
            if item.revert is not None:
                item.revert()
        for number, item in enumerate(refused):
            item.written(0, error if number < count else later_error)

    def _cache_batches(self, item: WriteRequest) -> None:
        """Keep a small transaction that was sent in one request in memory until it is applied."""
        transaction = item.transaction
        if (
            transaction is not None
            and transaction.size_bytes <= CACHED_TRANSACTION_BYTES
            and transaction.locations.batch_count == len(item.messages)
            and self.cached_bytes + transaction.size_bytes <= CACHED_TOTAL_BYTES
        ):
            self.cached_bytes += transaction.size_bytes
            transaction.cached_batches = [
                Batch(bytes(data), blocks, producer_id, sequence, count)
                for _, _, producer_id, sequence, count, blocks, data, _ in item.messages
            ]

    def drop_cached(self, transaction: Transaction) -> None:
        """Free the cached batches of an applied transaction."""
        if transaction.cached_batches is not None:
            transaction.cached_batches = None
            self.cached_bytes -= transaction.size_bytes

    # Fsync

    def when_durable(self, lsn: int, waiter: DurableCallback) -> None:
        """Call `waiter(None)` once the entry at `lsn` is durable.

        Calls `waiter(error)` if the journal stops first.
        """
        if lsn < self._journal.forced_offset:
            waiter(None)
        else:
            self._durable_callbacks.append(waiter)
            self._wanted_end = max(self._wanted_end, lsn + 1)
            self._mark_ready()

    def _request_fsyncs(self) -> None:
        """Request one fsync for all callbacks added in this turn."""
        if self._journal.flush_due and not self._fsync_pending:
            self._fsync_pending = True
            self.when_durable(self._journal.end_offset - 1, self._fsync_done)
        if self._durable_callbacks:
            waiting, self._durable_callbacks = self._durable_callbacks, []
            wanted, self._wanted_end = self._wanted_end, 0
            self._request_fsync(self._journal, wanted, partial(_call_all, waiting))

    def _fsync_done(self, error: BaseException | None) -> None:
        self._fsync_pending = False


def _call_all(waiting: list[DurableCallback], error: BaseException | None) -> None:
    for waiter in waiting:
        waiter(error)
