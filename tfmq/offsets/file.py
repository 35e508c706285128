"""Offset storage in one JSON file, which is replaced atomically.

    {"version": 2, "groups": {GROUP: {TOPIC: {PARTITION: {"offset": ..., "index": ..., "incarnation": ..., "epoch": ...,
    "generation": ...}}}}}

Offset -1: the partition was claimed, but no offset is committed. A file of version 1 has one generation for each group
and no claims; such a file is read, and becomes one of version 2 when it is written.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from journal.disk import Disk, Lock, RealDisk, write_all
from journal.errors import Full, Locked
from tfmq.databases import is_permanent_error
from tfmq.errors import Busy, Closed, Damaged, NotSupported, StoreFailed
from tfmq.offsets.storage import NO_OFFSET, PartitionName, StoredOffset, fenced, under

FILE_VERSION: Final = 2
FILE_BYTES_MAX: Final = 64 << 20
"""Maximum size of the file, more than offsets take. Limited because a large file at a wrong path could fill memory."""
LOCK_PAUSE_SECONDS: Final = 0.005
LOCK_TRIES: Final = 2000
"""Attempts to lock the file: ten seconds in all, longer than other processes keep the lock even on a very slow disk."""

Rows = dict[PartitionName, StoredOffset]
UNKNOWN: Final = StoredOffset(NO_OFFSET, generation=-1)
"""Used for a partition that has no row in the file. Its generation is lower than that of every row."""


class FileOffsets:
    """Offset storage in a file, which all members of a group on one machine may share.

    `claim` and `save` lock the file `PATH.lock`, and raise Busy if it is still locked after LOCK_TRIES attempts. Every
    call raises Damaged if the file is invalid, and StoreFailed if the disk fails or is full. StoreFailed is retriable,
    unless the file cannot exist at `path`.
    """

    def __init__(self, path: str, disk: Disk | None = None, pause: Callable[[float], None] = time.sleep) -> None:
        # If `path` is a symbolic link, renaming the new file to it would replace the link, and leave the old file as a
        # second one.
        self.path = os.path.realpath(os.path.expanduser(path))
        self._disk = disk or RealDisk()
        self._pause = pause
        self._closed = False

    def read(self, group: str, partitions: Sequence[PartitionName]) -> dict[PartitionName, StoredOffset]:
        self._check_open()
        with self._translated_errors():
            return _stored_offsets(self._load().get(group, {}), partitions)

    def claim(
        self, group: str, generation: int, partitions: Sequence[PartitionName]
    ) -> dict[PartitionName, StoredOffset]:
        with self._translated_errors():
            return self._change(group, dict.fromkeys(partitions, generation), {})

    def save(self, group: str, generation: int, offsets: Mapping[PartitionName, StoredOffset]) -> None:
        new = {name: under(generation, row) for name, row in offsets.items()}
        with self._translated_errors():
            self._change(group, {name: row.generation for name, row in new.items()}, new)

    def close(self) -> None:
        """Make further calls raise Closed. Nothing is open between two calls."""
        self._closed = True

    def _change(
        self, group: str, generations: Mapping[PartitionName, int], new: Mapping[PartitionName, StoredOffset]
    ) -> dict[PartitionName, StoredOffset]:
        """Set the generations of the partitions' rows, and the offsets in `new`; return the committed offsets.

        If a row has a higher generation already, it is not changed. In this case raises Fenced after all other rows are
        changed.
        """
        lock = self._lock()
        try:
            groups = self._load()
            rows = groups.setdefault(group, {})
            before = {name: rows.get(name, UNKNOWN) for name in generations}
            lost = {name: row.generation for name, row in before.items() if row.generation > generations[name]}
            changed = {
                name: new.get(name, before[name])._replace(generation=generation)
                for name, generation in generations.items()
                if name not in lost and (name in new or before[name].generation < generation)
            }
            rows |= changed
            if changed:
                self._replace_file(_encode(groups))
        finally:
            lock.release()
        if lost:
            raise fenced(self.path, group, lost)
        return _stored_offsets(rows, generations)

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, Full) as error:
            reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
            is_permanent = is_permanent_error(error)
            advice = "its folder must exist, and this user must be allowed to write in it" if is_permanent else ""
            raise StoreFailed(
                f"The offsets are in {self.path}: {reason}{advice and '; ' + advice}.", retriable=not is_permanent
            ) from error

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"The offset file {self.path} was closed.")

    def _lock(self) -> Lock:
        self._check_open()
        holder = ""
        for _ in range(LOCK_TRIES):
            try:
                return self._disk.lock(f"{self.path}.lock")
            except Locked as locked:
                holder = locked.holder
                self._pause(LOCK_PAUSE_SECONDS)
        by = f" by process {holder}" if holder else ""
        raise Busy(f"The offset file {self.path} has been locked{by} for too long.", retriable=True)

    def _load(self) -> dict[str, Rows]:
        """Read the file; return the rows of each group, {} if there is no file. Raises Damaged if the file is invalid,
        NotSupported if a later release has written it."""
        if not self._disk.exists(self.path):
            return {}
        file = self._disk.open_read(self.path)
        try:
            text = file.pread(FILE_BYTES_MAX + 1, 0)
        finally:
            file.close()
        if len(text) > FILE_BYTES_MAX:
            raise self._damaged(f"it has more than {FILE_BYTES_MAX} bytes")
        try:
            whole = json.loads(text)
        except ValueError as error:
            raise self._damaged(str(error)) from None
        version = whole.get("version") if isinstance(whole, dict) else None
        if isinstance(version, int) and version > FILE_VERSION:
            raise NotSupported(f"{self.path} is of version {version}; this release knows {FILE_VERSION}.")
        try:
            return {name: DECODERS[version](group) for name, group in whole["groups"].items()}
        except (LookupError, TypeError, ValueError, AttributeError):
            raise self._damaged("its fields are not those of offsets") from None

    def _damaged(self, reason: str) -> Damaged:
        return Damaged(
            f"{self.path} is not a file of offsets that this release wrote: {reason}. Restore a copy, or move it"
            " away to start as a group without offsets."
        )

    def _replace_file(self, content: bytes) -> None:
        """Replace the file atomically by one with `content`, which is durable on return."""
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


def _stored_offsets(rows: Rows, partitions: Iterable[PartitionName]) -> Rows:
    found = {name: rows.get(name, UNKNOWN) for name in partitions}
    return {name: row for name, row in found.items() if row.offset != NO_OFFSET}


def _encode(groups: Mapping[str, Rows]) -> bytes:
    nested: dict[str, dict[str, dict[str, Any]]] = {}
    for group, rows in groups.items():
        topics = nested.setdefault(group, {})
        for name, row in rows.items():
            topics.setdefault(name.topic, {})[str(name.partition)] = row._asdict()
    return json.dumps({"version": FILE_VERSION, "groups": nested}, indent=1).encode()


def _decode_group(topics: Any, generation: int | None = None) -> Rows:
    """Decode the rows of a group. `generation`: the generation of all rows, or None if each row has its own. Raises
    LookupError, TypeError, ValueError or AttributeError for invalid rows."""
    own = {} if generation is None else {"generation": generation}
    found: Rows = {}
    for topic, rows in topics.items():
        for partition, row in rows.items():
            values = {**row, **own}
            stored = StoredOffset(*(values[field] for field in StoredOffset._fields))
            natural = (stored.index, stored.incarnation, stored.generation, stored.offset - NO_OFFSET)
            if any(type(value) is not int for value in stored) or min(natural) < 0:
                raise ValueError(row)
            found[PartitionName(topic, int(partition))] = stored
    return found


def _decode_group_of_version_1(group: Any) -> Rows:
    if type(group["generation"]) is not int or group["generation"] < 0:
        raise ValueError(group)
    return _decode_group(group["offsets"], group["generation"])


DECODERS: Final[Mapping[Any, Callable[[Any], Rows]]] = {1: _decode_group_of_version_1, FILE_VERSION: _decode_group}
"""Decoders of a group's rows, by the version of the file."""
