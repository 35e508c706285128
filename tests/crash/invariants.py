"""What must hold of a log that is opened on whatever a power cut left. Each check names what it found.

1. Nothing that was acknowledged as synced, or could be read by default, is gone.
2. An append is there as a whole or not at all.
3. Every byte that can be read is the byte that was written there.
4. Nothing readable can be taken back: all of it is forced before the log serves.
5. No offset, ordinal or producer's sequence is given twice: the end lies at or above what was acknowledged,
and where
   something that a reader may have read "written" is gone, the epoch is a higher one.
6. Recovery is repeatable: after a second power cut in the same place the log is the same.
7. What the log's state learned is what its records teach.
8. A deleted topic stays deleted, and nothing of it shows in the one that has its name now.
9. No damage is named: a power cut loses only what was not forced.
10. A log that was stopped is stopped; it goes on when it is resumed, with all of the above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from struct import unpack_from

from journal.log.checkpoint import WrongLog
from journal.log.log import Log
from journal.log.options import LogOptions
from journal.record.block import blocks_of, producer_runs
from journal.record.block_trailer import TRAILER_SIZE
from journal.testing import SimulatedClock, SimulatedDisk
from tests.crash.workload import STOP_REASON, Boundary, Known, Stop
from tests.journal.logs import CountingState, make_batch

READ_BYTES = 1 << 20
MORE_FOLLOWS_POSITION = 20 + 2
"""Of the bits in a block trailer: after its header and version."""


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Outcome:
    """What opening made of one folder of one state. `log_id` 0: the folder is not there."""

    log_id: int = 0
    first: int = 0
    end: int = 0
    first_ordinal: int = 0
    end_ordinal: int = 0
    epoch: int = 0
    data_first: int = 0
    data: bytes = b""
    was_stopped: bool = False


def require(holds: bool, number: int, sentence: str) -> None:
    if not holds:
        raise Broken(f"invariant {number}: {sentence}")


def recover(
    disk: SimulatedDisk, folder: str, log_ids: tuple[int, ...], options: LogOptions, *, thorough: bool
) -> Outcome:
    """Opens the log, checks what can be checked without knowing its past, and says what it is."""
    if not disk.is_folder(folder):
        return Outcome()
    log, log_id, state = open_log(disk, folder, log_ids, options)
    was_stopped = log.stopped == STOP_REASON
    if was_stopped:
        log.resume()
    require(log.stopped is None, 9, f"the log is stopped: {log.stopped}")
    require(not log.damage, 9, f"damage is named: {log.damage}")
    require(log.forced_offset == log.end_offset, 4, f"forced {log.forced_offset}, served {log.end_offset}")
    outcome = replace(_summary(log, log_id), was_stopped=was_stopped)
    blocks = blocks_of(outcome.data, outcome.data_first, log_id)
    taught = _sequences([run for block in blocks for run in producer_runs(block)])
    learned = _sequences([run for run in state.runs if run[3] >= outcome.data_first])
    require(taught == learned, 7, f"the state learned {learned}, the records teach {taught}")
    if thorough:
        again, _, _ = open_log(disk.crash(keep="nothing"), folder, (log_id,), options)
        same = _summary(again, log_id)
        require(contents(same) == contents(outcome), 6, f"first {outcome}, then {same}")
        _use(log, outcome)
    return outcome


def check(outcome: Outcome, boundary: Boundary, folder: str) -> None:
    """Holds an outcome against what was known at the boundary."""
    candidates = boundary.candidates[folder]
    if not outcome.log_id:
        require(all(known.is_optional for known in candidates), 1, f"{folder} is gone")
        return
    known = next((known for known in candidates if known.log_id == outcome.log_id), None)
    require(known is not None, 8, f"{folder} holds {outcome.log_id:#x}")
    assert known is not None
    require(outcome.end >= known.forced, 1, f"forced up to {known.forced}, the log ends at {outcome.end}")
    require(
        known.first <= outcome.first <= known.first_next, 1,
        f"the log begins at {outcome.first}, not between {known.first} and {known.first_next}",
    )  # fmt: skip
    _check_bytes(outcome, known)
    is_stopped = known.stop is Stop.MAYBE or outcome.was_stopped is (known.stop is Stop.YES)
    require(is_stopped, 10, f"stopped: {outcome.was_stopped}, should be: {known.stop}")
    if outcome.end < known.written:
        require(outcome.epoch > known.epoch, 5, f"cut at {outcome.end} of {known.written}, in the same epoch")


def _check_bytes(outcome: Outcome, known: Known) -> None:
    image = known.image
    if outcome.end > outcome.data_first:
        require(image.base <= outcome.data_first, 3, f"{outcome.data_first} lies before {image.base}")
        written = image.data[outcome.data_first - image.base : outcome.end - image.base]
        require(outcome.data == written, 3, f"other bytes in {outcome.data_first}..{outcome.end}")
    whole = outcome.end in known.ends or (outcome.end == image.end and ends_whole(image.data))
    require(whole, 2, f"the log ends at {outcome.end}, which is no append's end")


def ends_whole(data: bytes) -> bool:
    """True if the last block trailer closes an append."""
    if len(data) < TRAILER_SIZE:
        return not data
    (bits,) = unpack_from(">H", data, len(data) - TRAILER_SIZE + MORE_FOLLOWS_POSITION)
    return not bits & 1


def open_log(
    disk: SimulatedDisk, folder: str, log_ids: tuple[int, ...], options: LogOptions
) -> tuple[Log, int, CountingState]:
    """As the newest incarnation that the folder can be."""
    for number, log_id in enumerate(log_ids):
        state = CountingState()
        try:
            log = Log.open(disk, folder, log_id=log_id, clock=SimulatedClock(), options=options, state=state)
        except WrongLog as error:
            if number + 1 == len(log_ids):
                raise Broken(f"invariant 8: {error}") from error
        else:
            return log, log_id, state
    raise ValueError("no log to open")


def _summary(log: Log, log_id: int) -> Outcome:
    offset = log.first_offset
    parts: list[bytes] = []
    start = offset
    while True:
        chunk = log.read(offset, READ_BYTES)
        if not chunk.data:
            break
        if not parts:
            start = chunk.start
        parts.append(chunk.data)
        offset = chunk.next
    require(offset == log.end_offset, 3, f"reading ends at {offset}, the log at {log.end_offset}")
    return Outcome(
        log_id, log.first_offset, log.end_offset, log.first_ordinal, log.end_ordinal, log.epoch, start,
        b"".join(parts)
    )  # fmt: skip


def contents(outcome: Outcome) -> tuple[object, ...]:
    return tuple(value for name, value in vars(outcome).items() if name not in ("epoch", "was_stopped"))


def _sequences(found: Sequence[tuple[int, int, int, int]]) -> list[tuple[int, int]]:
    """(producer, sequence) of every record: runs may be cut differently in snapshots and in blocks."""
    return [(producer, first + n) for producer, first, count, _ in found for n in range(count)]


def _use(log: Log, outcome: Outcome) -> None:
    """The log goes on where it ended, and finds what it has by ordinal."""
    for ordinal in {outcome.first_ordinal, (outcome.first_ordinal + outcome.end_ordinal) // 2}:
        if outcome.first_ordinal <= ordinal < outcome.end_ordinal:
            offset, found = log.offset_of_ordinal(ordinal)
            require(found == ordinal, 3, f"asked for ordinal {ordinal}, found {found} at {offset}")
            require(log.seek_offset(offset) == offset, 3, f"ordinal {ordinal} is said to be at {offset}")
    answer = log.append([make_batch(1, sequence=0)])[0]
    require(answer.first_ordinal == outcome.end_ordinal, 5, f"ordinal {answer.first_ordinal} is given again")
    require(answer.positions[0][1] >= outcome.end, 5, f"offset {answer.positions[0][1]} is given again")
    log.force()
    chunk = log.read(outcome.end, READ_BYTES)
    require(chunk.next == answer.end_offset, 1, "what was appended after recovery cannot be read")
