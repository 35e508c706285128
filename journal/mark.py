"""`log.mark`: what a log must know of itself before it reads a record. Two alternating slots (journal.checkpoint).

    version u16 | bits u16 (0 clean, 1 stopped) | log id u64 | first u64 | first ordinal u64 | forced u64
    | forced ordinal u64 | append time u64 ms | epoch u32 | starts u16 | reason size u16
    | starts x (epoch u32, offset u64) | reason, UTF-8

All numbers are big-endian. `forced` is a lower bound and always an append's end; it is rewritten without a force, at
most once a second, after the force that it reports. `first` is where the log begins since retention or truncation.
A change of epoch, first, stopped or clean is written to both slots, each forced, before it takes effect: so a slot
that rots or tears takes at most a newer `forced` with it.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from journal.checkpoint import SLOT_SIZE, Slots
from journal.disk import Disk
from journal.errors import Corrupt, NewerFormat
from journal.names import join, mark_name

VERSION: Final = 1
HEAD: Final = Struct(">HHQQQQQQIHH")
START: Final = Struct(">IQ")
BIT_CLEAN: Final = 1
BIT_STOPPED: Final = 2

EPOCH_CLOCK_MIN: Final = 1 << 30
EPOCH_CLOCK_MAX: Final = 0xF000_0000
"""A clock that is wrong by a century leaves numbers for more epochs than a log can have."""

STARTS_MAX: Final = 128
"""Cuts that are remembered; beyond, the oldest two become one that is a little too careful. They fit a slot."""

REASON_SIZE_MAX: Final = 1000
"""The rest of a slot, rounded down."""

REWRITE_SECONDS: Final = 1.0
"""An unforced rewrite of the forced mark at most this often: it only spares a start some checking."""


class WrongLog(Corrupt):
    """The folder belongs to another log: an earlier topic of the same name, say. Nothing in it is touched."""


class Marks(NamedTuple):
    """`starts`: (epoch, offset at which the log was cut when that epoch began), offsets rising.

    `stopped`: why the log takes no writes, None if it does. `clean`: nothing follows `forced`.
    """

    first: int
    first_ordinal: int
    forced: int
    forced_ordinal: int
    append_time: int
    epoch: int = 0
    starts: tuple[tuple[int, int], ...] = ()
    clean: bool = False
    stopped: str | None = None


def encode_marks(log_id: int, marks: Marks) -> bytes:
    """The payload of a slot; a reason that is too long is cut."""
    reason = (marks.stopped or "").encode()[:REASON_SIZE_MAX]
    bits = BIT_CLEAN * marks.clean | BIT_STOPPED * (marks.stopped is not None)
    head = HEAD.pack(VERSION, bits, log_id, *marks[:6], len(marks.starts), len(reason))
    return head + b"".join(START.pack(*start) for start in marks.starts) + reason


def decode_marks(data: bytes, path: str, log_id: int) -> Marks:
    """Raises NewerFormat, WrongLog; Corrupt if the marks do not add up."""
    if len(data) < HEAD.size:
        raise Corrupt(path, 0, len(data), "shorter than its fixed part")
    version, bits, found_id, *numbers, count, reason_size = HEAD.unpack_from(data)
    if version > VERSION:
        raise NewerFormat(path, version, VERSION)
    if found_id != log_id:
        raise WrongLog(path, 0, len(data), f"the folder is of log {found_id:#x}, not of {log_id:#x}")
    begins = HEAD.size + count * START.size
    if begins + reason_size != len(data):
        raise Corrupt(path, 0, len(data), "another size than it says")
    first, first_ordinal, forced, forced_ordinal, append_time, epoch = numbers
    starts = tuple((start, offset) for start, offset in START.iter_unpack(data[HEAD.size : begins]))
    reason = data[begins:].decode("utf-8", "replace") if bits & BIT_STOPPED else None
    clean = bool(bits & BIT_CLEAN)
    return Marks(first, first_ordinal, forced, forced_ordinal, append_time, epoch, starts, clean, reason)


def read_log_id(disk: Disk, folder: str) -> int | None:
    """The id of the log in `folder`; None if there is none (yet). Raises Corrupt, NewerFormat, OSError."""
    path = join(folder, mark_name())
    found = Slots(disk, path).read()
    if found is None:
        return None
    if len(found[1]) < HEAD.size:
        raise Corrupt(path, 0, len(found[1]), "shorter than its fixed part")
    log_id: int = HEAD.unpack_from(found[1])[2]
    decode_marks(found[1], path, log_id)
    return log_id


def with_start(starts: tuple[tuple[int, int], ...], epoch: int, offset: int) -> tuple[tuple[int, int], ...]:
    """`starts` after an epoch began at `offset`: earlier ones at or above it say nothing more, and are left out."""
    kept = [start for start in starts if start[1] < offset]
    kept.append((epoch, offset))
    if len(kept) > STARTS_MAX:
        uncut = next((start for start in kept if _is_uncut(start[0])), None)
        if uncut is not None:
            # Nothing was cut there: it only tells who has read in another copy of the folder.
            kept.remove(uncut)
        else:
            # For readers between the two epochs the lower place is too careful: they go back further than they must.
            kept[:2] = [(kept[1][0], kept[0][1])]
    return tuple(kept)


def next_epoch(epoch: int, wall_ms: int, *, cut: bool) -> int:
    """The epoch after `epoch`: the clock's second where that is higher, so that a folder and an older copy of it that
    is started later do not give their epochs the same number. Odd where the log was `cut`, even where it was not."""
    found = max(epoch + 1, min(wall_ms // 1000, EPOCH_CLOCK_MAX))
    return found + (found % 2 != cut)


def _is_uncut(epoch: int) -> bool:
    """Earlier releases counted epochs from 1, and each was a cut."""
    return epoch >= EPOCH_CLOCK_MIN and epoch % 2 == 0


def cut_since(starts: tuple[tuple[int, int], ...], epoch: int) -> int | None:
    """The lowest offset at which the log was cut after `epoch`; None if it was not."""
    return next((offset for start, offset in starts if start > epoch), None)


class MarkFile:
    """The file. One thread at a time; the log's lock sees to it."""

    def __init__(self, disk: Disk, folder: str, log_id: int) -> None:
        self.path = join(folder, mark_name())
        self._log_id = log_id
        self._slots = Slots(disk, self.path)

    def read(self) -> Marks | None:
        """None if nothing was ever written. Raises Corrupt, WrongLog, NewerFormat, OSError."""
        found = self._slots.read()
        return None if found is None else decode_marks(found[1], self.path, self._log_id)

    def faulty(self) -> list[tuple[int, int]]:
        """The positions (first, next) of each slot that holds something and is not whole. Raises OSError."""
        return [(number * SLOT_SIZE, (number + 1) * SLOT_SIZE) for number in self._slots.faulty()]

    def settle(self, marks: Marks) -> None:
        """Both slots, each forced: what must not be forgotten. Raises OSError, Full."""
        payload = encode_marks(self._log_id, marks)
        self._slots.write(payload, force=True)
        self._slots.write(payload, force=True)

    def note(self, marks: Marks) -> None:
        """One slot, not forced. Raises OSError, Full."""
        self._slots.write(encode_marks(self._log_id, marks), force=False)
