"""Background verification: sealed segments are read again at a limited pace, and their checksums are checked."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from functools import partial
from operator import itemgetter
from random import Random
from typing import Any, Final, NamedTuple

from journal.errors import Full
from journal.fsck.sealed_verify import FindingKind, SealedSegmentVerification, SegmentFinding, VerificationStopped
from journal.log.segment import SCAN_SIZE, Segment
from tfmq.broker.partition import Partition
from tfmq.broker.runtime import Runtime
from tfmq.broker.topics import Topic, Topics

log = logging.getLogger("tfmq.broker")

PLAN_SECONDS: Final = 600.0
"""Interval in which the verifier looks for segments that are due, unless `verification.interval_seconds` is shorter."""
SLICE_BYTES: Final = SCAN_SIZE
"""Bytes that one job of a worker reads, in one read of the disk if they are one segment's."""
FILE_BYTES: Final = 16 << 10
"""What opening a segment counts as, in bytes read, so that many small segments are paced too."""
FINDINGS_MAX: Final = 1000
"""Maximum findings that are kept, because of their memory. Further ones are only logged, in each pass."""


class VerificationFinding(NamedTuple):
    """A finding in a segment of a partition. `found_ms`: wall-clock time when it was first found, in ms since 1970."""

    topic: str
    partition: int
    finding: SegmentFinding
    found_ms: int

    def row(self) -> dict[str, Any]:
        """Return the fields as DESCRIBE_TOPIC has them."""
        return {**self.finding._asdict(), "kind": str(self.finding.kind), "found_ms": self.found_ms}


class SegmentVerifier:
    """Verifies the sealed segments of all topics, those first whose last verification is the longest ago.

    One job in a worker verifies at most SLICE_BYTES; the next one starts when the pace permits it. Between the jobs no
    file is open. Damaged ranges become damage of the log, as when a read finds them. An error of the disk does not: a
    later read may succeed.
    """

    def __init__(self, runtime: Runtime, topics: Topics) -> None:
        self._runtime, self._topics = runtime, topics
        self._stopped = False
        self._found: dict[Segment, tuple[Partition, dict[SegmentFinding, VerificationFinding]]] = {}
        self._waiting: deque[tuple[Partition, Segment]] = deque()
        """The segments that the present pass has not begun to verify. Used by the worker while a job runs."""
        self._current: tuple[Partition, SealedSegmentVerification] | None = None
        self._slice_started = 0.0
        self._passes = self._segments = self._bytes = self._last_pass_ms = 0

    def start(self) -> None:
        self._plan_later()

    def stop(self) -> None:
        """Start no more jobs. The one that runs ends before its next read."""
        self._stopped = True

    # Results

    def findings(self) -> Iterator[VerificationFinding]:
        """Yield the findings in segments that are still there, without removed offsets."""
        for segment, (partition, rows) in list(self._found.items()):
            if _is_current(partition, segment):
                yield from (row for row in rows.values() if not _is_removed(partition, row.finding))
            else:
                del self._found[segment]

    def findings_of(self, topic: Topic) -> dict[int, list[dict[str, Any]]]:
        """Return the rows of DESCRIBE_TOPIC: number of a partition -> its findings, by file and offset."""
        rows: dict[int, list[dict[str, Any]]] = {}
        for each in sorted(found for found in self.findings() if found.topic == topic.name):
            rows.setdefault(each.partition, []).append(each.row())
        return rows

    def status(self) -> dict[str, Any]:
        """Return the "verification" part of STATUS. `findings` are the present ones by kind; counters begin at a start.

        `waiting`: segments that the present pass has still to verify. `last_pass_ms`: wall-clock time when the last
        pass ended; 0: none has.
        """
        counts = Counter(str(each.finding.kind) for each in self.findings())
        return {
            "segments": self._segments,
            "bytes": self._bytes,
            "passes": self._passes,
            "last_pass_ms": self._last_pass_ms,
            "waiting": len(self._waiting) + (self._current is not None),
            "findings": {str(kind): counts[kind] for kind in FindingKind},
        }

    # Passes

    @property
    def _pace(self) -> int:
        return self._runtime.config.verification.bytes_per_second

    @property
    def _interval(self) -> float:
        return self._runtime.config.verification.interval_seconds

    def _plan_later(self) -> None:
        self._runtime.timers.after(min(PLAN_SECONDS, self._interval), self._plan, deferrable=True)

    def _plan(self) -> None:
        """Begin a pass over the segments that are due. Does nothing but wait while no segment is sealed."""
        if self._stopped:
            return
        partitions = [each for each in self._topics.partitions() if each.log.segment_count > 1]
        if not self._pace or not partitions:
            self._plan_later()
            return
        before = self._runtime.clock.monotonic() - self._interval
        self._runtime.run(partial(_due_segments, partitions, before, self._runtime.randomness(8)), self._planned)

    def _planned(self, due: list[tuple[Partition, Segment]] | None, error: BaseException | None) -> None:
        if error is not None:
            log.error("the verification of segments could not begin: %s", str(error) or "out of memory")
        self._waiting = deque(due or ())
        if self._waiting:
            self._start_slice()
        else:
            self._plan_later()

    def _start_slice(self) -> None:
        if self._stopped:
            return
        if not self._pace:  # switched off since the pass began
            self._waiting.clear()
            self._current = None
            self._plan_later()
            return
        self._slice_started = self._runtime.clock.monotonic()
        self._runtime.run(self._verify_slice, self._slice_done)

    def _verify_slice(self) -> list[_Step]:
        """Verify SLICE_BYTES, of one segment or of several small ones. Runs in a worker."""
        steps: list[_Step] = []
        size = 0
        while size < SLICE_BYTES and not self._stopped:
            if self._current is None:
                if not self._waiting:
                    break
                partition, segment = self._waiting.popleft()
                self._current = partition, SealedSegmentVerification(self._runtime.disk, segment, lambda: self._stopped)
            partition, verification = self._current
            if not _is_current(partition, verification.segment):
                self._current = None
                continue
            known = len(verification.findings)
            try:
                read = verification.step(SLICE_BYTES - size)
            except VerificationStopped:
                break
            except Full as error:  # no descriptor is free; the next pass begins with the segments that are left out
                log.warning("the verification of segments waits: %s", error)
                self._waiting.clear()
                self._current = None
                break
            steps.append(_Step(partition, verification, verification.findings[known:], read))
            size += read + FILE_BYTES
            if verification.is_done:
                self._current = None
        return steps

    def _slice_done(self, steps: list[_Step] | None, error: BaseException | None) -> None:
        if error is not None:
            log.error("the verification of a segment failed: %s", str(error) or "out of memory")
            self._current = None
        size = 0
        for step in steps or ():
            self._bytes += step.read
            size += step.read + FILE_BYTES
            self._apply(step)
        if self._waiting or self._current is not None:
            ends = self._slice_started + (size / self._pace if self._pace else 0.0)
            wait = ends - self._runtime.clock.monotonic()
            self._runtime.timers.after(max(0.0, wait), self._start_slice, deferrable=True)
            return
        self._passes += 1
        self._last_pass_ms = self._runtime.clock.wall_ms()
        self._plan_later()

    def _apply(self, step: _Step) -> None:
        """Record new findings. At the end of a segment remove earlier ones that were not found again."""
        partition, segment = step.partition, step.verification.segment
        if not _is_current(partition, segment):  # what was found may be that the files were being removed
            return
        rows = self._found.setdefault(segment, (partition, {}))[1]
        for finding in step.found:
            if finding.kind == FindingKind.DAMAGED:
                partition.log.add_damage((finding.first, finding.next, finding.reason))
            if finding not in rows and not _is_removed(partition, finding):
                _log_finding(partition, finding)
                if sum(len(rows) for _, rows in self._found.values()) < FINDINGS_MAX:
                    now = self._runtime.clock.wall_ms()
                    rows[finding] = VerificationFinding(partition.name, partition.number, finding, now)
        if not step.verification.is_done:
            return
        self._segments += 1
        segment.verified_at = self._runtime.clock.monotonic()
        for finding in rows.keys() - set(step.verification.findings):
            del rows[finding]
            partition.log.remove_damage((finding.first, finding.next, finding.reason))
        if not rows:
            del self._found[segment]


