"""One segment file: control blocks from its first byte on, appended while it is the last one, then only read.

Its name says the partition offset of its first byte (`base`); inside it we speak of positions, and `base +
position` is an offset. With it goes its index, which is loaded, or made from the control records, when it is
first needed. docs/formats/segment.md is the page of this format.

Threads: one owner changes it; `pread` and `pread_cached` may run in others.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from journal import filenames
from journal.disk import Bytes, Disk, File, write_all
from journal.errors import Closed, Full
from journal.log.index import Index, Place
from journal.record.block import BLOCK_SPAN_MAX, Block, blocks_of, find_next_control
from journal.record.block_trailer import CONTROL_SIZE, Control, decode_control
from journal.record.format import BadRecord, Incomplete

SCAN_SIZE: Final = 1 << 20
"""Bytes that a walk reads at a time; it doubles where one block is larger."""
SHORTER: Final = "the file is shorter than the log: it was cut, or the segment after it is missing"


class Good(NamedTuple):
    """Behind damage: a block begins at `position` of the segment, its first record has `ordinal`.

    `control`: the control record that closes the bad block, if only the records before it are damaged.
    """

    position: int
    ordinal: int
    control: Control | None = None


class Segment:
    """See the module. Made by `create` or `open`."""

    def __init__(self, disk: Disk, file: File, folder: str, base: int, log_id: int) -> None:
        self.disk = disk
        self.path = file.path
        self.base = base
        self.log_id = log_id
        self.size = file.size()
        """Bytes in the file that belong to the log; what a failed write left behind them does not."""
        self.sealed = False
        self.index_error: OSError | Full | None = None
        """Why the index file is no longer written; the index in memory is whole all the same."""
        self._file: File | None = file
        self._index_path = filenames.join(folder, filenames.index_name(base))
        self._index: Index | None = None
        self._oldest_ms: int | None = None

    @classmethod
    def create(
        cls, disk: Disk, folder: str, base: int, log_id: int, suffix: str = filenames.SEGMENT_SUFFIX
    ) -> Segment:
        """A new, empty segment. Its name survives a power cut once the caller has forced the folder.

        An index left by a segment that was cut away is dropped. Raises FileExistsError, Full, OSError.
        """
        file = disk.create(filenames.join(folder, filenames.segment_name(base, suffix)))
        segment = cls(disk, file, folder, base, log_id)
        if disk.exists(segment._index_path):
            disk.unlink(segment._index_path)
        segment._index = Index(segment._index_path, base, log_id)
        return segment

    @classmethod
    def open(
        cls,
        disk: Disk,
        folder: str,
        base: int,
        log_id: int,
        *,
        writable: bool,
        suffix: str = filenames.SEGMENT_SUFFIX,
    ) -> Segment:
        """An existing segment, without a look at what is in it; `writable`: the last one. Raises OSError."""
        path = filenames.join(folder, filenames.segment_name(base, suffix))
        file = disk.open_write(path) if writable else disk.open_read(path)
        segment = cls(disk, file, folder, base, log_id)
        segment.sealed = not writable
        return segment

    @property
    def end(self) -> int:
        """The offset behind the last byte."""
        return self.base + self.size

    @property
    def file(self) -> File:
        """The open file, for a force. Raises Closed."""
        if self._file is None:
            raise Closed(self.path)
        return self._file

    @property
    def index(self) -> Index:
        """The index, complete up to `size`. The first use reads the files; damaged ranges are passed over."""
        if self._index is None:
            index = Index.load(self.disk, self._index_path, self.base, self.log_id, self.size)
            self._drop_stale(index)
            self._complete(index)
            self._index = index
        return self._index

    @property
    def oldest_ms(self) -> int | None:
        """The append time of the first sound block; None without any. The first use reads."""
        if self._oldest_ms is None and self.size:
            first = next(self.sound_blocks(), None)
            self._oldest_ms = None if first is None else first.control.append_time
        return self._oldest_ms

    @property
    def indexed(self) -> bool:
        """True once the index is in memory: then `index` reads nothing, and may be used in any thread."""
        return self._index is not None

    def append(self, buffers: Sequence[Bytes], controls: Sequence[Control]) -> None:
        """Writes whole control blocks at the end, in one vectored write, and adds `controls` to the index.

        Raises Full, with the file cut back to what it was; any other OSError (also from that cut) leaves
        unknown bytes behind `size`, and the owner must stop the log.
        """
        if self.sealed:
            raise Closed(self.path)
        index = self.index
        try:
            written = write_all(self.file, buffers, self.size)
        except Full:
            self._take_back(buffers)
            raise
        for control in controls:
            index.add(control)
        self.size += written
        self.write_index(all=False)

    def _take_back(self, buffers: Sequence[Bytes]) -> None:
        """Cuts off what a refused append left. Forced, if only zeros were missing: else a power cut, behind a
        later append that lets the file grow again, could complete what was refused."""
        written = self.file.size() - self.size
        try:
            self.file.truncate(self.size)
        except Full as error:
            # What is left could complete a shorter append that comes to lie before it: nothing to go on with.
            raise OSError(errno.EIO, f"a failed write cannot be cut off: {error}", self.path) from error
        if written and not any(b"".join(buffers)[written:]):
            self.file.force()

    def write_index(self, *, all: bool = True) -> None:
        """Brings the index file up to date. It is derived, so an error is kept in `index_error`, and the file
        left as it is: the next `open` completes it."""
        if self.index_error is not None or self._index is None:
            return
        try:
            self._index.write(self.disk, all=all)
        except (Full, OSError) as error:
            self.index_error = error

    def pread(self, size: int, position: int) -> bytes:
        """Up to `size` bytes of the log from `position`. Raises OSError, Closed."""
        return self.file.pread(min(size, self.size - position), position)

    def pread_cached(self, size: int, position: int) -> bytes | bytearray | None:
        """As `pread`, but None where it would wait for the disk."""
        return self.file.pread_cached(min(size, self.size - position), position)

    def force(self) -> None:
        """Every byte written survives a power cut when this returns. Raises OSError; never call it again
        then."""
        self.file.force()

    def seal(self) -> None:
        """Forces the file; from now on it is only read. Raises OSError."""
        index = self.index
        self.force()
        self.sealed = True
        index.close_run()
        self.write_index()
        index.close()

    def cut(self, position: int) -> None:
        """Cuts the file at `position`, which is a block's start. Raises OSError."""
        self.file.truncate(position)
        self.size = position
        self._oldest_ms = None
        if self._index is not None:
            self._index.cut(position)
            self._index.fault = self._index.fault or "cut"
            self._complete(self._index)

    def close(self) -> None:
        """Gives the descriptors back; twice is harmless. Unforced bytes must have been forced before."""
        if self._index is not None:
            self.write_index()
            self._index.close()
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def blocks(self, position: int = 0, end: int | None = None, *, verify: bool = True) -> Iterator[Block]:
        """The control blocks from the block's start `position` to `end` (a block's end, or the segment's).

        Raises as `blocks_of`, with positions in this segment, where the first bad block begins.
        """
        end = self.size if end is None else end
        size = SCAN_SIZE
        ordinal: int | None = None
        while position < end:
            wanted = min(size, end - position)
            data = self.pread(wanted, position)
            start = position
            try:
                for block in blocks_of(data, self.base + start, self.log_id, verify=verify):
                    if ordinal not in (None, block.control.first_ordinal):
                        found = block.control.first_ordinal
                        raise BadRecord(position - start, f"first ordinal {found}, {ordinal} was to come")
                    yield block
                    ordinal = block.control.next_ordinal
                    position = block.next - self.base
            except Incomplete as error:
                if start + len(data) >= end:
                    raise error.at(start + error.position) from None
                size = SCAN_SIZE if position > start else size * 2
            except BadRecord as error:
                raise error.at(start + error.position) from None
            if len(data) < wanted:
                raise Incomplete(position, SHORTER)

    def next_good(self, bad: int) -> Good | None:
        """Where blocks begin again behind the bad block that begins at `bad`; None: nowhere up to the end.

        If only the records of the bad block are damaged, that is behind its control record; if that is lost
        too, where the first surviving control record says that its block begins.
        """
        position = bad
        while position < self.size:
            data = self.pread(BLOCK_SPAN_MAX + SCAN_SIZE, position)
            start = max(0, bad - position)
            claim = find_next_control(data, start, offset=self.base + position, log_id=self.log_id)
            if claim is not None:
                control = claim.control
                if control.offset == self.base + bad:
                    return Good(control.next - self.base, control.next_ordinal, control)
                return Good(control.offset - self.base, control.first_ordinal)
            if len(data) < BLOCK_SPAN_MAX + SCAN_SIZE:
                return None
            position += len(data) - BLOCK_SPAN_MAX
        return None

    def sound_blocks(self, position: int = 0, *, verify: bool = False) -> Iterator[Block]:
        """As `blocks` up to the end, but goes on behind damage without a word."""
        while True:
            try:
                yield from self.blocks(position, verify=verify)
                return
            except BadRecord as error:
                good = self.next_good(error.position)
                if good is None:
                    return
                position = good.position

    def place_of_position(self, position: int) -> Place:
        """The block that holds `position`: where it begins, and its first ordinal. Raises as `blocks`."""
        place = self.index.by_position(position)
        for block in self.blocks(place.position, verify=False):
            start = block.offset - self.base
            if start <= position < block.next - self.base:
                return Place(start, block.control.first_ordinal)
        return Place(self.size, self.index.end_ordinal or 0)

    def _complete(self, index: Index) -> None:
        """Adds the blocks that lie behind the last entry. What nobody can read at the end belongs to no
        block."""
        for block in self.sound_blocks(index.end):
            index.add(block.control)
        if self.sealed:
            index.close_run()

    def _drop_stale(self, index: Index) -> None:
        """Drops entries that describe bytes which were cut off and written anew: the control record at a
        run's end must say what the entry says."""
        while len(index):
            entry = index.entry(-1)
            at = entry.position + entry.size - CONTROL_SIZE
            try:
                control = decode_control(self.pread(CONTROL_SIZE, at), 0, self.log_id)
            except BadRecord:
                control = None
            if (
                control is not None
                and control.end == self.base + at
                and control.next_ordinal == entry.first_ordinal + entry.records
            ):
                return
            index.cut(entry.position + entry.size - 1)
            index.fault = "stale"
