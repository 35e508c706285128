"""Mends damaged segments offline, when an operator says so. Offsets and ordinals of everything else stay.

Each damaged stretch is replaced by one of the same size (journal.salvage) with a new control record. The
result is written beside the segment, forced, and takes its name by a rename; the original is kept as
`<name>.damaged` until `remove_originals`. A power cut at any moment leaves the original or the result under
the segment's name, whole.

A tail behind the last sound block of the last segment is left to the next start, which knows what to cut,
except for what `log.mark` says was forced: that is mended too. Nobody else may write in the folder meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from journal import names
from journal.control import CONTROL_SIZE, CONTROL_VERSION, Control
from journal.disk import Disk, File, write_all
from journal.errors import Corrupt, NewerFormat
from journal.header import HEADER_SIZE
from journal.mark import MarkFile, Marks
from journal.salvage import Salvaged, known_count, salvage
from journal.segment import SCAN_SIZE, Segment
from journal.survey import Stretch, find_log_id, survey

SMALLEST: Final = CONTROL_SIZE + HEADER_SIZE
"""A stretch must be a control record, or this long, to become a block."""

UNCERTAIN = "ids and flags of the records kept here are as they were found, not proven"


@dataclass(frozen=True)
class Repaired:
    """One stretch: offsets `first <= x < next` of `file`, `reason` as found.

    Of its ordinals, from `first_ordinal` on, `kept` are records that are still there and `lost` have become
    the fillers `fillers`, as (offset, size, count). `source_lost`: the control record was lost, and with it
    where the append came from, so a transaction or a timer that was just being applied may be applied again.
    """

    file: str
    first: int
    next: int
    reason: str
    first_ordinal: int
    kept: int
    lost: int
    fillers: tuple[tuple[int, int, int], ...]
    source_lost: bool
    note: str = UNCERTAIN


def repair(
    disk: Disk,
    folder: str,
    *,
    dry_run: bool = False,
    suffix: str = names.SEGMENT_SUFFIX,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Repaired]:
    """Mends every damaged segment of a partition's folder and says what it did, or with `dry_run` would do.

    Raises Corrupt where nothing can be made of a segment (no whole control record), NewerFormat, Full,
    OSError; segments that were mended before stay so.
    """
    bases = sorted(
        base for name in disk.list(folder) if (base := names.parse_segment_name(name, suffix)) is not None
    )
    paths = [names.join(folder, names.segment_name(base, suffix)) for base in bases]
    log_id = next((id for path in paths if (id := find_log_id(disk, path)) is not None), None)
    if log_id is None:
        return []
    marks = MarkFile(disk, folder, log_id).read() if names.mark_name() in disk.list(folder) else None
    done: list[Repaired] = []
    edge = _Edge(marks.first_ordinal if marks is not None and bases[0] <= marks.first else None)
    for number, base in enumerate(bases):
        segment = Segment.open(disk, folder, base, log_id, writable=False, suffix=suffix)
        try:
            following = _following(disk, folder, bases[number + 1 :], log_id, marks, suffix)
            stretches = list(_stretches(segment, following, edge))
            plans = [_plan(segment, stretch, before) for stretch, before in stretches]
            if plans and not dry_run:
                _replace(disk, segment, folder, plans, progress)
            done += [repaired for repaired, _ in plans]
        finally:
            segment.close()
    return done


def remove_originals(disk: Disk, folder: str) -> list[str]:
    """Removes what repairs kept aside; answers the names."""
    found = [name for name in disk.list(folder) if name.endswith(names.DAMAGED_SUFFIX)]
    for name in found:
        disk.unlink(names.join(folder, name))
    if found:
        disk.force_folder(folder)
    return found


@dataclass(frozen=True)
class _Following:
    """What lies behind a segment: the log goes on at `offset`. The next ordinal that is known is `ordinal`;
    between lie stretches that account for at least `shared` ordinals themselves, None if there are no such
    stretches."""

    offset: int
    ordinal: int
    shared: int | None


def _following(
    disk: Disk, folder: str, bases: list[int], log_id: int, marks: Marks | None, suffix: str
) -> _Following | None:
    """From the next segment's first control record, or behind the last one, from the forced mark."""
    shared: int | None = None
    for base in bases:
        segment = Segment.open(disk, folder, base, log_id, writable=False, suffix=suffix)
        try:
            for item in survey(segment):
                first = item.ordinal if isinstance(item, Stretch) else item.control.first_ordinal
                if first is not None:
                    return _Following(bases[0], first, shared)
                if isinstance(item, Stretch):
                    shared = (shared or 0) + known_count(_bytes_of(segment, item), log_id)[0]
        finally:
            segment.close()
    if marks is None:
        return None
    return _Following(bases[0] if bases else marks.forced, marks.forced_ordinal, shared)


class _Edge:
    """How far the segments were walked: the next ordinal, and the last sound control record."""

    def __init__(self, ordinal: int | None) -> None:
        self.ordinal = ordinal
        self.control: Control | None = None