class _Step(NamedTuple):
    """What one job did for one segment. `found`: the new findings. `read`: bytes that were read."""

    partition: Partition
    verification: SealedSegmentVerification
    found: Sequence[SegmentFinding]
    read: int


def _due_segments(partitions: Sequence[Partition], before: float, seed: bytes) -> list[tuple[Partition, Segment]]:
    """Return the sealed segments that were not verified since `before`, monotonic seconds; the oldest first.

    Those that were not verified since the start come before them, in a random order: so each has its turn, although
    every start begins anew. Runs in a worker.
    """
    never: list[tuple[Partition, Segment]] = []
    again: list[tuple[float, Partition, Segment]] = []
    for partition in partitions:
        for segment in partition.log.sealed_segments:
            if segment.verified_at is None:
                never.append((partition, segment))
            elif segment.verified_at <= before:
                again.append((segment.verified_at, partition, segment))
    Random(seed).shuffle(never)
    again.sort(key=itemgetter(0))
    return [*never, *((partition, segment) for _, partition, segment in again)]


def _is_current(partition: Partition, segment: Segment) -> bool:
    """Whether the segment is still a sealed segment of its partition: not removed, and the log was not recovered."""
    # Retention, a purge and the deletion of a topic first make this false, and then remove the file. So a file that is
    # missing although this is true was not removed by the broker.
    return not partition.deleted and segment in partition.log.sealed_segments


def _is_removed(partition: Partition, finding: SegmentFinding) -> bool:
    """Whether all messages of the range were removed by retention or a purge."""
    return finding.kind != FindingKind.INDEX and finding.next <= partition.log.first_offset


def _log_finding(partition: Partition, finding: SegmentFinding) -> None:
    where = (partition.name, partition.number, finding.file)
    if finding.kind == FindingKind.INDEX:
        log.warning("%s-%d: the index %s is wrong: %s. The next start rebuilds it", *where, finding.reason)
        return
    log.error(
        "%s-%d: %s is %s from %d to %d: %s. The rest is served; `tfmq log repair` repairs it, with the broker stopped",
        *where, finding.kind, finding.first, finding.next, finding.reason,
    )  # fmt: skip
