"""Reads at a standby: METADATA, FETCH and LOCATE are answered from the data folder that follows the primary's.

A standby has no broker. Its logs are those of another process (`ReadOnlyLog`): they are readable up to the durable
offset in `log.mark`, which the primary rewrites within a second of an fsync, and which the standby gets like any other
change. What it serves is in the store, so a failover keeps it.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from journal import filenames
from journal.clock import Clock
from journal.disk import Disk
from journal.errors import JournalError
from journal.log.checkpoint import LogCheckpoint, WrongLog, read_log_id
from journal.log.log import Upto
from journal.log.readonly import ReadOnlyLog
from journal.record.batch import Chunk
from journal.record.block_trailer import BLOCK_SPAN_MAX
from journal.record.format import split_id
from tfmq.broker.admission import BoundedExecutor
from tfmq.broker.broker import READ_WORKERS
from tfmq.broker.fetch import FetchHandler
from tfmq.broker.log_offsets import locate, ordinal_of
from tfmq.broker.partition import TOPIC_DELETED
from tfmq.broker.reply import Body, Pause, Randomness, Reply, Run, Session, client_error
from tfmq.broker.runtime import Runtime
from tfmq.config import Config
from tfmq.errors import Busy, UnknownPartition, UnknownTopic
from tfmq.message import PartitionState
from tfmq.protocol import commands

logger = logging.getLogger("tfmq.replication")

READS: Final = (commands.Metadata, commands.Fetch, commands.Locate, commands.Cancel)
"""The commands that `StandbyReads.handle` executes."""
REFRESH_SECONDS: Final = 0.2
"""How often logs are looked at for which fetches wait."""
LISTING_SECONDS: Final = 1.0
"""The list of topics is at most this old."""
OPEN_LOGS_MAX: Final = 64
"""Maximum number of logs with open files."""
NOT_READABLE: Final = (
    "This standby makes its data folder from the store of the replicas, or becomes primary. Try again."
)

Found = TypeVar("Found")


class OpenLogs:
    """The logs with open files, the least recently used first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logs: OrderedDict[StandbyLog, None] = OrderedDict()

    def use(self, log: StandbyLog) -> None:
        """Note the use of `log`. If too many logs are open, the files of another one are closed."""
        with self._lock:
            self._logs[log] = None
            self._logs.move_to_end(log)
            oldest = self._logs.popitem(last=False)[0] if len(self._logs) > OPEN_LOGS_MAX else None
        if oldest is not None:
            oldest.close()


class StandbyLog:
    """The log of one partition, as `ReadableLog`. The offsets are those of the last read or `refresh`; thread-safe.

    Every method but the properties reads the disk: call it in a worker.
    """

    def __init__(self, disk: Disk, folder: str, log_id: int, open_logs: OpenLogs, deleted: str) -> None:
        """`deleted`: the sentence of the error if the log is gone."""
        self.folder, self.log_id = folder, log_id
        self._disk, self._open_logs, self._deleted = disk, open_logs, deleted
        self._lock = threading.Lock()
        self._log: ReadOnlyLog | None = None
        self._checkpoint = LogCheckpoint(0, 0, 0, 0, 0)

    @property
    def epoch(self) -> int:
        return self._checkpoint.epoch

    @property
    def first_offset(self) -> int:
        return self._checkpoint.first

    @property
    def first_ordinal(self) -> int:
        return self._checkpoint.first_ordinal

    @property
    def forced_offset(self) -> int:
        return self._checkpoint.durable

    @property
    def forced_place(self) -> tuple[int, int]:
        checkpoint = self._checkpoint
        return checkpoint.durable, checkpoint.durable_ordinal

    @property
    def end_offset(self) -> int:
        return self._checkpoint.durable

    @property
    def end_ordinal(self) -> int:
        return self._checkpoint.durable_ordinal

    def refresh(self) -> None:
        """Read the bounds of the log again. Raises UnknownTopic, and the errors of `ReadOnlyLog.refresh`."""
        self._query(lambda log: None)

    def read_cached(
        self,
        offset: int,
        max_bytes: int,
        *,
        upto: Upto = "forced",
        epoch: int | None = None,
        block_bytes: int = BLOCK_SPAN_MAX,
    ) -> Chunk | None:
        """Return None: every read is that of a worker."""
        return None

    def read(
        self,
        offset: int,
        max_bytes: int,
        *,
        upto: Upto = "forced",
        epoch: int | None = None,
        block_bytes: int = BLOCK_SPAN_MAX,
        pause: Callable[[], None] | None = None,
    ) -> Chunk:
        """Read as `Log.read` does, but at once, without pauses: other readers wait for the lock."""
        return self._query(lambda log: log.read(offset, max_bytes, epoch, block_bytes))

    def seek_offset(self, offset: int) -> int:
        return self._query(lambda log: log.seek_offset(offset))

    def offset_of_ordinal(self, ordinal: int) -> tuple[int, int]:
        offset = self._query(lambda log: log.offset_of_ordinal(ordinal))
        return offset, ordinal_of(self, offset)

    def offset_of_time(self, ms: int) -> int:
        return self._query(lambda log: log.offset_of_time(ms))

    def close(self) -> None:
        with self._lock:
            if self._log is not None:
                self._log.close()

    def _query(self, question: Callable[[ReadOnlyLog], Found]) -> Found:
        """Refresh the log, and return the result of `question(log)`."""
        self._open_logs.use(self)
        with self._lock:
            try:
                if self._log is None:
                    self._log = ReadOnlyLog(self._disk, self.folder, self.log_id)
                else:
                    self._log.refresh()
                return question(self._log)
            except (FileNotFoundError, WrongLog):
                raise UnknownTopic(self._deleted) from None
            finally:
                if self._log is not None:
                    self._checkpoint = self._log.checkpoint


