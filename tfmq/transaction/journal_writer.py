"""The queue of entries for the transaction journal, and the callbacks that wait for the fsync of written entries."""

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
"""Maximum bytes of one append, so that the broker's thread is not blocked; a single queue item may be larger."""

CACHED_TRANSACTION_BYTES: Final = 64 << 10
"""If a transaction is sent in one request of up to this size, its batches stay in memory until they are applied."""
CACHED_TOTAL_BYTES: Final = 32 << 20
"""Maximum bytes of all batches that stay in memory. Further batches are read from the journal to be applied."""

WrittenCallback: TypeAlias = Callable[[int, BaseException | None], None]
"""written(lsn, None): the entries of a queue item are written, the last one at `lsn`, and are applied to the table.

The entries are not fsynced yet. written(0, error): the table is unchanged. After an UncertainWrite the entries may be
in the journal. After any other error (journal.errors.Full, Stopped, OSError, others) they are not in the journal.
"""

RequestFsync: TypeAlias = Callable[[JournalStore, int, DurableCallback], None]
"""request_fsync(journal, end, waiter): request an fsync of the journal up to LSN `end`."""


class UncertainWrite(Stopped):
    """The disk failed during an append. The next start finds out whether the journal has the entries of the append."""


class WriteRequest:
    """An item of the queue: batches of one transaction (`messages`), then an operation. One of the two may be absent.

    All entries of an item are written in one append. If it fails, `revert()` and then `written(0, error)` are called.
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
        """Copy the batches, because the caller's buffers are valid only until the end of the turn."""
        for number, message in enumerate(self.messages):
            if not isinstance(message.data, bytes):
                own = message._replace(data=bytes(message.data))
                self.messages[number] = self.contents[number] = own


class JournalWriter:
    """Writes queued items to the transaction journal. Used by one thread only.

    The items queued during a turn are written in one append, or in several of up to APPEND_BYTES. Each item is in the
    journal completely or not at all. After an append its entries are applied to the table, then the `written` callbacks
    are called. While a worker starts a new journal file, the items wait in the queue, with copies of their data. If an
    append fails, all queued items fail, because a later item may have been accepted only because of an earlier one.
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
        if self.starting_file:
            item.copy_data()
        self._queue.append(item)
        self._mark_ready()

    @property
    def due(self) -> bool:
        return bool(self._durable_callbacks) or (bool(self._queue) and not self.starting_file)

    @property
    def idle(self) -> bool:
        return not self._queue and not self.starting_file and not self._durable_callbacks

    # Writing

    def write(self) -> bool:
        """Write the queued items, and request the fsync that callbacks wait for; return False if there was no work."""
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
        ending, durable_offset = self._table.pending_rollbacks, self._journal.forced_offset
        while ending and (first := next(iter(ending.values()))).lsn < durable_offset:
            del ending[first.epoch]
        return True

    def _next_append(self) -> list[WriteRequest]:
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
            lsns = self._journal.append(contents)
        except Exception as error:
            if isinstance(error, Stopped) and stopped is None:
                self._fail(items, UncertainWrite(error.reason))
            else:
                self._fail(items, error)
            return
        last = self._apply(items, lsns)
        for item, lsn in zip(items, last, strict=True):
            item.written(lsn, None)

    def _apply(self, items: list[WriteRequest], lsns: list[int]) -> list[int]:
        """Apply the written entries to the table, in order; return the LSN of the last entry of each item."""
        table = self._table
        at = 0
        last = []
        for item in items:
            for message in item.messages:
                table.apply_batch(lsns[at], message)
                at += 1
            if item.transaction is not None:
                item.transaction.queued_messages -= item.message_count
            if item.operation is not None:
                if item.messages:
                    self._cache_batches(item)
                table.apply_operation(lsns[at], item.operation)
                at += 1
            last.append(lsns[at - 1])
        return last

    def _fail(self, items: list[WriteRequest], error: BaseException) -> None:
        # After an UncertainWrite the journal may have entries of `items`, but certainly not those of later items.
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
        if transaction.cached_batches is not None:
            transaction.cached_batches = None
            self.cached_bytes -= transaction.size_bytes

    # Fsync

    def when_durable(self, lsn: int, waiter: DurableCallback) -> None:
        """Call `waiter(None)` once the entry at `lsn` is durable, or `waiter(error)` if the journal stops first."""
        if lsn < self._journal.forced_offset:
            waiter(None)
        else:
            self._durable_callbacks.append(waiter)
            self._wanted_end = max(self._wanted_end, lsn + 1)
            self._mark_ready()

    def _request_fsyncs(self) -> None:
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