def _stretches(
    segment: Segment, following: _Following | None, edge: _Edge
) -> Iterator[tuple[Stretch, Control | None]]:
    """What must be mended, each with the last sound control record before it.

    A stretch too short to become a block takes in the block behind it.
    """
    waiting: Stretch | None = None
    for item in survey(segment):
        if isinstance(item, Stretch):
            if item.version is not None:
                raise NewerFormat(segment.path, item.version, CONTROL_VERSION)
            if waiting is not None:
                waiting = waiting._replace(next=item.next, next_ordinal=item.next_ordinal, control=None)
            else:
                waiting = item if item.ordinal is not None else item._replace(ordinal=edge.ordinal)
        elif waiting is not None and not _fits(waiting):
            end, ordinal = item.next - segment.base, item.control.next_ordinal
            waiting = waiting._replace(next=end, next_ordinal=ordinal, control=item.control)
        else:
            if waiting is not None:
                yield waiting, edge.control
                waiting = None
            edge.control, edge.ordinal = item.control, item.control.next_ordinal
    waiting = _tail(segment, waiting, following, edge)
    if waiting is not None:
        yield waiting, edge.control
        edge.ordinal = waiting.next_ordinal


def _tail(
    segment: Segment, waiting: Stretch | None, following: _Following | None, edge: _Edge
) -> Stretch | None:
    """The stretch at the segment's end, as far as something says that the log went on: None if nothing
    does."""
    if waiting is not None and waiting.next_ordinal is not None:
        return waiting
    first = waiting.first if waiting is not None else segment.size
    if following is None or following.offset <= segment.base + first:
        return None
    if waiting is None:
        reason = "the file is shorter than it was"
        waiting = Stretch(first, first, reason, edge.ordinal, None, None)
    waiting = waiting._replace(next=following.offset - segment.base, next_ordinal=following.ordinal)
    if following.shared is None or waiting.ordinal is None:
        return waiting
    # Damage on both sides of a segment's start: nothing says which ordinals were on which side, so this one
    # takes what its own records prove, and if it has room for more, what the other side does not prove.
    known, more = known_count(_bytes_of(segment, waiting), segment.log_id)
    total = max(0, following.ordinal - waiting.ordinal)
    count = min(total, max(known, total - following.shared) if more else known)
    return waiting._replace(next_ordinal=waiting.ordinal + count)


def _fits(stretch: Stretch) -> bool:
    size = stretch.next - stretch.first
    return size == CONTROL_SIZE or size >= SMALLEST


def _plan(segment: Segment, stretch: Stretch, before: Control | None) -> tuple[Repaired, Salvaged]:
    """What becomes of one stretch. Raises Corrupt if it cannot become anything."""
    first, next = segment.base + stretch.first, segment.base + stretch.next
    if not _fits(stretch) or stretch.next_ordinal is None:
        raise Corrupt(segment.path, first, next, f"too little is left to mend it: {stretch.reason}")
    ordinal = stretch.ordinal
    if ordinal is None:
        # The log's first block: nothing before it says its ordinal, and the file's own records are what
        # counts.
        ordinal = 0 if segment.base == 0 else stretch.next_ordinal
    count = max(0, stretch.next_ordinal - ordinal)
    data = _bytes_of(segment, stretch)
    closing = _closing(stretch, before, first, ordinal)
    salvaged = salvage(data, count, segment.log_id, closing)
    fillers = tuple((first + p.position, p.size, p.count) for p in salvaged.pieces if not p.kept)
    lost_source = stretch.control is None
    repaired = Repaired(
        segment.path, first, next, stretch.reason, ordinal, salvaged.kept, salvaged.lost, fillers, lost_source
    )
    return repaired, salvaged


def _bytes_of(segment: Segment, stretch: Stretch) -> bytes:
    """The stretch's bytes; zeros where the file has lost its end."""
    size = stretch.next - stretch.first
    return segment.pread(size, stretch.first).ljust(size, b"\0")


def _closing(stretch: Stretch, before: Control | None, offset: int, ordinal: int) -> Control:
    """What the new control record takes over: from the old one if it is there, else from the one before."""
    if stretch.control is not None:
        return stretch.control._replace(offset=offset, first_ordinal=ordinal)
    if before is None:
        return Control(0, 0, 0, 0, 0, 0, ordinal, offset)
    return Control(0, 0, 0, before.append_time, before.epoch, before.forced, ordinal, offset)


def _replace(
    disk: Disk,
    segment: Segment,
    folder: str,
    plans: list[tuple[Repaired, Salvaged]],
    progress: Callable[[str, int, int], None] | None,
) -> None:
    """The original is copied aside, the mended file made and forced, then renamed over the original."""
    patches = [(repaired.first - segment.base, salvaged.data) for repaired, salvaged in plans]
    damaged, mended = segment.path + names.DAMAGED_SUFFIX, segment.path + names.REPAIRED_SUFFIX
    if not disk.exists(damaged):
        _write(disk, damaged + names.REPAIRED_SUFFIX, segment, [], None)
        disk.rename(damaged + names.REPAIRED_SUFFIX, damaged)
    _write(disk, mended, segment, patches, progress)
    index = names.join(folder, names.index_name(segment.base))
    if disk.exists(index):
        disk.unlink(index)
    disk.force_folder(folder)
    disk.rename(mended, segment.path)
    disk.force_folder(folder)


def _write(
    disk: Disk,
    path: str,
    segment: Segment,
    patches: list[tuple[int, bytes]],
    progress: Callable[[str, int, int], None] | None,
) -> None:
    """A forced copy of the segment with `patches` (position, bytes) in it; they may reach beyond its end."""
    if disk.exists(path):
        disk.unlink(path)
    copy: File = disk.create(path)
    for position in range(0, segment.size, SCAN_SIZE):
        write_all(copy, [segment.pread(SCAN_SIZE, position)], position)
        if progress is not None:
            progress(segment.path, min(position + SCAN_SIZE, segment.size), segment.size)
    for position, data in patches:
        write_all(copy, [data], position)
    # After a failed force the copy stays open: nothing takes its place, and the error is the caller's.
    copy.force()
    copy.close()
