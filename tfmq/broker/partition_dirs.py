"""Folders of partitions: create, open, rename, delete. Callers run this file work in a worker thread."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from journal.disk import File
from journal.errors import JournalError
from journal.filenames import join, log_checkpoint_name, parse_partition_folder, parse_segment_name, partition_folder
from journal.log.checkpoint import WrongLog
from journal.log.log import Log
from journal.log.options import LogOptions
from journal.record.format import make_log_id
from tfmq.broker.catalog_state import TopicRow
from tfmq.broker.partition import Partition
from tfmq.broker.producer_state import ProducerState
from tfmq.broker.reply import STOPPING
from tfmq.broker.runtime import Runtime
from tfmq.broker.topics import OpenError, Topic
from tfmq.data_dir import FOLDER_MISSING, path_error_advice
from tfmq.errors import Busy

log = logging.getLogger("tfmq.broker")

DELETED_PREFIX: Final = "deleted~"
"""Prefix that a folder's name gets when its topic is deleted. No topic name contains `~`."""

ARCHIVE_NAME: Final = "archive"
RESERVED_NAMES: Final = frozenset({"meta", "transactions", "delay", ARCHIVE_NAME, "lock"})

DESCRIPTORS_LEFT: Final = 8
"""File descriptors that must be free after a topic was created, because connections and segment rolls need them."""


class OpenedPartition(NamedTuple):
    """A partition's open log, with the producer state that recovery rebuilt."""

    number: int
    log: Log
    producers: ProducerState


