"""Checks segment files without the broker's code: a second reading of docs/formats, with crcmod for every
checksum.

    python tools/fsck.py DATA [--json]

PATH is a segment file or any folder above some. Exit code 0: all sound · 2: wrong usage · 4: damage found.
What it shares with the broker is the pages of the formats and nothing else, so that one's mistake does not
hide the other's.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import crcmod.predefined

crc_32 = crcmod.predefined.mkPredefinedCrcFun("crc-32")

HEADER = struct.Struct(">IIQI")
BODY = struct.Struct(">HHIIIQIIQQQQQQ")
ENTRY = struct.Struct(">QQQQIIII")
CONTROL_SIZE = HEADER.size + BODY.size
RECORD_SIZE_MAX = 64 << 20

ATTRIBUTE, FILLER, CONTROL = 0x01, 0x20, 0x40
ALLOWED = 0xFFFF0000 | 0x11
KINDS = 5

EXIT_SOUND, EXIT_DAMAGE = 0, 4


@dataclass
class Problem:
    """Offsets `first <= x < next` of a segment, or positions in an index, and what is wrong with them."""

    file: str
    first: int
    next: int
    what: str


@dataclass
class Result:
    """Totals of what is sound, and the problems."""

    segments: int = 0
    bytes: int = 0
    blocks: int = 0
    records: int = 0
    problems: list[Problem] = field(default_factory=list)


class Bad(Exception):
    """A block that breaks a rule of the page; the text says which."""


@dataclass
class Control:
    """The fields of a block trailer, in the page's order."""

    version: int
    bits: int
    records: int
    size: int
    crc: int
    append_time: int
    epoch: int
    kind: int
    forced: int
    first_ordinal: int
    offset: int
    source_id: int
    source_high: int
    source_low: int


class SegmentCheck:
    """One segment file, read whole."""

    def __init__(self, path: Path, base: int, ordinal: int | None, log_id: int | None, result: Result) -> None:
        self.path = path
        self.base = base
        self.ordinal = ordinal
        self.log_id = log_id
        self.result = result
        self.data = path.read_bytes()
        self.ends: dict[int, Control] = {}
        self.last: Control | None = None

    def run(self) -> None:
        position = 0
        while position < len(self.data):
            try:
                position = self.block(position)
            except Bad as bad:
                behind = self.resume(position)
                self.problem(self.base + position, self.base + behind, str(bad))
                position = behind
        if self.last is not None and self.last.bits & 1:
            self.problem(self.base + self.last.offset, self.base + len(self.data), "the last append is unfinished")

    def problem(self, first: int, next: int, what: str) -> None:
        self.result.problems.append(Problem(str(self.path), first, next, what))

    def block(self, start: int) -> int:
        """Checks the block at `start`; the position behind it. Raises Bad."""
        position, count = start, 0
        while True:
            length, checksum, id, flag = self.header(position)
            body = position + HEADER.size
            if flag == CONTROL:
                break
            count += self.record(position, length, checksum, id, flag)
            position = body + length
        control = self.control(position)
        if control.size != position - start or control.offset != self.base + start:
            raise Bad(f"the block trailer says {control.size} bytes from offset {control.offset}")
        if crc_32(self.data[start:position]) != control.crc:
            raise Bad("the block fails its checksum")
        if control.records != count:
            raise Bad(f"{count} ordinals, the block trailer says {control.records}")
        if self.ordinal not in (None, control.first_ordinal):
            raise Bad(f"first ordinal {control.first_ordinal}, {self.ordinal} was to come")
        if self.last is not None and control.epoch < self.last.epoch:
            raise Bad(f"epoch {control.epoch} after {self.last.epoch}")
        if control.forced > control.offset:
            raise Bad("forced before it was written")
        end = position + CONTROL_SIZE
        self.ordinal, self.last, self.ends[end] = control.first_ordinal + control.records, control, control
        self.result.blocks += 1
        self.result.records += count
        self.result.bytes += end - start
        return end

    def header(self, position: int) -> tuple[int, int, int, int]:
        if position + HEADER.size > len(self.data):
            raise Bad("the file ends inside a header")
        length, checksum, id, flag = HEADER.unpack_from(self.data, position)
        if HEADER.size + length > min(RECORD_SIZE_MAX, len(self.data) - position):
            raise Bad(f"the record at offset {self.base + position} names a length of {length}")
        return length, checksum, id, flag

    def record(self, position: int, length: int, checksum: int, id: int, flag: int) -> int:
        """The ordinals of a user's record or a filler. Raises Bad."""
        where = f"the record at offset {self.base + position}"
        if flag == FILLER:
            return checksum
        if not id >> 24:
            raise Bad(f"{where} has producer id 0")
        if flag & ~ALLOWED:
            raise Bad(f"{where} has flag {flag:#x}")
        body = self.data[position + HEADER.size : position + HEADER.size + length]
        if crc_32(body) != checksum:
            raise Bad(f"{where} fails its checksum")
        if flag & ATTRIBUTE and (length < 4 or 4 + int.from_bytes(body[:4], "big") > length):
            raise Bad(f"the attribute of {where} leaves it")
        return 1

    def control(self, position: int) -> Control:
        length, checksum, id, _ = self.header(position)
        body = self.data[position + HEADER.size : position + CONTROL_SIZE]
        if length != BODY.size or crc_32(body) != checksum:
            raise Bad(f"the block trailer at offset {self.base + position} fails its checksum")
        control = Control(*BODY.unpack(body))
        if control.version != 1 or control.bits > 1 or control.kind >= KINDS:
            raise Bad(f"control record with version {control.version}, bits {control.bits}, kind {control.kind}")
        if self.log_id not in (None, id):
            raise Bad(f"the block trailer is of log {id:#x}, not {self.log_id:#x}")
        self.log_id = id
        return control

    def resume(self, bad: int) -> int:
        """Where a block begins behind the bad one at `bad`: the last block trailers' word counts."""
        place, found = BODY.size.to_bytes(4, "big"), len(self.data)
        bound = len(self.data) + 1
        position = self.data.rfind(place, bad)
        while position >= 0:
            begins = self.claimed(position, bad)
            if begins is not None and position + CONTROL_SIZE <= bound:
                found = position + CONTROL_SIZE if begins == bad else begins
                bound = begins
            position = self.data.rfind(place, bad, position + len(place) - 1)
        self.ordinal = None
        return found

    def claimed(self, position: int, bad: int) -> int | None:
        """Where the block begins that a block trailer at `position` closes; None if there is none there."""
        try:
            _, _, _, flag = self.header(position)
            if flag != CONTROL:
                return None
            control = self.control(position)
        except Bad:
            return None
        begins = control.offset - self.base
        return begins if begins + control.size == position and begins >= bad else None