@dataclass(eq=False)
class StandbyPartition:
    """A partition, as `ReadablePartition`."""

    name: str
    number: int
    log: StandbyLog
    parked: dict[Any, Callable[[], None]] = field(default_factory=dict)
    deleted: bool = False

    def request_fsync(self) -> None:
        """Do nothing: what is not durable at the primary is not here."""


class Listed(NamedTuple):
    """A topic: its incarnation, and the log ids of its partitions."""

    incarnation: int
    log_ids: list[int]


class StandbyTopics:
    """The topics in the data folder, as `ReadableTopics`. Used in the owner's thread, except `listing`."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk, self._folder = disk, folder
        self._open_logs = OpenLogs()
        self._topics: dict[str, tuple[int, list[StandbyPartition]]] = {}
        self._unreadable: set[str] = set()
        """Names of partitions whose damage is in the log of the server."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._topics)

    def count(self, name: str) -> int:
        return len(self._topics[name][1]) if name in self._topics else 0

    def partitions(self) -> Iterator[StandbyPartition]:
        for _, partitions in self._topics.values():
            yield from partitions

    def partition(self, name: str, incarnation: int, number: int) -> StandbyPartition:
        """Return a partition. Raises UnknownTopic, UnknownPartition."""
        present, partitions = self._topics.get(name, (0, []))
        if present != incarnation:
            raise UnknownTopic(f"There is no such topic {name} at this standby.", incarnation=present)
        if number >= len(partitions):
            raise UnknownPartition(
                f"The topic {name} has no partition {number} at this standby.", partitions=len(partitions)
            )
        return partitions[number]

    def rows(self, names: list[str] | None) -> list[tuple[str, int, list[tuple[int, PartitionState]], dict[str, Any]]]:
        """Return the rows of the reply to METADATA, for all topics if `names` is None."""
        return [
            (name, self._topics[name][0], [(each.number, PartitionState.OPEN) for each in self._topics[name][1]], {})
            for name in (sorted(self._topics) if names is None else dict.fromkeys(names))
            if name in self._topics
        ]

    def listing(self) -> dict[str, Listed]:
        """List the folder, in a worker. Raises OSError.

        A topic whose partitions are being created or deleted, or have a damaged checkpoint, has those below the first
        that is missing.
        """
        logs: dict[str, dict[int, int]] = {}
        for name in self._disk.list(self._folder):
            partition = filenames.parse_partition_folder(name)
            if partition is not None:
                log_id = self._read_log_id(name)
                if log_id is not None:
                    logs.setdefault(partition[0], {})[partition[1]] = log_id
        found = {}
        for topic, ids in logs.items():
            incarnation = split_id(ids[0])[0] if 0 in ids else -1
            count = next(n for n in range(len(ids) + 1) if n not in ids or split_id(ids[n])[0] != incarnation)
            if count:
                found[topic] = Listed(incarnation, [ids[number] for number in range(count)])
        return found

    def _read_log_id(self, name: str) -> int | None:
        try:
            return read_log_id(self._disk, filenames.join(self._folder, name))
        except JournalError as error:
            if name not in self._unreadable:
                self._unreadable.add(name)
                logger.error("consumers of this standby cannot read %s: %s", name, error)
            return None

    def replace(self, listing: dict[str, Listed]) -> None:
        """Take the topics of `listing`. Fetches that wait for a topic that is gone are told so."""
        known = {each.log.log_id: each for each in self.partitions()}
        self._topics = {
            name: (
                listed.incarnation,
                [
                    known.pop(log_id) if log_id in known else self._new_partition(name, number, log_id)
                    for number, log_id in enumerate(listed.log_ids)
                ],
            )
            for name, listed in listing.items()
        }
        for gone in known.values():
            gone.deleted = True
            gone.log.close()
            _retry_parked(gone)

    def _new_partition(self, name: str, number: int, log_id: int) -> StandbyPartition:
        folder = filenames.join(self._folder, filenames.partition_folder(name, number))
        deleted = TOPIC_DELETED.format(name=name)
        return StandbyPartition(name, number, StandbyLog(self._disk, folder, log_id, self._open_logs, deleted))