class PartitionDirs:
    """All partition folders in the data folder `data`.

    The log id in a folder's checkpoint says to which topic incarnation the folder belongs; folders that belong to no
    topic are never used. The folders of a deleted topic are first renamed to names that no topic can have. So a new
    topic of the same name can be created before the old files are deleted.
    """

    def __init__(self, runtime: Runtime, producers: Callable[[], ProducerState]) -> None:
        self._runtime, self._producers = runtime, producers
        self._disk, self._data = runtime.disk, runtime.data
        self.is_stopping = False
        """Set when the broker stops. From then on no partition is created, and a creation in progress fails."""

    def path(self, name: str, number: int) -> str:
        return join(self._data, partition_folder(name, number))

    def log_options(self, name: str, number: int, own: Mapping[str, Any]) -> LogOptions:
        """Return the log options for one partition of a topic. `own` has the settings made for this topic only."""
        values = self._runtime.settings(name, own)
        archive = values["retention.action"] == "archive"
        return LogOptions(
            segment_bytes=values["log.segment_bytes"],
            segment_seconds=self._segment_seconds(name, own, values),
            flush_messages=values["flush.messages"],
            flush_seconds=values["flush.seconds"],
            retention_seconds=values["retention.seconds"],
            retention_bytes=values["retention.bytes"],
            retention_action="archive" if archive else "delete",
            archive_folder=self.archive_folder(name, number) if archive else None,
            state_bytes=values["log.state_bytes"],
            verify=values["log.verify"],
        )

    def _segment_seconds(self, name: str, own: Mapping[str, Any], values: Mapping[str, Any]) -> float:
        # The default of log.segment_seconds applies only if segments are deleted by age. Otherwise there is no use in
        # closing segments early, and each segment costs an open file descriptor. An explicit setting always applies.
        key = "log.segment_seconds"
        was_set = key in own or key in self._runtime.config.topic.get(name, {}) or key in self._runtime.config.origins
        return float(values[key]) if was_set or values["retention.seconds"] else 0

    # Create folders

    def create_missing(self, topic: TopicRow, made: list[str] | None = None) -> list[OpenedPartition]:
        """Create and open the partitions that the topic lacks. On error none of them stays open.

        A folder that an interrupted attempt has left is used. The paths of folders that this call creates are appended
        to `made`. On error the caller deletes only these folders, because the other ones may contain data. Raises Busy
        if the broker is stopping, WrongLog if an existing folder is not of this topic, Corrupt, OSError, Full.
        """
        opened: list[OpenedPartition] = []
        try:
            for number in range(topic.partitions, topic.target):
                if self.is_stopping:
                    raise Busy(STOPPING)
                path = self.path(topic.name, number)
                if not self._disk.exists(path):
                    self._disk.make_folder(path)
                    if made is not None:
                        made.append(path)
                names = self._disk.list(path)
                # An interrupted creation leaves at most an empty segment in the folder. If the folder has other files,
                # but no checkpoint, it does not belong to this topic.
                begun = all(
                    parse_segment_name(name) is not None and not self._disk.size(join(path, name)) for name in names
                )
                if log_checkpoint_name() not in names and not begun:
                    raise WrongLog(path, 0, 0, "the folder has files and no marks")
                opened.append(self.open(topic, number))
            self._disk.force_folder(self._data)
            self._require_descriptors()
        except BaseException:
            self.abandon(opened)
            raise
        return opened

    def _require_descriptors(self) -> None:
        spare: list[File] = []
        try:
            for _ in range(DESCRIPTORS_LEFT):
                spare.append(self._disk.open_anchor(self._data))
        finally:
            for each in spare:
                each.close()

    def abandon(self, opened: list[OpenedPartition]) -> None:
        """Close the logs of partitions whose creation failed, without writing to them."""
        for each in opened:
            each.log.abandon("its topic could not be made")

    def create_archives(self, topic: Topic, settings: Mapping[str, Any]) -> None:
        """Create the archive folders that the topic needs with these settings. Raises OSError, Full."""
        for number in range(len(topic.partitions)):
            archive = self.log_options(topic.name, number, settings).archive_folder
            if archive is not None:
                self.create_archive(archive)

    def open(self, topic: TopicRow, number: int) -> OpenedPartition:
        """Open and recover a partition's log. Raises WrongLog (wrong topic), Corrupt, NewerFormat, OSError, Full."""
        producers = self._producers()
        options = self.log_options(topic.name, number, topic.settings)
        if options.archive_folder is not None:
            self.create_archive(options.archive_folder)
        opened = Log.open(
            self._disk,
            self.path(topic.name, number),
            log_id=make_log_id(topic.incarnation, number),
            clock=self._runtime.clock,
            options=options,
            state=producers,
        )
        log_recovery(opened)
        return OpenedPartition(number, opened, producers)

    def archive_folder(self, name: str, number: int) -> str:
        """Return the folder for archived segments of a partition."""
        return join(join(self._data, ARCHIVE_NAME), partition_folder(name, number))

    def create_archive(self, path: str) -> None:
        """Create the folder `path` for archived segments, unless it exists. Raises OSError, Full."""
        above = join(self._data, ARCHIVE_NAME)
        for folder, parent in ((above, self._data), (path, above)):
            if not self._disk.exists(folder):
                self._disk.make_folder(folder)
                self._disk.force_folder(parent)

    def new_partition(self, topic: TopicRow, opened: OpenedPartition) -> Partition:
        return Partition(topic.name, topic.incarnation, opened.number, opened.log, opened.producers, self._runtime)

    def open_or_reason(self, topic: TopicRow, number: int) -> Partition | OpenError:
        """Open a partition, or return the reason why that fails.

        If the partition's folder is missing or empty, a new log is created there and stopped, because an operator has
        to restore the messages, or accept their loss, before anything is written.
        """
        path = self.path(topic.name, number)
        try:
            is_there = self._disk.exists(path)
            missing = not is_there or (self._disk.is_folder(path) and not self._disk.list(path))
            if not is_there:
                self._disk.make_folder(path)
                self._disk.force_folder(self._data)
            opened = self.open(topic, number)
            if missing:
                opened.log.stop(f"{FOLDER_MISSING}: its content is lost, unless you restore it")
        except (OSError, JournalError) as error:
            reason = str(path_error_advice(error, self._data) or error)
            log.error("partition %s-%d is not served: %s", topic.name, number, reason)
            return reason
        partition = self.new_partition(topic, opened)
        partition.log_stop()
        return partition

    def unknown_folders(self, topics: Mapping[int, TopicRow]) -> list[str]:
        """Return the names of folders that are named like partitions but belong to no topic."""
        known = {(row.name, number) for row in topics.values() for number in range(row.target)}
        found = []
        for name in self._disk.list(self._data):
            topic_partition = parse_partition_folder(name)
            if topic_partition is not None and topic_partition not in known and name not in RESERVED_NAMES:
                found.append(name)
        return found

    # Delete folders

    def delete_created(self, made: list[str]) -> None:
        """Delete folders that `create_missing` created and whose logs are closed."""
        for path in made:
            if self._disk.exists(path):
                self._delete_folder(path)
        self._disk.force_folder(self._data)

    def rename_deleted(self, name: str, incarnation: int, count: int) -> list[str]:
        """Rename a deleted topic's folders, durably. Return their new paths. May be repeated after a crash."""
        paths = []
        for number in range(count):
            path = self.path(name, number)
            aside = join(self._data, f"{DELETED_PREFIX}{incarnation}-{number}")
            if self._disk.exists(path):
                self._disk.rename(path, aside)
            paths.append(aside)
        self._disk.force_folder(self._data)
        return paths

    def list_deleted(self) -> list[str]:
        """Return the paths of all existing folders that `rename_deleted` has renamed."""
        return [join(self._data, name) for name in self._disk.list(self._data) if name.startswith(DELETED_PREFIX)]

    def delete_renamed(self, paths: list[str]) -> None:
        """Delete renamed folders. If one cannot be deleted, that is logged, and the next start tries again."""
        for path in paths:
            try:
                if self._disk.exists(path):
                    self._delete_folder(path)
            except OSError as error:
                log.warning("%s of a deleted topic could not be removed: %s", path, error)

    def _delete_folder(self, path: str) -> None:
        for name in self._disk.list(path):
            self._disk.unlink(join(path, name))
        self._disk.remove_folder(path)


def log_recovery(opened: Log, *, damage: bool = True) -> None:
    """Write log lines about what the recovery of a log found and did. If `damage` is False, leave out the damage."""
    found = opened.recovery
    for warning in found.warnings:
        log.warning("%s: %s", opened.folder, warning)
    if found.cut_bytes:
        kept = f"a copy is {found.torn_path}" if found.torn_path else "nothing but zeros, or no room to keep them"
        log.warning("%s: %d bytes of an unfinished end were cut off (%s)", opened.folder, found.cut_bytes, kept)
    for first, next, reason in found.damage if damage else ():
        log.error(
            "%s is damaged from %d to %d: %s. The rest is served; `tfmq log repair` repairs it, with the broker"
            " stopped",
            opened.folder, first, next, reason,
        )  # fmt: skip
