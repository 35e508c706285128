"""The sending side of a sink: how tasks send rows as parts of a commit group, and how the driver commits them.

A commit group is a series of commits in the broker with increasing sequences; each write or micro-batch is one
sequence. A task splits its rows by topic and partition and sends them through a `TaskPart`, in transactions of the
group. After the last row, the task prepares these transactions. The driver then commits the transactions of all tasks
together, or aborts the run (one attempt of the write). Each task and the driver have their own connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from tfmq.arrow.encoder import COLUMNS, encode
from tfmq.arrow.partitioner import partition_of
from tfmq.client.connection.connection import FIRST_CONNECT_TIMEOUT
from tfmq.client.connection.factory import make_client_parts
from tfmq.client.connection.requests import MetadataCache, Topic, get_topic, request_with_retries
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.operation import BackgroundTasks, Operation, Task
from tfmq.client.send.partition_sender import ProducerIds
from tfmq.client.transaction import commit_group
from tfmq.client.transaction.commit_group import CommitGroupWriter, MemberBatch
from tfmq.client.transaction.pipeline import ProducerSequencePool
from tfmq.errors import BadRequest, TfmqError, UnknownPartition
from tfmq.limits import NAME_RULE, is_valid_name
from tfmq.protocol.commands import CommitGroup, CommitGroupReply, CommitMember, Ping, TransactionName
from tfmq.spark.settings import SinkSettings

CLOSE_SECONDS = 2.0


class CommitGroupClient:
    """Connection of one task, or of the driver, to the broker. The constructor does no I/O.

    `seconds`: limit for each request, including reconnects · `name`: name of the client, which the broker shows ·
    `patience_seconds`: how long to try the first connection; None: as long as `seconds`. Each method may raise the
    `TfmqError` that the broker replied, `ConnectionFailed` or `TimedOut`.
    """

    def __init__(
        self, servers: str, seconds: float, name: str = "tfmq-spark", *, patience_seconds: float | None = None
    ) -> None:
        self.link, self._driver, _ = make_client_parts(servers, BlockingDriver)
        self.link.client = name
        self.link.first_connect_timeout = seconds if patience_seconds is None else patience_seconds
        self._seconds = seconds
        self._cluster = MetadataCache(self.link.now)
        self._tasks = BackgroundTasks(self.link.now)
        self._driver.tickers = [*self._driver.tickers, self._tasks]
        self._streams = ProducerSequencePool(self.link, ProducerIds(self.link))

    def connect(self) -> None:
        """Connect to the broker, which then reports its limits (`link.limits`)."""
        self._driver.run(request_with_retries(self.link, Ping(), self.link.now() + self._seconds))

    def topic(self, name: str) -> Topic:
        """Return the metadata of a topic. Raises `UnknownTopic` if there is none and the broker does not create it."""
        found = get_topic(self.link, self._cluster, name, create=True, retry_while_busy=True, seconds=self._seconds)
        return self._driver.run(found)

    def open_part(self, member: CommitMember, ttl_ms: int | None = None) -> TaskPart:
        """Return the object with which a task sends its rows to the sequence that `member` names."""
        core = CommitGroupWriter(
            self.link,
            self._streams,
            member,
            seconds=self._seconds,
            ttl_ms=ttl_ms,
            start=self._start,
            later=self._driver.call_later,
        )
        return TaskPart(core, self._driver)

    def commit(self, request: CommitGroup) -> CommitGroupReply:
        """Commit the transactions of a sequence, with retries until the outcome is known.

        Raises `GroupStale` if a later sequence is committed, or if this sequence is committed with another number of
        rows and `other_total` is not set; `GroupFenced` if the run was aborted; `GroupIncomplete` if a transaction is
        not prepared, for example because it has expired.
        """
        return self._driver.run(commit_group.commit_sequence(self.link, request, self._seconds))

    def abort(self, group: str, sequence: int, run: str) -> str:
        """Discard a run's transactions and reject its later ones. Return "aborted", or "committed" if the run is."""
        return self._driver.run(commit_group.abort_sequence(self.link, group, sequence, run, self._seconds))

    def delete_group(self, group: str) -> bool:
        """Delete the broker's record of a commit group. Return False if the broker does not have the group."""
        return self._driver.run(commit_group.forget_group(self.link, group, self._seconds))

    def close(self) -> None:
        """Close the connection. The broker then discards the transactions that are not prepared."""
        self._driver.close(CLOSE_SECONDS)

    def __enter__(self) -> CommitGroupClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, operation: Operation[Any], failed: Callable[[Exception], None]) -> Task:
        task = self._tasks.start(operation, failed)
        self._driver.wake()
        return task


