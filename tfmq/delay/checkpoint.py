"""The checkpoint of delayed delivery: which buckets count and up to which size, how far the arrivals are in them, and
broker time. docs/formats/bucket.md is the page of its format.

    magic "TFDK" | version u16 | zero u16 | store id u64 | salt u64 | offset u64 | number u64 | broker ms u64
    | counted u64 | count u32 | note size u32 | buckets: start u64, exponent u8, size u64, count u64, dead u64, `count`
    times | note | CRC-32 u32 of everything before

All numbers are big-endian. The file holds this twice, each copy in a half of the file. It is written beside the old
one, forced, and takes its name: a power cut leaves the one or the other, and a full disk leaves the old one. So
whatever is listed was forced before, and what is not listed never counted, or counts no more.
"""

from collections.abc import Sequence
from struct import Struct
from struct import error as StructError
from typing import Final, NamedTuple
from zlib import crc32

from journal import filenames
from journal.disk import Disk, write_all
from journal.errors import Corrupt, Full, NewerFormat, TooLarge
from tfmq.delay.bucket_file import Identity
from tfmq.delay.spans import Span

MAGIC: Final = b"TFDK"
VERSION: Final = 1
HEAD: Final = Struct(">4sHHQQQQQQII")
ROW: Final = Struct(">QBQQQ")
SUM: Final = Struct(">I")

NOTE_SIZE_MAX: Final = 8192
"""Of the note: two pages more at most."""
PAGE: Final = 4096
"""A copy fills whole pages: a torn or rotten one of a copy does not touch the other."""


class Listed(NamedTuple):
    """A bucket: up to `size` its file is forced, with `count` messages, `dead` of which nobody waits for any more."""

    span: Span
    size: int
    count: int  # type: ignore[assignment]
    dead: int = 0


class Checkpoint(NamedTuple):
    """`offset`, `number`: arrivals before are in the buckets, or were settled. `broker_ms`: broker time, at least.

    `note`: what the delay queue wants to find again, opaque here, at most NOTE_SIZE_MAX bytes. `counted`: `dead` has
    what is cancelled or moved by notes before this offset of the arrivals; 0: it is not known.
    """

    identity: Identity
    offset: int
    number: int
    broker_ms: int
    buckets: Sequence[Listed]
    note: bytes = b""
    counted: int = 0


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    """One copy. Raises TooLarge."""
    identity, offset, number, broker_ms, buckets, note, counted = checkpoint
    if len(note) > NOTE_SIZE_MAX:
        raise TooLarge("the note in the checkpoint", len(note), NOTE_SIZE_MAX)
    head = HEAD.pack(
        MAGIC, VERSION, 0, *identity, offset, number, broker_ms, counted, len(buckets), len(note)
    )
    rows = (ROW.pack(*bucket.span, bucket.size, bucket.count, bucket.dead) for bucket in buckets)
    data = b"".join([head, *rows, note])
    return data + SUM.pack(crc32(data))


def decode_checkpoint(data: bytes, position: int, path: str) -> Checkpoint:
    """The copy at `position` of the file, whose half `data` is. Raises Corrupt, NewerFormat."""

    def bad(reason: str) -> Corrupt:
        return Corrupt(path, position, position + len(data), reason)

    try:
        magic, version, zero, *numbers, count, note_size = HEAD.unpack_from(data)
        begins = HEAD.size + count * ROW.size
        end = begins + note_size
        (crc,) = SUM.unpack_from(data, end)
    except StructError:
        raise bad("shorter than it says") from None
    if magic != MAGIC or crc32(data[:end]) != crc:
        raise bad("it fails its checksum")
    if version > VERSION or zero:
        raise NewerFormat(path, version, VERSION)
    store_id, salt, offset, number, broker_ms, counted = numbers
    rows = ROW.iter_unpack(data[HEAD.size : begins])
    buckets = [Listed(Span(start, exponent), *sizes) for start, exponent, *sizes in rows]
    if not all(bucket.span.is_valid for bucket in buckets):
        raise bad("it names a span of time that cannot be")
    return Checkpoint(Identity(store_id, salt), offset, number, broker_ms, buckets, data[begins:end], counted)


class CheckpointFile:
    """The checkpoint in `folder`. One thread at a time."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self.disk = disk
        self.folder = folder
        self.path = filenames.join(folder, filenames.CHECKPOINT_NAME)

    def read(self) -> Checkpoint | None:
        """None if there is none. Raises Corrupt if neither copy is whole, NewerFormat, OSError."""
        if not self.disk.exists(self.path):
            return None
        faults = []
        for position, data in self._copies():
            try:
                return decode_checkpoint(data, position, self.path)
            except Corrupt as error:
                faults.append(error)
        raise Corrupt(
            self.path, 0, faults[-1].next, f"neither of its two copies is whole: {faults[0].reason}"
        )

    def faulty(self) -> list[Corrupt]:
        """What is wrong with the copies, one by one; nothing where there is no file. Raises NewerFormat, OSError."""
        faults = []
        for position, data in self._copies() if self.disk.exists(self.path) else ():
            try:
                decode_checkpoint(data, position, self.path)
            except Corrupt as error:
                faults.append(error)
        return faults

    def write(self, checkpoint: Checkpoint) -> None:
        """Returns when it survives a power cut. Raises Full, TooLarge (the old one counts), OSError (either does)."""
        copy = encode_checkpoint(checkpoint)
        copy += bytes(-len(copy) % PAGE)
        new = self.path + filenames.NEW_SUFFIX
        if self.disk.exists(new):
            self.disk.unlink(new)
        try:
            file = self.disk.create(new)
            try:
                write_all(file, [copy, copy], 0)
            except Full:
                file.close()
                raise
            # After a failed force it stays open: the error is the caller's, and closing could swallow it.
            file.force()
            file.close()
            self.disk.rename(new, self.path)
        except Full:
            if self.disk.exists(new):
                self.disk.unlink(new)
            raise
        self.disk.force_folder(self.folder)

    def settle(self) -> None:
        """Forces the checkpoint that was read: an earlier process may have written it without seeing it forced.

        Raises OSError.
        """
        file = self.disk.open_write(self.path)
        file.force()
        file.close()
        self.disk.force_folder(self.folder)

    def _copies(self) -> Sequence[tuple[int, bytes]]:
        file = self.disk.open_read(self.path)
        try:
            data = file.pread(file.size(), 0)
        finally:
            file.close()
        half = len(data) // 2
        return [(0, data[:half]), (half, data[half:])]