def check_index(segment: SegmentCheck, result: Result) -> None:
    """Every entry of the segment's index against the block trailers."""
    path = segment.path.with_suffix(".index")
    if not path.exists():
        return
    data = path.read_bytes()
    at = 0
    for place in range(0, len(data), ENTRY.size):
        entry = data[place : place + ENTRY.size]
        fault = None
        if len(entry) < ENTRY.size:
            fault = "the last entry is short"
        else:
            ordinal, position, _, log_id, size, records, epoch, crc = ENTRY.unpack(entry)
            end = segment.ends.get(position + size)
            if crc_32(struct.pack(">Q", segment.base) + entry[:-4]) != crc:
                fault = "the entry fails its checksum"
            elif position != at or log_id != segment.log_id or end is None:
                fault = "the entry covers no whole blocks of this segment"
            elif (ordinal + records, epoch) != (end.first_ordinal + end.records, end.epoch):
                fault = "the entry disagrees with the block trailer at its end"
            at = position + size
        if fault is not None:
            result.problems.append(Problem(str(path), place, place + len(entry), fault))
            return


def segments_of(path: Path, suffix: str) -> Iterator[list[tuple[int, Path]]]:
    """The segments of each folder, by rising offset; a file alone is a folder of one."""
    pattern = re.compile(r"[0-9]{32}" + re.escape(suffix))
    if path.is_file():
        yield [(int(path.name[:32]), path)] if pattern.fullmatch(path.name) else []
        return
    for folder in [path, *sorted(p for p in path.rglob("*") if p.is_dir())]:
        found = [(int(p.name[:32]), p) for p in folder.iterdir() if pattern.fullmatch(p.name) and p.is_file()]
        if found:
            yield sorted(found)


def check(path: Path, suffix: str = ".zxQueue") -> Result:
    """Everything below `path`."""
    result = Result()
    for folder in segments_of(path, suffix):
        end: int | None = None
        ordinal: int | None = None
        log_id: int | None = None
        for base, file in folder:
            if end is not None and base != end:
                what = "the file before does not end where this one begins"
                result.problems.append(Problem(str(file), min(base, end), max(base, end), what))
                ordinal = None
            segment = SegmentCheck(file, base, ordinal, log_id, result)
            segment.run()
            check_index(segment, result)
            end, ordinal, log_id = base + len(segment.data), segment.ordinal, segment.log_id
            result.segments += 1
    return result


def main(arguments: list[str] | None = None) -> int:
    """The command; answers the exit code."""
    parser = argparse.ArgumentParser(description="Check segment files against the pages of their format.")
    parser.add_argument("path", type=Path, help="a segment file, or a folder above some")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--suffix", default=".zxQueue", help="what segment files end with")
    options = parser.parse_args(arguments)
    if not options.path.exists():
        parser.error(f"{options.path} does not exist")
    result = check(options.path, options.suffix)
    if not result.segments:
        parser.error(f"there are no segment files in {options.path}")
    if options.json:
        print(json.dumps(asdict(result)))
    else:
        for problem in result.problems:
            print(f"{problem.file}: {problem.first}..{problem.next}: {problem.what}")
        sound = f"{result.segments} segments, {result.blocks} blocks, {result.records} records, {result.bytes} bytes"
        print(f"sound: {sound}; problems: {len(result.problems)}")
    return EXIT_DAMAGE if result.problems else EXIT_SOUND


if __name__ == "__main__":
    sys.exit(main())