class StandbyReads:
    """Executes the commands `READS` at a standby. All methods are called in the owner's thread.

    `version()`: a number that changes when the folder was made from the store again; None while it cannot be read.
    `run` executes work in workers, where `pause` is called (`Runtime.pause`).
    """

    def __init__(
        self,
        config: Config,
        disk: Disk,
        clock: Clock,
        run: Run,
        randomness: Randomness,
        call_later: Callable[[float, Callable[[], None]], Any],
        version: Callable[[], int | None],
        pause: Pause | None = None,
    ) -> None:
        runtime = Runtime(config, disk, clock, run, randomness, pause=pause)
        runtime.is_starting = False
        runtime.may_be_behind = lambda: True
        self._clock, self._run, self._call_later, self._version = clock, run, call_later, version
        self._timers = runtime.timers
        self._executor = BoundedExecutor(runtime.run, READ_WORKERS)
        self._disk, self._folder = disk, config.server.data
        self.topics = StandbyTopics(disk, self._folder)
        self.fetches = FetchHandler(runtime, self.topics, self._executor)
        self._seen: int | None = None
        self._listed_at: float | None = None
        self._waiting: list[Callable[[BaseException | None], None]] = []
        """What waits for the listing in progress."""
        self._is_looking = False

    def end_parked_fetches(self, user: str) -> None:
        """Send an empty reply to each fetch of the user that waits."""
        self.fetches.end_parked(user)

    def handle(self, request: Any, body: Body, reply: Reply, session: Session) -> None:
        """Execute a request, with the arguments of `RequestHandler.handle`."""
        version = self._version()
        if version is None:
            reply.error(Busy(NOT_READABLE))
            return
        if version != self._seen:
            self._seen, self._listed_at = version, None
            self.fetches.close()
            self.topics.replace({})

        def listed(error: BaseException | None) -> None:
            try:
                if error is not None:
                    raise error
                self._execute(request, reply, session)
            except Exception as failure:
                reply.error(client_error(failure))

        if type(request) is commands.Cancel:
            reply.ok(self.fetches.cancel(session, request.target))
        elif self._listed_at is not None and self._is_known(request):
            listed(None)
        else:
            self._list(listed)

    def _is_known(self, request: Any) -> bool:
        # A topic that is not there is not looked for more often, whoever asks for it.
        assert self._listed_at is not None
        if self._clock.monotonic() - self._listed_at < LISTING_SECONDS:
            return True
        if type(request) is commands.Metadata:
            return False
        is_known: bool = self.topics.count(request.topic) > request.partition
        return is_known

    def _list(self, then: Callable[[BaseException | None], None]) -> None:
        self._waiting.append(then)
        if len(self._waiting) > 1:
            return
        seen, began = self._seen, self._clock.monotonic()

        def listed(found: dict[str, Listed] | None, error: BaseException | None) -> None:
            if found is not None and seen == self._seen:
                self.topics.replace(found)
                self._listed_at = began
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                each(error)

        self._run(self.topics.listing, listed)

    def _execute(self, request: Any, reply: Reply, session: Session) -> None:
        if type(request) is commands.Metadata:
            reply.ok(self.topics.rows(request.topics))
        elif type(request) is commands.Fetch:
            self.fetches.fetch(request._replace(read=commands.READ_FORCED), reply, session)
            self._look_later()
        else:
            partition = self.topics.partition(request.topic, request.incarnation, request.partition)

            def refreshed(_: Any, error: BaseException | None) -> None:
                try:
                    if error is not None:
                        raise error
                    locate(self.topics, self._executor, lambda: True, request, reply, session)
                except Exception as failure:
                    reply.error(client_error(failure))

            self._executor.run(partition.log.refresh, refreshed, session)

    # Fetches that wait

    def _look_later(self) -> None:
        if not self._is_looking:
            self._is_looking = True
            self._call_later(REFRESH_SECONDS, self._look)

    def _look(self) -> None:
        """Serve the fetches that wait for records which have come since, and end those whose time is over."""
        self._timers.tick(self._clock.monotonic())
        if self._version() != self._seen:
            self.fetches.close()
        waiting = [(each, each.log.forced_offset) for each in self.topics.partitions() if each.parked]
        self._run(partial(_refresh, [each.log for each, _ in waiting]), partial(self._refreshed, waiting))

    def _refreshed(self, waiting: list[tuple[StandbyPartition, int]], _: None, error: BaseException | None) -> None:
        for each, offset in waiting:
            if each.log.forced_offset != offset:
                _retry_parked(each)
        self._is_looking = False
        if self.fetches.parked_count or self._timers.next_due() is not None:
            self._look_later()


def _refresh(logs: list[StandbyLog]) -> None:
    """Refresh the logs, in a worker. The next fetch of a log that cannot be read reports why."""
    for log in logs:
        with suppress(OSError, JournalError, UnknownTopic):
            log.refresh()


def _retry_parked(partition: StandbyPartition) -> None:
    for retry in list(partition.parked.values()):
        retry()
