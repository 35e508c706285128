"""A data folder seen from outside: whether it is one, and which topics and partitions lie in it."""

from __future__ import annotations

import os
from typing import Final

from journal import filenames
from journal.disk import Disk
from journal.errors import Corrupt, NewerFormat
from journal.log.checkpoint import read_log_id
from journal.record.format import split_id
from tfmq.data_dir import META_NAME, VERSION_NAME, decode_version
from tfmq.errors import BadRequest, NotSupported, UnknownPartition, UnknownTopic
from tfmq.spark.ranges import PartitionLog

LISTINGS_MAX: Final = 5
"""So often a topic is looked at whose folders do not fit each other: it is being made, or deleted."""


class FolderTopics:
    """The folder at `path`, with a look at it now. Raises BadRequest, NotSupported, OSError: it is not for us."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self.path = path
        self.node = ""
        """The id of the broker whose folder it is, where it says that."""
        self._check()

    def names(self) -> list[str]:
        """All topics, sorted. Raises BadRequest, OSError."""
        return sorted(self._folders())

    def partitions(self, topic: str) -> list[PartitionLog]:
        """By number. Raises UnknownTopic, UnknownPartition (one is missing), Corrupt, NewerFormat, OSError."""
        trouble = ""
        for _ in range(LISTINGS_MAX):
            found = self._logs(topic)
            trouble = _trouble(found)
            if not trouble:
                break
        if not found:
            known = ", ".join(self.names()[:LISTINGS_MAX]) or "none"
            raise UnknownTopic(f"There is no topic {topic} in the folder {self.path}; it has {known}.")
        if trouble:
            raise UnknownPartition(f"The folder {self.path} does not have all of {topic}: {trouble}.")
        return found

    def folder(self, log: PartitionLog) -> str:
        """Where its files lie."""
        return filenames.join(self.path, filenames.partition_folder(log.topic, log.partition))

    def _logs(self, topic: str) -> list[PartitionLog]:
        """What has its mark by now."""
        found = []
        for number in sorted(self._folders().get(topic, ())):
            folder = filenames.join(self.path, filenames.partition_folder(topic, number))
            log_id = read_log_id(self._disk, folder)
            if log_id is not None:
                found.append(PartitionLog(topic, number, split_id(log_id)[0], log_id))
        return found

    def _folders(self) -> dict[str, list[int]]:
        """The numbers of partitions by topic, as folders with a mark say."""
        found: dict[str, list[int]] = {}
        for name in self._disk.list(self.path):
            place = filenames.parse_partition_folder(name)
            mark = filenames.join(filenames.join(self.path, name), filenames.mark_name())
            if place is not None and self._disk.exists(mark):
                found.setdefault(place[0], []).append(place[1])
        return found

    def _check(self) -> None:
        disk, path = self._disk, self.path
        if not disk.exists(path):
            raise BadRequest(
                f"There is no folder {path} on this machine: path names the data folder of a broker that runs here;"
                " write servers for one elsewhere."
            )
        if not disk.is_folder(path):
            raise BadRequest(f"{path} is a file: path names the data folder of a broker.")
        if disk.exists(filenames.join(path, filenames.mark_name())):
            above = path.rstrip("/").rpartition("/")[0]
            raise BadRequest(
                f"{path} is the folder of one partition: name the data folder above it, {above}, and the topic in"
                " subscribe."
            )
        meta = filenames.join(path, META_NAME)
        if disk.exists(meta):
            self._check_format(filenames.join(meta, VERSION_NAME))
        elif not self._folders():
            raise BadRequest(
                f"{path} is no data folder of a broker: it has neither {META_NAME} nor a partition in it."
            )

    def _check_format(self, path: str) -> None:
        if not self._disk.exists(path):
            return  # a broker that is being made: it has no topics
        file = self._disk.open_read(path)
        try:
            text = file.pread(file.size(), 0)
        finally:
            file.close()
        try:
            self.node = decode_version(text, path).node
        except Corrupt:
            return  # damaged; its marks have versions of their own
        except NewerFormat as error:
            raise NotSupported(
                f"The data folder {self.path} has format {error.found}, this tfmq knows up to {error.known}: upgrade it"
                " here."
            ) from error


def _trouble(logs: list[PartitionLog]) -> str:
    """What does not fit, in words; "" where all is well."""
    numbers = {log.partition for log in logs}
    missing = sorted(set(range(max(numbers, default=-1) + 1)) - numbers)
    if missing:
        return f"{'partition' if len(missing) == 1 else 'partitions'} {', '.join(map(str, missing))} missing"
    if len({log.incarnation for log in logs}) > 1:
        return "its partitions are those of different topics of that name"
    return ""


def absolute(path: str) -> str:
    """`path` as a data folder is named: absolute, ~ resolved, without file: before it."""
    return os.path.abspath(os.path.expanduser(path.removeprefix("file://").removeprefix("file:")))
