"""`checkpoint`: what a start of the transaction journal must know before it reads an entry. Two alternating slots.

    version u16 | snapshots u16 (0 to 2) | journal id u64 | salt u64 | forced u64 | file number u64
    | snapshots x (number u64, place u64), the newest first

All numbers are big-endian; the slots are those of journal.checkpoint. `forced` is a lower bound of the place up to
which the journal is forced, rewritten without a force, at most once a second, after the force that it reports. `file
number` is the highest that was known to be given to a file: numbering never goes back below it. A change of the
snapshots is written to both slots, each forced, before anything that the older ones need is removed: so a slot that
rots or tears takes at most a newer `forced` with it, and a snapshot that rots leaves the one before it.
docs/formats/journal.md is the format's page.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from journal import names
from journal.checkpoint import SLOT_SIZE, Slots
from journal.disk import Disk
from journal.errors import Corrupt, NewerFormat

VERSION: Final = 1
HEAD: Final = Struct(">HHQQQQ")
POINTER: Final = Struct(">QQ")

KEPT: Final = 2
"""Snapshots that count: the newest, and the one before it for the day the newest cannot be read."""

REWRITE_SECONDS: Final = 1.0
"""An unforced rewrite of the forced mark at most this often: it only tells rot from a torn tail."""


class Pointer(NamedTuple):
    """A snapshot that counts: its number, and the place from which on the journal must be replayed behind it."""

    number: int
    place: int


class Checkpoint(NamedTuple):
    """See the module."""

    journal_id: int
    salt: int
    forced: int
    file_number: int
    snapshots: tuple[Pointer, ...]


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    """The payload of a slot."""
    *numbers, snapshots = checkpoint
    head = HEAD.pack(VERSION, len(snapshots), *numbers)
    return head + b"".join(POINTER.pack(*pointer) for pointer in snapshots)


def decode_checkpoint(data: bytes, path: str) -> Checkpoint:
    """Raises NewerFormat, Corrupt."""
    if len(data) < HEAD.size:
        raise Corrupt(path, 0, len(data), "shorter than its fixed part")
    version, count, journal_id, salt, forced, number = HEAD.unpack_from(data)
    if version > VERSION:
        raise NewerFormat(path, version, VERSION)
    if HEAD.size + count * POINTER.size != len(data) or count > KEPT:
        raise Corrupt(path, 0, len(data), "another size than it says")
    snapshots = tuple(Pointer(*pointer) for pointer in POINTER.iter_unpack(data[HEAD.size :]))
    return Checkpoint(journal_id, salt, forced, number, snapshots)


class CheckpointFile:
    """The file. One thread at a time; the journal's lock sees to it."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self.path = names.join(folder, names.CHECKPOINT_NAME)
        self._slots = Slots(disk, self.path)

    def read(self) -> Checkpoint | None:
        """None if nothing was ever written. Raises Corrupt, NewerFormat, OSError."""
        found = self._slots.read()
        return None if found is None else decode_checkpoint(found[1], self.path)

    def faulty(self) -> list[tuple[int, int]]:
        """(first, next): positions of the slots that hold something and are not whole. Raises OSError."""
        return [(number * SLOT_SIZE, (number + 1) * SLOT_SIZE) for number in self._slots.faulty()]

    def settle(self, checkpoint: Checkpoint) -> None:
        """Both slots, each forced: what must not be forgotten. Raises OSError, Full."""
        payload = encode_checkpoint(checkpoint)
        self._slots.write(payload, force=True)
        self._slots.write(payload, force=True)

    def note(self, checkpoint: Checkpoint) -> None:
        """One slot, not forced. Raises OSError, Full."""
        self._slots.write(encode_checkpoint(checkpoint), force=False)
