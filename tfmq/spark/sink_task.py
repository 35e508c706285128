"""A connection that one task, or the driver's verdict about all tasks, has with the broker; it waits as they do.

A task sends its rows as a `Part`: members of a commit group, prepared when the rows are over. The driver commits the
parts of all tasks, or aborts their run. Each connects for itself, from whichever machine it runs on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from tfmq.arrow.checksums import partition_of
from tfmq.arrow.encoder import COLUMNS, Encoded, encode
from tfmq.client.connection.connection import PATIENCE_SECONDS
from tfmq.client.connection.factory import reach
from tfmq.client.connection.requests import Cluster, Topic, ask, find_topic
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.operation import Operation, Task, Tasks
from tfmq.client.send.partition_sender import Identities
from tfmq.client.transaction.commit_group import (
    GroupPart,
    MemberBatch,
    Times,
    aborting,
    committing,
    forgetting,
)
from tfmq.client.transaction.pipeline import TransactionStreams
from tfmq.errors import BadRequest, TfmqError, UnknownPartition
from tfmq.limits import valid_name
from tfmq.protocol.commands import CommitGroup, CommitGroupReply, CommitMember, Ping, TransactionName
from tfmq.spark.settings import SinkSettings

CLOSE_SECONDS = 2.0


class Verdict(NamedTuple):
    """What is to be committed: the members of all tasks, and how many `rows` they have."""

    group: str
    sequence: int
    run: str
    members: Sequence[TransactionName]
    rows: int


class GroupClient:
    """See the module. `seconds`: how long one answer may take, lost connections and all. `patience_seconds`: how long a
    first connection is tried; None: as long. Making it touches no network.

    All methods raise the `TfmqError` that the broker answered, `ConnectionFailed`, `TimedOut`.
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        seconds: float,
        name: str = "tfmq-spark",
        *,
        patience_seconds: float | None = None,
    ) -> None:
        self.link, self._driver, _ = reach(servers, BlockingDriver)
        self.link.client = name
        self.link.patience_seconds = seconds if patience_seconds is None else patience_seconds
        self._seconds = seconds
        self._cluster = Cluster(self.link.now)
        self._tasks = Tasks(self.link.now)
        self._driver.tickers = [*self._driver.tickers, self._tasks]
        self._streams = TransactionStreams(self.link, Identities(self.link))

    def connect(self) -> None:
        """Wait until the broker has told its limits."""
        self._driver.run(ask(self.link, Ping(), self.link.now() + self._seconds))

    def topic(self, name: str) -> Topic:
        """The topic, made if the broker makes topics on first use. Raises `UnknownTopic`."""
        found = find_topic(self.link, self._cluster, name, create=True, patient=True, seconds=self._seconds)
        return self._driver.run(found)

    def part(self, member: CommitMember, ttl_ms: int | None = None) -> Part:
        """What a task adds to the sequence that `member` names."""
        core = GroupPart(
            self.link,
            self._streams,
            member,
            Times(self._seconds, ttl_ms),
            start=self._start,
            later=self._driver.call_later,
        )
        return Part(core, self._driver)

    def commit(self, verdict: Verdict, *, other_total: bool = False) -> CommitGroupReply:
        """Commit all of it; asked until the answer is known. Raises `GroupStale` (something later, or another total
        without `other_total`, is committed), `GroupFenced`, `GroupIncomplete`.
        """
        request = CommitGroup(
            verdict.group, verdict.sequence, verdict.run, list(verdict.members), verdict.rows, other_total
        )
        return self._driver.run(committing(self.link, request, self._seconds))

    def abort(self, group: str, sequence: int, run: str) -> str:
        """Drop what that run made, and let nothing more of it in: "aborted", or "committed" where that came before."""
        return self._driver.run(aborting(self.link, group, sequence, run, self._seconds))

    def forget(self, group: str) -> bool:
        """Forget the group; False: it was not known."""
        return self._driver.run(forgetting(self.link, group, self._seconds))

    def close(self) -> None:
        """Drop the connection, and with it what is not prepared."""
        self._driver.close(CLOSE_SECONDS)

    def __enter__(self) -> GroupClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, operation: Operation[Any], failed: Callable[[Exception], None]) -> Task:
        task = self._tasks.start(operation, failed)
        self._driver.attend()
        return task


class Part:
    """What one task sends. Left by an exception, it lets go of everything."""

    def __init__(self, core: GroupPart, driver: BlockingDriver) -> None:
        self._core = core
        self._driver = driver

    @property
    def superfluous(self) -> bool:
        """Whether the sequence is committed already."""
        return self._core.superfluous

    def send(self, batch: MemberBatch) -> bool:
        """Take `batch`, and wait while too much is under way. False: it is superfluous, as all that follow."""
        taken = self._driver.run(self._core.sending(batch))
        with self._driver.lock:
            self._driver.glance()
        return taken

    def prepare(self) -> list[TransactionName]:
        """All is sent: the members, prepared."""
        return self._driver.run(self._core.preparing())

    def __enter__(self) -> Part:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._driver.run(self._core.dropping())


