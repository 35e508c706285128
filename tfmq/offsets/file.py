"""Offsets in one JSON file, which is replaced whole: a crash leaves the old one or the new one."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from journal.disk import Disk, Lock, RealDisk, write_all
from journal.errors import Locked
from tfmq.errors import Closed, Damaged, Fenced, NotAllowed, NotSupported
from tfmq.offsets.stored import PartitionName, StoredOffset

FILE_VERSION: Final = 1
FILE_BYTES_MAX: Final = 64 << 20
"""Larger than any file of offsets of every partition that a broker may have; a wrong path is not read into memory."""


class FileOffsets:
    """Offsets in one JSON file, which is replaced whole: a crash leaves the old one or the new one.

    Only one consumer at a time has the file: `PATH.lock` is held from the first use to `close`. Every call raises
    NotAllowed if another has it, Damaged if the file is not what was written, OSError where the disk fails.
    """

    def __init__(self, path: str, disk: Disk | None = None) -> None:
        self.path = os.path.abspath(os.path.expanduser(path))
        self._disk = disk or RealDisk()
        self._lock: Lock | None = None
        self._groups: dict[str, Any] = {}
        self._closed = False

    def read(self, group: str, partitions: Sequence[PartitionName]) -> dict[PartitionName, StoredOffset]:
        """As `OffsetStorage.read`."""
        self._open()
        kept = self._groups.get(group, {}).get("offsets", {})
        return {
            name: StoredOffset(*map(row.__getitem__, StoredOffset._fields))
            for name in partitions
            if (row := kept.get(name.topic, {}).get(str(name.partition))) is not None
        }

    def save(self, group: str, generation: int, offsets: Mapping[PartitionName, StoredOffset]) -> None:
        """As `OffsetStorage.save`."""
        self._open()
        old = self._groups.get(group, {"generation": 0, "offsets": {}})
        if generation < old["generation"]:
            raise Fenced(
                f"{self.path}: group {group} has saved as generation {old['generation']}, this member is of"
                f" generation {generation}: another one took its place."
            )
        topics = {topic: dict(rows) for topic, rows in old["offsets"].items()}
        for name, stored in offsets.items():
            topics.setdefault(name.topic, {})[str(name.partition)] = stored._replace(
                generation=generation
            )._asdict()
        groups = {**self._groups, group: {"generation": generation, "offsets": topics}}
        self._replace(json.dumps({"version": FILE_VERSION, "groups": groups}, indent=1).encode())
        self._groups = groups

    def close(self) -> None:
        """Gives the lock back."""
        self._closed = True
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def _open(self) -> None:
        if self._closed:
            raise Closed(f"The offset file {self.path} was closed.")
        if self._lock is not None:
            return
        try:
            lock = self._disk.lock(f"{self.path}.lock")
        except Locked as locked:
            by = f" (process {locked.holder})" if locked.holder else ""
            raise NotAllowed(f"The offset file {self.path} is in use by another consumer{by}.") from None
        try:
            self._groups = self._load()
        except BaseException:
            lock.release()
            raise
        self._lock = lock

    def _load(self) -> dict[str, Any]:
        if not self._disk.exists(self.path):
            return {}
        size = self._disk.size(self.path)
        if size > FILE_BYTES_MAX:
            raise self._damaged(f"it has {size} bytes")
        file = self._disk.open_read(self.path)
        try:
            text = file.pread(size, 0)
        finally:
            file.close()
        try:
            whole = json.loads(text)
        except ValueError as error:
            raise self._damaged(str(error)) from None
        return self._checked(whole)

    def _checked(self, whole: Any) -> dict[str, Any]:
        """The groups in a parsed file, every field of them looked at."""
        version = whole.get("version") if isinstance(whole, dict) else None
        if isinstance(version, int) and version > FILE_VERSION:
            raise NotSupported(f"{self.path} is of version {version}; this release knows {FILE_VERSION}.")
        groups = whole.get("groups") if version == FILE_VERSION else None
        if not isinstance(groups, dict) or not all(map(_sound_group, groups.values())):
            raise self._damaged("its fields are not those of offsets")
        return groups

    def _damaged(self, reason: str) -> Damaged:
        return Damaged(
            f"{self.path} is not a file of offsets that this release wrote: {reason}. Bring back a copy, or move it"
            " away to begin as a group without offsets."
        )

    def _replace(self, content: bytes) -> None:
        """The file has `content` when this returns, also after a power cut."""
        disk, new = self._disk, f"{self.path}.new"
        if disk.exists(new):
            disk.unlink(new)
        file = disk.create(new)
        try:
            write_all(file, [content], 0)
            file.force()
        finally:
            file.close()
        disk.rename(new, self.path)
        disk.force_folder(os.path.dirname(self.path))


def _sound_group(group: Any) -> bool:
    if not isinstance(group, dict) or not _whole(group.get("generation")):
        return False
    topics = group.get("offsets")
    return isinstance(topics, dict) and all(
        isinstance(rows, dict) and all(_sound_row(partition, row) for partition, row in rows.items())
        for rows in topics.values()
    )


def _sound_row(partition: str, row: Any) -> bool:
    return (
        partition.isdecimal()
        and isinstance(row, dict)
        and all(_whole(row.get(field)) for field in ("offset", "index", "incarnation", "generation"))
        and type(row.get("epoch")) is int
    )


def _whole(value: Any) -> bool:
    return type(value) is int and value >= 0
