"""A small file with two slots. A slot has a payload, a checksum and a sequence, which counts the writes.

A read returns the payload of the valid slot with the higher sequence. A torn write damages only the slot that is
written. After a write with an fsync, the next write uses the other slot. After a write without an fsync, the next write
uses the same slot, so that it never overwrites the last durable payload. docs/formats/mark.md has the format.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from enum import StrEnum
from struct import Struct
from typing import Final, Generic, TypeVar

from journal.crc32 import crc32
from journal.disk import Disk, write_all
from journal.errors import Corrupt, TooLarge

SLOT_SIZE: Final = 4096
"""A page, and a multiple of every usual sector size, so that a torn write of one slot does not touch the other."""

MAGIC: Final = b"TFMC"
SLOT_HEADER: Final = Struct(">4sIQI")
CHECKSUMMED: Final = Struct(">QI")

T = TypeVar("T")


class CheckpointState(StrEnum):
    """What a recovery has found of a checkpoint file."""

    GOOD = "good"
    NONE = "none"
    DAMAGED = "damaged"


class DualSlotFile:
    """The file with two slots at `path`. The first `write` creates the file. Not thread-safe."""

    def __init__(self, disk: Disk, path: str) -> None:
        self.path = path
        self._disk = disk
        self._sequence: int | None = None
        self._next_slot = 1
        self._earlier_writes_durable = False
        """False until the first write, which first fsyncs an existing file: its bytes may not be durable yet."""
        self._name_durable = False
        """False until the first fsynced write, which fsyncs the folder too, in case an unsynced write made the file.
        The recovery of a log relies on this also for the name of its last segment."""

    def read(self) -> tuple[int, bytes] | None:
        """(sequence, payload) of the newest valid slot; None if both slots are empty; otherwise Corrupt is raised."""
        data = self._read_slots()
        found = [(*slot, number) for number in (0, 1) if (slot := self._decode(data, number)) is not None]
        if found:
            sequence, payload, number = max(found)
            self._sequence, self._next_slot = sequence, 1 - number
            return sequence, payload
        if any(data):
            raise Corrupt(self.path, 0, len(data), "neither of its two slots is valid")
        self._sequence = 0
        return None

    def damaged_slots(self) -> list[tuple[int, int]]:
        """(first, next) positions of invalid slots. If both are invalid, an empty one is omitted. Raises OSError."""
        data, size = self._read_slots(), SLOT_SIZE
        bad = [n for n in (0, 1) if self._decode(data, n) is None]
        if len(bad) > 1:
            bad = [n for n in bad if any(data[n * size : (n + 1) * size])]
        return [(n * size, (n + 1) * size) for n in bad]

    def write(self, payload: bytes, fsync: bool) -> int:
        """Write `payload` to one slot; return its new sequence. With `fsync`, slot and file name are durable on return.

        Raises Full, OSError, and TooLarge if the payload does not fit a slot.
        """
        if SLOT_HEADER.size + len(payload) > SLOT_SIZE:
            raise TooLarge("a slot's payload", len(payload), SLOT_SIZE - SLOT_HEADER.size)
        if self._sequence is None:
            try:
                self.read()
            except Corrupt:
                # Both slots are lost, so this write alone defines the content of the file.
                self._sequence = 0
        assert self._sequence is not None
        sequence = self._sequence + 1
        covered = CHECKSUMMED.pack(sequence, len(payload)) + payload
        slot = SLOT_HEADER.pack(MAGIC, crc32(covered), sequence, len(payload)) + payload
        made = not self._disk.exists(self.path)
        file = self._disk.create(self.path) if made else self._disk.open_write(self.path)
        try:
            if not made and not self._earlier_writes_durable:
                file.force()
            write_all(file, [slot], self._next_slot * SLOT_SIZE)
            if fsync:
                file.force()
        finally:
            file.close()
        if fsync and not self._name_durable:
            self._disk.force_folder(self.path.rpartition("/")[0] or ".")
            self._name_durable = True
        self._earlier_writes_durable = True
        self._sequence = sequence
        if fsync:
            self._next_slot = 1 - self._next_slot
        return sequence

    def _read_slots(self) -> bytes:
        if not self._disk.exists(self.path):
            return b""
        with closing(self._disk.open_read(self.path)) as file:
            return file.pread(2 * SLOT_SIZE, 0)

    def _decode(self, data: bytes, number: int) -> tuple[int, bytes] | None:
        start = number * SLOT_SIZE
        if start + SLOT_HEADER.size > len(data):
            return None
        magic, crc, sequence, size = SLOT_HEADER.unpack_from(data, start)
        begins = start + SLOT_HEADER.size
        if magic != MAGIC or size > SLOT_SIZE - SLOT_HEADER.size or begins + size > len(data):
            return None
        payload = data[begins : begins + size]
        if crc32(CHECKSUMMED.pack(sequence, size) + payload) != crc:
            return None
        return sequence, payload


class CheckpointFile(Generic[T]):
    """A checkpoint in a `DualSlotFile`. Not thread-safe: the log or journal that owns it calls it under a lock."""

    def __init__(self, disk: Disk, path: str, encode: Callable[[T], bytes], decode: Callable[[bytes], T]) -> None:
        self.path = path
        self._slots = DualSlotFile(disk, path)
        self._encode = encode
        self._decode = decode

    def read(self) -> T | None:
        """Return the checkpoint; None if none was written. Raises Corrupt (no slot is valid), NewerFormat, OSError."""
        found = self._slots.read()
        return None if found is None else self._decode(found[1])

    def damaged_slots(self) -> list[tuple[int, int]]:
        return self._slots.damaged_slots()

    def write_durably(self, checkpoint: T) -> None:
        """Write both slots, each fsynced. Durable on return. Raises OSError, Full."""
        payload = self._encode(checkpoint)
        self._slots.write(payload, fsync=True)
        self._slots.write(payload, fsync=True)

    def write_unsynced(self, checkpoint: T) -> None:
        """Write one slot without an fsync. Raises OSError, Full."""
        self._slots.write(self._encode(checkpoint), fsync=False)
