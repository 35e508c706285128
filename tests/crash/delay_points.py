"""The steps of a broker with delayed messages, derived from what a call left on the disk: the kinds of boundaries at
which lives are cut, so that none of them is met too seldom.

What a write in a log is about is read from the bytes that it wrote. One call may be of several kinds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from journal.record.block_trailer import SOURCE_DELAY, decode_trailer
from journal.record.format import FLAG_TRAILER, HEADER_SIZE, records_of
from journal.testing import SimulatedDisk
from tests.broker.helpers import Broker
from tfmq.broker.delay_commands import DelayCommands
from tfmq.delay.arrivals import header
from tfmq.delay.buckets import store
from tfmq.delay.buckets.format import parse_bucket_name
from tfmq.delay.memory_window import Step

NOTES = {header.ARRIVAL: "insert", header.CANCEL: "cancel", header.RESCHEDULE: "reschedule"}
APPENDED, FIRED = "fire, appended", "fire, forced"
POINTS = (
    *NOTES.values(), "arrivals roll", "arrivals truncation", "spill", "bucket roll", "split", "cascade", "load",
    "checkpoint", "bucket unlink", APPENDED, FIRED,
)  # fmt: skip
"""After a write or a force of notes and their records; the names of a new segment; a segment that goes; bytes of
buckets, and new ones; what cuts a bucket that has too much, or is too coarse for its time; anything beside a load; the
checkpoint that lists the buckets; a bucket that goes; delayed messages in their partition before and after a force."""


class Points:
    """Of one life. `of` is asked after each call, in order."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._unforced: dict[str, set[str]] = defaultdict(set)
        self._split = ""

    def of(self, broker: Broker, disk: SimulatedDisk, kind: str, path: str) -> tuple[str, ...]:
        """Those of POINTS that this call belongs to. Another broker than that of `disk` has nothing to do with it."""
        runs = broker.disk is disk
        delay = getattr(getattr(broker.engine, "broker", None), "delay_commands", None) if runs else None
        busy = delay.queue._scheduler.running_step if delay is not None else None
        found = self._of_path(delay, disk, kind, path, busy)
        if busy is Step.LOAD:
            found.add("load")
        return tuple(point for point in POINTS if point in found)

    def _of_path(
        self, delay: DelayCommands | None, disk: SimulatedDisk, kind: str, path: str, busy: Step | None
    ) -> set[str]:
        if path.endswith(".zxQueue"):
            return {FIRED if kind == "force" else APPENDED for _ in self._stored(disk, kind, path)}
        if "/delay/arrivals" in path:
            if kind == "unlink":
                return {"arrivals truncation"}
            if not path.endswith(".arrivals"):
                return {"arrivals roll"} if kind == "force_folder" else set()
            return {"arrivals roll"} if kind in ("create", "rename") else self._stored(disk, kind, path)
        if path.endswith(".bucket"):
            if kind == "unlink":
                return {"bucket unlink"}
            if busy is Step.SPLIT:
                self._split = self._cut(delay, path) if kind == "create" else self._split
                return {self._split}
            return {"bucket roll", "spill"} if kind == "create" else {"spill"}
        if "/delay/checkpoint" in path or path.endswith("/delay"):
            return {"checkpoint"}
        return set()

    def _stored(self, disk: SimulatedDisk, kind: str, path: str) -> set[str]:
        """What was written, or is forced now."""
        if kind == "force":
            return self._unforced.pop(path, set())
        before, size = self._sizes.get(path, 0), disk.size(path)
        self._sizes[path] = size
        if kind != "write" or size <= before:
            return set()
        found = set(_kinds(disk.read_file(path)[before:], arrivals=path.endswith(".arrivals")))
        self._unforced[path] |= found
        return found

    @staticmethod
    def _cut(delay: DelayCommands | None, path: str) -> str:
        """Why the bucket is cut whose first part this is."""
        span = parse_bucket_name(path.rpartition("/")[2])
        assert span is not None and delay is not None
        whole = delay.queue._buckets.bucket_at(span.start)
        return "split" if whole is not None and whole.count > store.SPLIT_MESSAGES else "cascade"


def _kinds(data: bytes, *, arrivals: bool) -> Iterator[str]:
    """Of each note, or in a partition of each append of delayed messages."""
    for record in records_of(data):
        if record.flag == FLAG_TRAILER:
            control = decode_trailer(data, record.position, record.id)
            if not arrivals and control.source_kind == SOURCE_DELAY:
                yield FIRED
        elif arrivals and record.id == header.HEADER_ID:
            yield NOTES[data[record.position + HEADER_SIZE + 1]]