class TaskPart:
    """Sends one task's rows to a sequence of a commit group. An exception in its `with` block discards the rows."""

    def __init__(self, core: CommitGroupWriter, driver: BlockingDriver) -> None:
        self._core = core
        self._driver = driver

    @property
    def already_committed(self) -> bool:
        return self._core.already_committed

    def send(self, batch: MemberBatch) -> bool:
        """Send `batch`; wait at the limit of bytes in flight. Return False if the sequence is already committed."""
        taken = self._driver.run(self._core.send(batch))
        with self._driver.lock:
            self._driver.poll_nonblocking()
        return taken

    def send_all(self, batches: Iterable[MemberBatch]) -> None:
        """Send `batches`, but stop if the sequence turns out to be already committed."""
        for batch in batches:
            if not self.send(batch):
                return

    def prepare(self) -> list[TransactionName]:
        """Prepare the transactions that are not prepared yet, and return the names of all transactions."""
        return self._driver.run(self._core.prepare())

    def __enter__(self) -> TaskPart:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._driver.run(self._core.drop())


BATCH_BYTES: Final = 1 << 20
"""Target size of a PRODUCE request: large compared with its fixed cost, but small enough to have several in flight."""
BATCH_RECORDS: Final = 1 << 16
SPLIT_BUFFER_BYTES: Final = 8 << 20
"""Rows are buffered up to this size before they are split by partition, so that no partition gets tiny batches."""
RECORD_OVERHEAD_BYTES: Final = 64
"""Minimum size of a record beyond its value, key, tag and attributes, for its header and framing."""


