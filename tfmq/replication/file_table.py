"""The table of the replicated files, and views of it: the folder as it was at one operation, for a snapshot.

A view costs no copy of the folder. Before an operation changes bytes that a view still needs, the view saves them, in
memory; of a larger file that is unlinked, it keeps an open handle instead. If that exceeds the limits below, the view
is lost, and the snapshot begins again: an operation of the broker never fails because of a snapshot.

`RecordingDisk` calls everything here with its lock held, except what is documented as safe in any thread.
"""

from __future__ import annotations

import errno
from contextlib import closing
from threading import Lock
from typing import Final

from journal.disk import Disk, File
from journal.errors import Full
from journal.filenames import join
from tfmq.replication.entries import Position
from tfmq.replication.errors import SnapshotLost
from tfmq.replication.operations import is_below, is_replicated

SAVED_BYTES_MAX: Final = 16 << 20
"""Maximum bytes that a view saves before they are changed."""
SAVED_FILE_BYTES_MAX: Final = 64 << 10
"""The content of a file of at most this size is saved when the file is unlinked; a larger file is kept open."""
HANDLES_MAX: Final = 64
"""Maximum unlinked files that a view keeps open: each needs a descriptor, and its disk space is not free before."""


class TrackedFile:
    """A replicated file, under whatever name it has now.

    `changed`: the position of the first byte that may differ from the last snapshot, in which the file had the path
    `base_path`; None if it was not there. Never more than `size`.
    """

    __slots__ = ("base_path", "changed", "name", "path", "size", "viewed", "watched_below")

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self.name: bytes | None = path.encode()
        """The encoded path; None since the file was unlinked, so that nothing of it is recorded any more."""
        self.size = size
        self.changed = 0
        self.base_path: str | None = None
        self.watched_below = 0
        """Before bytes below this position are changed, `before_change` must be called."""
        self.viewed: ViewedFile | None = None

    def move(self, path: str) -> None:
        """Note that the file was renamed."""
        self.path, self.name = path, path.encode()

    def before_change(self, position: int, end: int) -> None:
        """Note that the bytes from `position` to `end` are about to be changed or cut off."""
        self.changed = min(self.changed, position)
        if self.viewed is None:
            self.watched_below = self.changed
        else:
            self.viewed.view.save(self.viewed, position, end)


class ViewedFile:
    """A file in a view, as it was when the view began. The attributes are those of `TrackedFile` at that moment.

    The bytes before `changed` are those of the file `base_path` in the snapshot `FolderView.base`.
    """

    __slots__ = ("base_path", "changed", "handle", "lowest", "path", "saved", "size", "tracked", "view")

    def __init__(self, view: FolderView, tracked: TrackedFile) -> None:
        self.view = view
        self.path = tracked.path
        self.size = tracked.size
        self.changed = tracked.changed
        self.base_path = tracked.base_path
        self.tracked = tracked
        self.lowest = tracked.size
        """The first byte that was changed since the view began."""
        self.saved: list[tuple[int, bytes]] | None = []
        """(position, bytes) of what was there before a change, in their order; None if no more needs to be saved."""
        self.handle: File | None = None