BATCH_BYTES: Final = 1 << 20
"""What one PRODUCE has: enough that its own cost does not show, and some of them fit into what is in flight."""
BATCH_RECORDS: Final = 1 << 16
GATHERED_BYTES: Final = 8 << 20
"""Rows that are parted among partitions are gathered first, so that each gets no crumbs."""
OVERHEAD_BYTES: Final = 64
"""At least what a record has besides its value, key, tag and attributes: its header and the marks of msgpack."""

FindTopic = Callable[[str], Topic]


class Outgoing:
    """The rows of a task on their way out: gathered, parted by topic and partition, cut into batches of records.

    Rows of one partition keep their order. A row goes to the partition that it names, else to that of its key, else
    wherever the batch goes that it is in: batches without keys take one partition after the other.

    `topic` "": the column says it. `first`: where this task begins to go round the partitions.
    `lenient` as of `encode`.
    """

    def __init__(
        self, find: FindTopic, topic: str, first: int, message_bytes: int, lenient: bool = False
    ) -> None:
        self._find = find
        self._topic = topic
        self._turns: dict[str, int] = {}
        self._first = first
        self._encode = partial(_encoded, message_bytes, lenient)
        self._rows: list[pa.RecordBatch] = []
        self._bytes = 0

    def take(self, rows: pa.RecordBatch) -> Iterator[MemberBatch]:
        """What is to be sent now; some rows may stay until more come. Raises BadRequest that names the column,
        UnknownTopic, UnknownPartition.
        """
        if not len(rows):
            return
        self._rows.append(rows)
        self._bytes += rows.nbytes
        if self._bytes >= (GATHERED_BYTES if _parted(rows) else BATCH_BYTES):
            yield from self.rest()

    def rest(self) -> Iterator[MemberBatch]:
        """What stayed."""
        gathered, self._rows, self._bytes = self._rows, [], 0
        if gathered:
            rows = gathered[0] if len(gathered) == 1 else pa.concat_batches(gathered)
            for name, found in self._by_topic(rows):
                topic = self._find(name)
                for number, part in self._by_partition(topic, found):
                    yield from self._batches(topic, number, part)

    # By topic

    def _by_topic(self, rows: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        if self._topic:
            yield self._topic, rows
            return
        column = rows.column("topic")
        if column.null_count:
            raise BadRequest(
                'A row has no topic: the column topic is null there; or give option("topic", NAME).'
            )
        for name, part in _parts(rows, column):
            if not valid_name(name):
                raise BadRequest(
                    f"{name!r} in the column topic is no topic's name: 1 to 249 of A-Z a-z 0-9 . _ -"
                )
            yield name, part

    # By partition

    def _by_partition(self, topic: Topic, rows: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(its number, -1 where it does not matter; rows)"""
        named = _column(rows, "partition")
        keyed = _column(rows, "key") is not None
        sent = _plain(rows.select([name for name in COLUMNS if name in rows.schema.names]))
        if named is not None:
            chosen = self._named(topic, named, sent)
        elif keyed and len(topic.partitions) > 1:
            chosen = self._chosen(topic, sent)
        else:
            yield 0 if len(topic.partitions) == 1 else -1, sent
            return
        yield from _parts(sent, chosen)

    def _named(self, topic: Topic, column: pa.Array, rows: pa.RecordBatch) -> pa.Array:
        """Of the column partition, and where that is null as without it."""
        count = len(topic.partitions)
        edges = pc.min_max(column).as_py()
        wrong = edges["min"] if edges["min"] < 0 else edges["max"]
        if not 0 <= wrong < count:
            raise UnknownPartition(
                f"A row asks for partition {wrong} of {topic.name}, which has {count}, from 0 on: correct the column"
                f" partition, or add some (tfmq topic grow {topic.name})."
            )
        named = column.cast(pa.int32())
        return named if not named.null_count else pc.coalesce(named, self._chosen(topic, rows))

    def _chosen(self, topic: Topic, rows: pa.RecordBatch) -> pa.Array:
        turn = self._turns.get(topic.name, self._first)
        self._turns[topic.name] = turn + len(rows)
        return partition_of(rows, len(topic.partitions), turn % len(topic.partitions))

    def _turn(self, topic: Topic) -> int:
        """The next partition of those that take writes; if none does, of all: the broker keeps it until it does."""
        numbers = [each.number for each in topic.partitions if each.writable]
        numbers = numbers or [each.number for each in topic.partitions]
        turn = self._turns.get(topic.name, self._first)
        self._turns[topic.name] = turn + 1
        return numbers[turn % len(numbers)]

    # Batches

    def _batches(self, topic: Topic, number: int, rows: pa.RecordBatch) -> Iterator[MemberBatch]:
        for part, size in _cut(rows):
            made = partial(self._encode, part)
            where = self._turn(topic) if number < 0 else number
            yield MemberBatch(topic.name, topic.incarnation, where, len(part), size, made)


def _plain(rows: pa.RecordBatch) -> pa.RecordBatch:
    """With columns of the usual width: those of Spark are wider where it is set to that."""
    wide = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}
    if not any(each in wide for each in rows.schema.types):
        return rows
    arrays = [column.cast(wide.get(column.type, column.type)) for column in rows.columns]
    return pa.RecordBatch.from_arrays(arrays, rows.schema.names)


def _encoded(
    message_bytes: int, lenient: bool, rows: pa.RecordBatch, producer_id: int, sequence: int
) -> Encoded:
    return encode(rows, producer_id, sequence, message_bytes=message_bytes, lenient=lenient)


def _parted(rows: pa.RecordBatch) -> bool:
    return any(_column(rows, name) is not None for name in ("key", "partition", "topic"))


def _column(rows: pa.RecordBatch, name: str) -> pa.Array | None:
    """The column, unless it is missing, or null everywhere."""
    if name not in rows.schema.names:
        return None
    column = rows.column(name)
    return column if column.null_count < len(column) else None


def _parts(rows: pa.RecordBatch, column: pa.Array) -> Iterable[tuple[Any, pa.RecordBatch]]:
    """(value of `column`, the rows that have it, in their order), for each value."""
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


def _cut(rows: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, int]]:
    """(rows, at least the bytes that their records have): as many as BATCH_BYTES hold, one at least."""
    sizes = np.full(len(rows), OVERHEAD_BYTES, dtype=np.int64)
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


# What one task does with its rows: a part of a commit group, prepared; and the message that tells the driver of it.


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """A task is done: its transactions are prepared, and have `rows`. `member` is what they are members of."""

    member: CommitMember
    transactions: tuple[tuple[str, int], ...]
    rows: int


def write_rows(settings: SinkSettings, member: CommitMember, rows: Iterator[pa.RecordBatch]) -> Written:
    """Send all rows as part of `member`'s sequence and prepare them. Where that is committed already, they are only
    counted.

    Raises the TfmqError that says why they cannot be sent; then nothing of them is left, or will be seen.
    """
    count = 0
    with (
        GroupClient(settings.servers, settings.timeout, _task_name(member)) as client,
        client.part(member, settings.ttl_ms) as part,
    ):
        sender = _Sender(settings, client, part)
        for batch in rows:
            count += len(batch)
            if not part.superfluous:
                sender.take(batch)
            elif settings.other_total:
                break
        sender.rest()
        names = part.prepare()
    return Written(member, tuple((xid, epoch) for xid, epoch in names), count)


class _Sender:
    """Rows of a task, sent as batches of its part. It asks the broker for nothing before the first row."""

    def __init__(self, settings: SinkSettings, client: GroupClient, part: Part) -> None:
        self._settings, self._client, self._part = settings, client, part
        self._outgoing: Outgoing | None = None

    def take(self, rows: pa.RecordBatch) -> None:
        if self._outgoing is None and len(rows):
            context = TaskContext.get()
            first = context.partitionId() if context is not None else 0
            self._client.connect()
            most = self._client.link.limits["message_bytes"]
            self._outgoing = Outgoing(
                self._client.topic, self._settings.topic, first, most, self._settings.lenient
            )
        if self._outgoing is not None:
            self._send(self._outgoing.take(rows))

    def rest(self) -> None:
        if self._outgoing is not None and not self._part.superfluous:
            self._send(self._outgoing.rest())

    def _send(self, batches: Iterator[MemberBatch]) -> None:
        for batch in batches:
            if not self._part.send(batch):
                return


def _task_name(member: CommitMember) -> str:
    """What `tfmq tx list` shows as the owner of its transactions; the query stands beside it."""
    context = TaskContext.get()
    name = f"tfmq-spark batch {member.sequence}"
    return (
        name if context is None else f"{name} task {context.partitionId()} attempt {context.taskAttemptId()}"
    )


def verdict_of(messages: Sequence[WriterCommitMessage | None]) -> Verdict | None:
    """What all tasks together have written; None where no task tells of anything."""
    told = [each for each in messages if isinstance(each, Written)]
    if not told:
        return None
    group, sequence, run = told[0].member
    members = [TransactionName(*name) for each in told for name in each.transactions]
    return Verdict(group, sequence, run, members, sum(each.rows for each in told))


def abort_run(settings: SinkSettings, member: CommitMember) -> TfmqError | None:
    """Drop what tasks of that run have prepared, also those of which nobody told, and let nothing more of it in; a
    broker that cannot be reached is not waited for long. The group must not be forgotten then, which would let in a
    task that Spark has not stopped yet. Gives why it could not be done: Spark tells of what came first.
    """
    try:
        with GroupClient(settings.servers, settings.timeout, patience_seconds=PATIENCE_SECONDS) as client:
            client.abort(*member)
    except TfmqError as error:
        return error
    return None