class RowBatcher:
    """Splits the rows of a task by topic and partition, and cuts the rows of each partition into record batches.

    Rows of one partition keep their order. A row is sent to the partition that its column `partition` names, else to
    the partition of its key. If no buffered row has a key, whole batches are sent to one partition after the other.
    A row without a valid topic name raises BadRequest; a missing topic or partition, UnknownTopic or UnknownPartition.

    `find`: returns the metadata of a topic · `topic`: the topic of all rows; "": the column `topic` names it · `first`:
    partition, modulo the number of partitions, for the first row or batch without a key; it differs between tasks, so
    that not all begin with the same partition · `message_bytes`: maximum size of a value · `lenient`: send invalid
    attributes unchanged.
    """

    def __init__(
        self, find: Callable[[str], Topic], topic: str, first: int, message_bytes: int, lenient: bool = False
    ) -> None:
        self._find = find
        self._topic = topic
        self._next_turns: dict[str, int] = {}
        self._first_turn = first
        self._encode = partial(encode, message_bytes=message_bytes, lenient=lenient)
        self._rows: list[pa.RecordBatch] = []
        self._bytes = 0

    def add_rows(self, rows: pa.RecordBatch) -> Iterator[MemberBatch]:
        """Buffer `rows`. If the buffer is full then, yield all its rows as batches."""
        if not len(rows):
            return
        self._rows.append(rows)
        self._bytes += rows.nbytes
        needs_split = any(_column_or_none(rows, name) is not None for name in ("key", "partition", "topic"))
        if self._bytes >= (SPLIT_BUFFER_BYTES if needs_split else BATCH_BYTES):
            yield from self.flush()

    def flush(self) -> Iterator[MemberBatch]:
        """Yield all buffered rows as batches."""
        gathered, self._rows, self._bytes = self._rows, [], 0
        if gathered:
            rows = gathered[0] if len(gathered) == 1 else pa.concat_batches(gathered)
            for name, found in self._split_by_topic(rows):
                topic = self._find(name)
                for number, rows in self._split_by_partition(topic, found):
                    for part, size in _cut_batches(rows):
                        where = self._next_partition(topic) if number < 0 else number
                        made = partial(self._encode, part)
                        yield MemberBatch(topic.name, topic.incarnation, where, len(part), size, made)

    def _split_by_topic(self, rows: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        if self._topic:
            yield self._topic, rows
            return
        column = rows.column("topic")
        if column.null_count:
            raise BadRequest('A row has no topic: the column topic is null there; or give option("topic", NAME).')
        for name, part in _group_rows(rows, column):
            if not is_valid_name(name):
                raise BadRequest(f"{name!r} in the column topic cannot be a topic: {NAME_RULE}.")
            yield name, part

    def _split_by_partition(self, topic: Topic, rows: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield (partition, rows) for each partition. -1 as partition: each batch may be sent to any partition."""
        named = _column_or_none(rows, "partition")
        keyed = _column_or_none(rows, "key") is not None
        sent = _with_standard_types(rows.select([name for name in COLUMNS if name in rows.schema.names]))
        if named is not None:
            chosen = self._named_partitions(topic, named, sent)
        elif keyed and len(topic.partitions) > 1:
            chosen = self._computed_partitions(topic, sent)
        else:
            yield 0 if len(topic.partitions) == 1 else -1, sent
            return
        yield from _group_rows(sent, chosen)

    def _named_partitions(self, topic: Topic, column: pa.Array, rows: pa.RecordBatch) -> pa.Array:
        """Return the partition of each row: the number in `column`, or if it is null, one computed from the key."""
        count = len(topic.partitions)
        edges = pc.min_max(column).as_py()
        wrong = edges["min"] if edges["min"] < 0 else edges["max"]
        if not 0 <= wrong < count:
            raise UnknownPartition(
                f"A row asks for partition {wrong} of {topic.name}, which has {count}, from 0 on: correct the column"
                f" partition, or add some (tfmq topic grow {topic.name})."
            )
        named = column.cast(pa.int32())
        return named if not named.null_count else pc.coalesce(named, self._computed_partitions(topic, rows))

    def _computed_partitions(self, topic: Topic, rows: pa.RecordBatch) -> pa.Array:
        """Return the partition of each row, computed from its key. Rows without a key get the partitions in turn."""
        turn = self._next_turns.get(topic.name, self._first_turn)
        self._next_turns[topic.name] = turn + len(rows)
        return partition_of(rows, len(topic.partitions), turn % len(topic.partitions))

    def _next_partition(self, topic: Topic) -> int:
        numbers = [each.number for each in topic.partitions if each.writable]
        # If no partition is writable, use all: the broker delays the request until its partition is writable again.
        numbers = numbers or [each.number for each in topic.partitions]
        turn = self._next_turns.get(topic.name, self._first_turn)
        self._next_turns[topic.name] = turn + 1
        return numbers[turn % len(numbers)]


def _with_standard_types(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Cast columns of type large_string and large_binary, which a Spark setting produces, to string and binary."""
    wide = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}
    if not any(each in wide for each in rows.schema.types):
        return rows
    arrays = [column.cast(wide.get(column.type, column.type)) for column in rows.columns]
    return pa.RecordBatch.from_arrays(arrays, rows.schema.names)


def _column_or_none(rows: pa.RecordBatch, name: str) -> pa.Array | None:
    """Return the column `name`; None if it is missing or has only nulls."""
    if name not in rows.schema.names:
        return None
    column = rows.column(name)
    return column if column.null_count < len(column) else None


def _group_rows(rows: pa.RecordBatch, column: pa.Array) -> Iterable[tuple[Any, pa.RecordBatch]]:
    """Return (value, rows with this value) for each value of `column`. The rows keep their order."""
    values = pc.unique(column)
    if len(values) == 1:
        return [(values[0].as_py(), rows)]
    codes = pc.index_in(column, values).to_numpy()
    order = np.argsort(codes, kind="stable")
    edges = np.searchsorted(codes[order], np.arange(len(values) + 1))
    taken = rows.take(pa.array(order))
    return [
        (value, taken.slice(edges[index], edges[index + 1] - edges[index]))
        for index, value in enumerate(values.to_pylist())
    ]


def _cut_batches(rows: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Yield (batch, minimum bytes of its records): batches of up to BATCH_BYTES, or with a single larger row."""
    sizes = np.full(len(rows), RECORD_OVERHEAD_BYTES, dtype=np.int64)
    for column in rows.columns:
        if not pa.types.is_null(column.type):
            sizes += pc.binary_length(column).fill_null(0).to_numpy()
    ends = np.cumsum(sizes)
    first, before = 0, 0
    while first < len(rows):
        last = int(np.searchsorted(ends, before + BATCH_BYTES, "right"))
        last = min(max(last, first + 1), first + BATCH_RECORDS)
        yield rows.slice(first, last - first), int(ends[last - 1]) - before
        first, before = last, int(ends[last - 1])


@dataclass(frozen=True)
class TaskCommitMessage(WriterCommitMessage):
    """Message of a task to the driver: the task's prepared transactions, and the number of rows that it received."""

    member: CommitMember
    transactions: tuple[TransactionName, ...]
    rows: int


def write_rows(settings: SinkSettings, member: CommitMember, rows: Iterator[pa.RecordBatch]) -> TaskCommitMessage:
    """Send the rows of a task to the sequence that `member` names, and prepare their transactions.

    If the sequence is already committed, the rows are only counted. If rows cannot be sent, a TfmqError with the reason
    is raised, and none of the task's rows becomes visible.
    """
    count = 0
    with (
        CommitGroupClient(settings.servers, settings.timeout, _client_name(member)) as client,
        client.open_part(member, settings.ttl_ms) as part,
    ):
        batcher: RowBatcher | None = None
        for batch in rows:
            count += len(batch)
            if not part.already_committed:
                if batcher is None and len(batch):
                    context = TaskContext.get()
                    first = context.partitionId() if context is not None else 0
                    client.connect()
                    most = client.link.limits["message_bytes"]
                    batcher = RowBatcher(client.topic, settings.topic, first, most, settings.lenient)
                if batcher is not None:
                    part.send_all(batcher.add_rows(batch))
            elif settings.allow_other_total:
                break
        if batcher is not None and not part.already_committed:
            part.send_all(batcher.flush())
        return TaskCommitMessage(member, tuple(part.prepare()), count)


def _client_name(member: CommitMember) -> str:
    """Return the client name of this task, which `tfmq tx list` shows as the owner of the task's transactions."""
    context = TaskContext.get()
    name = f"tfmq-spark batch {member.sequence}"
    return name if context is None else f"{name} task {context.partitionId()} attempt {context.taskAttemptId()}"


def collect_commit(messages: Sequence[WriterCommitMessage | None], *, other_total: bool = False) -> CommitGroup | None:
    """Return the request to commit the transactions of all tasks; None if no task sent a message to the driver."""
    found = [each for each in messages if isinstance(each, TaskCommitMessage)]
    if not found:
        return None
    names = [name for each in found for name in each.transactions]
    return CommitGroup(*found[0].member, names, sum(each.rows for each in found), other_total)


def abort_run(settings: SinkSettings, member: CommitMember) -> TfmqError | None:
    """Abort the run (attempt of a write) that `member` names. Return the error if the abort fails, else None.

    The abort also discards the transactions of tasks that sent no message to the driver. If the broker is unreachable,
    the abort fails after 2 s, so that Spark can report the error that caused the abort. The caller must not delete the
    group after an abort, because the group makes the broker reject tasks that Spark has not stopped yet.
    """
    try:
        with CommitGroupClient(settings.servers, settings.timeout, patience_seconds=FIRST_CONNECT_TIMEOUT) as client:
            client.abort(*member)
    except TfmqError as error:
        return error
    return None