class FolderView:
    """The replicated folder as it was after the operation `number`: folders, and files in the order of their paths.

    `base`: the snapshot that the attributes of the files refer to; None if there is none. All methods may be called in
    any thread. The view must be ended by `commit` or `close`.
    """

    def __init__(self, table: FileTable, lock: Lock, number: int) -> None:
        self.number = number
        self.base = table.base
        self.folders = sorted(table.folders)
        self.files = [ViewedFile(self, table.files[path]) for path in sorted(table.files)]
        self._table = table
        self._lock = lock
        self._is_lost = False
        self._saved_bytes = 0
        self._handles_of_unlinked = 0
        for file in self.files:
            file.tracked.viewed = file
            file.tracked.watched_below = file.size

    def read(self, file: ViewedFile, position: int, size: int) -> bytes:
        """Return bytes of a file as they were when the view began; fewer than `size` only at the end of the file.

        One thread reads a file at a time. Raises SnapshotLost, Full, and OSError, also if the file is shorter now
        although no operation has cut it off.
        """
        size = max(0, min(size, file.size - position))
        with self._lock:
            self._require_kept()
            if file.saved is None:
                raise ValueError(f"{file.path} was released")
            if file.handle is None and file.tracked.name is not None:
                file.handle = self._table.open_read(file.tracked.path)
            handle = file.handle
        # The bytes may be changed while they are read. Then the old ones were saved before.
        data = b"" if handle is None else handle.pread_uncached(size, position)
        with self._lock:
            self._require_kept()
            saved = file.saved or []
            if not saved:
                if len(data) < size:
                    raise OSError(errno.EIO, "the file has fewer bytes than were written to it", file.path)
                return bytes(data)
            whole = bytearray(data).ljust(size, b"\0")
            # Bytes that were saved twice were saved first as they were when the view began: the first ones count.
            for start, piece in reversed(saved):
                first, last = max(start, position), min(start + len(piece), position + size)
                if first < last:
                    whole[first - position : last - position] = piece[first - start : last - start]
        return bytes(whole)

    def release(self, file: ViewedFile) -> None:
        """Say that no more of the file will be read: from now on, changes of it need not be saved."""
        with self._lock:
            if file.saved is not None:
                self._saved_bytes -= sum(len(piece) for _, piece in file.saved)
                file.saved = None
            if self._table.view is self:
                file.tracked.watched_below = file.lowest
            handle, file.handle = file.handle, None
        if handle is not None:
            handle.close()

    def commit(self, snapshot: Position) -> None:
        """End the view because it is stored as a snapshot: later views say what has changed since this one."""
        with self._lock:
            self._require_kept()
            self._table.base = snapshot
            for file in self.files:
                file.tracked.changed = file.lowest
                file.tracked.base_path = file.path
        self.close()

    def close(self) -> None:
        """End the view, with or without a snapshot. No thread may be reading. Repeated calls do nothing."""
        with self._lock:
            self._detach()
        for file in self.files:
            handle, file.handle = file.handle, None
            if handle is not None:
                handle.close()

    def save(self, file: ViewedFile, position: int, end: int) -> None:
        """Save the bytes from `position` to `end` before they are changed. With the lock held; raises nothing."""
        file.lowest = min(file.lowest, position)
        if file.saved is None:
            file.tracked.watched_below = file.lowest
            return
        if file.tracked.name is None and file.handle is None:
            return  # all of it was saved before it was unlinked
        end = min(end, file.size)
        if any(start <= position and end <= start + len(piece) for start, piece in file.saved):
            return
        if self._saved_bytes + end - position > SAVED_BYTES_MAX:
            self._lose()
            return
        try:
            if file.handle is not None:
                piece = file.handle.pread(end - position, position)
            else:
                with closing(self._table.open_read(file.tracked.path)) as opened:
                    piece = opened.pread(end - position, position)
        except (OSError, Full):
            self._lose()  # it is the snapshot that fails, not the change
            return
        file.saved.append((position, piece))
        self._saved_bytes += len(piece)

    def before_unlink(self, file: ViewedFile) -> None:
        """Keep what is needed of a file that is about to lose its name. With the lock held; raises nothing."""
        if file.saved is None or file.handle is not None:
            return
        if file.size <= SAVED_FILE_BYTES_MAX:
            self.save(file, 0, file.size)
            return
        self._handles_of_unlinked += 1
        if self._handles_of_unlinked > HANDLES_MAX:
            self._lose()
            return
        try:
            file.handle = self._table.open_read(file.tracked.path)
        except (OSError, Full):
            self._lose()

    def _lose(self) -> None:
        # The handles stay open until `close`, because a thread may be reading.
        self._is_lost = True
        self._detach()

    def _detach(self) -> None:
        if self._table.view is self:
            self._table.view = None
            for file in self.files:
                file.saved = None
                file.tracked.viewed = None
                file.tracked.watched_below = file.tracked.changed

    def _require_kept(self) -> None:
        if self._is_lost:
            raise SnapshotLost("the folder changed too much while the snapshot was made: it begins again")
        if self._table.view is not self:
            raise ValueError("the view has ended")


class FileTable:
    """The replicated files and folders below `root`. `view`: the view that has not ended, if there is one."""

    def __init__(self, disk: Disk, root: str, base: Position | None) -> None:
        """Read the names and sizes of all files. If `base` is given, they are as in that snapshot. Raises OSError."""
        self._disk = disk
        self._root = root
        self.files: dict[str, TrackedFile] = {}
        self.folders: set[str] = set()
        self.base = base
        self.view: FolderView | None = None
        if disk.exists(root):
            self._scan("")
        for path, file in self.files.items() if base is not None else ():
            file.changed = file.watched_below = file.size
            file.base_path = path

    def open_read(self, path: str) -> File:
        return self._disk.open_read(join(self._root, path))

    def add(self, path: str) -> TrackedFile:
        file = self.files[path] = TrackedFile(path, 0)
        return file

    def before_unlink(self, path: str) -> None:
        """Note that the file at `path`, if there is one, is about to lose its name."""
        file = self.files.get(path)
        if file is not None and file.viewed is not None:
            file.viewed.view.before_unlink(file.viewed)

    def remove(self, path: str) -> None:
        """Remove the file at `path`. Its name was removed, or another file gets its name."""
        file = self.files.pop(path, None)
        if file is not None:
            file.name = None

    def rename(self, source: str, target: str) -> None:
        """Rename a file or a folder. It replaces what is at `target`."""
        self.remove(target)
        files, folders = self.contents(source)
        for path in folders:
            self.folders.remove(path)
            self.folders.add(target + path[len(source) :])
        for path in files:
            file = self.files.pop(path)
            file.move(target + path[len(source) :])
            self.files[file.path] = file

    def contents(self, path: str) -> tuple[list[str], list[str]]:
        """Return the files and the folders at `path` and below it; a folder after those in it."""
        if path not in self.folders:
            return [path] if path in self.files else [], []
        files = [each for each in self.files if is_below(each, path)]
        return files, sorted((each for each in self.folders if is_below(each, path)), reverse=True)

    def _scan(self, folder: str) -> None:
        full = join(self._root, folder) if folder else self._root
        for name in self._disk.list(full):
            path = f"{folder}/{name}" if folder else name
            if not is_replicated(path):
                continue
            if self._disk.is_folder(join(full, name)):
                self.folders.add(path)
                self._scan(path)
            else:
                self.files[path] = TrackedFile(path, self._disk.size(join(full, name)))
