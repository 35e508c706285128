"""A small file with two alternating checksummed slots; the newest valid slot counts.

    slot        magic 4 bytes | crc u32 | sequence u64 | size u32 | payload | undefined
                crc: CRC-32 of sequence, size and payload

All numbers are big-endian. Slot n starts at n times the slot size, so that a torn write damages one slot
only. A write goes to the slot that does not have the last durable payload: that one stays valid until a newer
one is durable, even after many writes without fsync.
"""

from __future__ import annotations

import zlib
from struct import Struct
from typing import Final

from journal.disk import Disk, write_all
from journal.errors import Corrupt, TooLarge

SLOT_SIZE: Final = 4096
"""A page, and a multiple of every usual sector: a torn write of one slot does not touch the other."""

MAGIC: Final = b"TFMC"
SLOT_HEADER: Final = Struct(">4sIQI")
CHECKSUMMED: Final = Struct(">QI")


class DualSlotFile:
    """The file at `path`, created by the first write. Not thread-safe."""

    def __init__(self, disk: Disk, path: str, slot_size: int = SLOT_SIZE) -> None:
        self.path = path
        self._disk = disk
        self._slot_size = slot_size
        self._sequence: int | None = None
        self._next_slot = 1
        """Slot of the next write."""
        self._was_fsynced = False
        """True once this object has fsynced the file: what an earlier process wrote may not be durable."""

    def read(self) -> tuple[int, bytes] | None:
        """(sequence, payload) of the newest valid slot; None if nothing was ever written.

        Raises Corrupt if the file has data but no valid slot, OSError.
        """
        if not self._disk.exists(self.path):
            self._sequence = 0
            return None
        file = self._disk.open_read(self.path)
        try:
            data = file.pread(2 * self._slot_size, 0)
        finally:
            file.close()
        found = [(*slot, number) for number in (0, 1) if (slot := self._decode(data, number)) is not None]
        if found:
            sequence, payload, number = max(found)
            self._sequence, self._next_slot = sequence, 1 - number
            return sequence, payload
        if any(data):
            raise Corrupt(self.path, 0, len(data), "neither of its two slots is valid")
        self._sequence = 0
        return None

    def damaged_slots(self) -> list[int]:
        """Numbers of the slots that have data but are invalid. Raises OSError."""
        if not self._disk.exists(self.path):
            return []
        file = self._disk.open_read(self.path)
        try:
            data = file.pread(2 * self._slot_size, 0)
        finally:
            file.close()
        parts = (data[: self._slot_size], data[self._slot_size :])
        bad = [n for n in (0, 1) if self._decode(data, n) is None]
        return bad if len(bad) == 1 else [n for n in bad if any(parts[n])]

    def write(self, payload: bytes, fsync: bool) -> int:
        """Write the older slot and return its sequence.

        With `fsync` durable on return, with the folder entry.

        Raises TooLarge if the payload does not fit a slot, Full, OSError.
        """
        if SLOT_HEADER.size + len(payload) > self._slot_size:
            raise TooLarge("a slot's payload", len(payload), self._slot_size - SLOT_HEADER.size)
        sequence = self._next_sequence()
        covered = CHECKSUMMED.pack(sequence, len(payload)) + payload
        slot = SLOT_HEADER.pack(MAGIC, zlib.crc32(covered), sequence, len(payload)) + payload
        made = not self._disk.exists(self.path)
        file = self._disk.create(self.path) if made else self._disk.open_write(self.path)
        try:
            if not made and not self._was_fsynced:
                file.force()
            write_all(file, [slot], self._next_slot * self._slot_size)
            if fsync:
                file.force()
        finally:
            file.close()
        if made and fsync:
            self._disk.force_folder(self.path.rpartition("/")[0] or ".")
        self._was_fsynced = True
        self._sequence = sequence
        if fsync:
            self._next_slot = 1 - self._next_slot
        return sequence

    def _next_sequence(self) -> int:
        if self._sequence is None:
            try:
                self.read()
            except Corrupt:
                # Both slots are lost: this write defines the content of the file again.
                self._sequence = 0
        assert self._sequence is not None
        return self._sequence + 1

    def _decode(self, data: bytes, number: int) -> tuple[int, bytes] | None:
        start = number * self._slot_size
        if start + SLOT_HEADER.size > len(data):
            return None
        magic, crc, sequence, size = SLOT_HEADER.unpack_from(data, start)
        begins = start + SLOT_HEADER.size
        if magic != MAGIC or size > self._slot_size - SLOT_HEADER.size or begins + size > len(data):
            return None
        payload = data[begins : begins + size]
        if zlib.crc32(CHECKSUMMED.pack(sequence, size) + payload) != crc:
            return None
        return sequence, payload
