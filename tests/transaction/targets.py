"""A `Destination` in memory: partitions and groups' offsets that remember what was written and what was forced.

It behaves as the broker's does where that matters: effects wait for the end of the turn, the highest place wins,
whatever is not above it is not written again, a stopped or full target refuses, one that comes back may have lost
what was not forced. `asked` records every call that a test may want to look at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from journal.record.format import records_of, split_id
from tfmq.apply_target import (
    OFFSETS_KEY,
    AppendResult,
    AppliedCallback,
    CommitOffsets,
    DurableCallback,
    Effect,
    GroupPositions,
    SourceId,
)
from tfmq.errors import Busy, DiskFull, Fenced, StorageStopped, UnknownTopic


class Append(NamedTuple):
    """What one effect brought."""

    place: tuple[int, int] | None
    """None for a plain send."""
    records: list[tuple[int, bytes]]
    size_bytes: int


class Target:
    """One partition, or the groups' offsets. `appends[:forced]` are on the disk."""

    def __init__(self) -> None:
        self.appends: list[Append] = []
        self.forced = 0
        self.stopped: str | None = None
        self.full = False
        self.held = 0
        self.places: dict[str, tuple[Any, ...]] = {}
        self.base: tuple[int, int] | None = None
        """The highest place of what retention has deleted."""

    @property
    def applied(self) -> tuple[int, int] | None:
        places = [append.place for append in self.appends if append.place is not None]
        return max(places[-1:], default=self.base)

    @property
    def end(self) -> int:
        return 1000 * len(self.appends)

    def cut(self, count: int) -> Target:
        """The same with only the first `count` appends, all of them on the disk."""
        left = Target()
        left.appends = self.appends[:count]
        left.forced = len(left.appends)
        left.base = self.base
        return left


class Row(NamedTuple):
    """What a session asks to commit: `generation` must be the group's."""

    group: str
    generation: int
    offset: int


class Targets:
    """See the module. `automatic`: every force that is asked for takes place at the turn's end."""

    def __init__(self) -> None:
        self.targets: dict[int, Target] = {}
        self.gone: set[int] = set()
        self.generations: dict[str, int] = {}
        self.locks: dict[int, tuple[str, list[str]]] = {}
        self.reserved = 0
        self.space: int | None = None
        self.limit = 1 << 20
        self.automatic = True
        self.asked: list[tuple[Any, ...]] = []
        self.violations: list[str] = []
        self.before_append: Callable[[], None] = lambda: None
        """Called each time when something is about to become visible."""
        self._queue: list[tuple[Effect, AppliedCallback]] = []
        self._waiting: list[tuple[AppendResult, DurableCallback]] = []

    def target(self, key: int) -> Target:
        return self.targets.setdefault(key, Target())

    # What tests do

    def payloads(self, key: int) -> list[bytes]:
        """Everything visible in a partition, in order."""
        return [payload for append in self.target(key).appends for _, payload in append.records]

    def ids(self, key: int) -> list[int]:
        return [name for append in self.target(key).appends for name, _ in append.records]

    def stop(self, key: int, reason: str = "its disk failed") -> None:
        self.target(key).stopped = reason

    def resume(self, key: int, *, keep: int | None = None) -> None:
        """Lifts a stop; `keep`: so many appends are left of what was there, else all of them."""
        target = self.target(key)
        self.targets[key] = target.cut(len(target.appends) if keep is None else keep)
        self.targets[key].places = {} if keep is not None else target.places

    def plain(self, key: int, payload: bytes) -> None:
        """A send without a transaction."""
        self.target(key).appends.append(Append(None, [(0, payload)], len(payload)))

    def retain(self, key: int, count: int) -> None:
        """Retention: only the last `count` appends are left, and the places are known as before."""
        target = self.target(key)
        target.base = target.applied
        gone = len(target.appends) - count
        target.appends = target.appends[gone:]
        target.forced = max(0, target.forced - gone)

    def delete(self, incarnation: int) -> None:
        self.gone.add(incarnation)
        for key in [key for key in self.targets if split_id(key)[0] == incarnation]:
            del self.targets[key]

    def force(self, key: int | None = None) -> None:
        """Puts everything that is written on the disk."""
        for each in [key] if key is not None else list(self.targets):
            target = self.target(each)
            if target.stopped is None:
                target.forced = len(target.appends)
        self._report_forced()

    def power_cut(self) -> Targets:
        return self._left({key: target.forced for key, target in self.targets.items()})

    def killed(self) -> Targets:
        return self._left({key: len(target.appends) for key, target in self.targets.items()})

    def _left(self, counts: dict[int, int]) -> Targets:
        left = Targets()
        left.gone, left.generations, left.limit = set(self.gone), dict(self.generations), self.limit
        left.targets = {key: self.targets[key].cut(count) for key, count in counts.items()}
        for key, target in left.targets.items():
            target.places = dict(self.targets[key].places) if target.appends else {}
        return left

    # Destination

    def check_space(self, key: int, size_bytes: int) -> None:
        self._require(key)
        target = self.target(key)
        if target.stopped is not None:
            raise StorageStopped(reason=target.stopped, outcome="not done")
        if target.full or (self.space is not None and self.reserved + size_bytes > self.space):
            raise DiskFull()

    def _require(self, key: int) -> None:
        if split_id(key)[0] in self.gone:
            raise UnknownTopic()

    def reserve_bytes(self, size_bytes: int) -> None:
        self.reserved += size_bytes

    def release_bytes(self, size_bytes: int) -> None:
        self.reserved -= size_bytes
        assert self.reserved >= 0, "more was released than was reserved"

    def display_name(self, key: int) -> str | None:
        if key == OFFSETS_KEY:
            return "the offsets of groups"
        incarnation, number = split_id(key)
        return None if incarnation in self.gone else f"topic{incarnation}-{number}"

    def last_applied(self, key: int, source: SourceId) -> tuple[int, int] | None:
        return self.target(key).applied

    def last_durable(self, key: int, source: SourceId) -> tuple[int, int] | None:
        target = self.target(key)
        return target.cut(target.forced).applied

    def append_bytes_max(self, key: int) -> int:
        return self.limit

    def apply(self, effect: Effect, done: AppliedCallback) -> None:
        self.asked.append(("apply", effect.key, effect.source.high, effect.source.low))
        self._queue.append((effect, done))

    @property
    def due(self) -> bool:
        return bool(self._queue)

    def write(self) -> bool:
        """The turn's end."""
        queue, self._queue = self._queue, []
        for effect, done in queue:
            self._write(effect, done)
        if self.automatic:
            asked = {mark.key for mark, _ in self._waiting}
            for key in asked:
                self.force(key)
        return bool(queue)

    def _write(self, effect: Effect, done: AppliedCallback) -> None:
        try:
            self._require(effect.key)
        except UnknownTopic as error:
            done(None, error)
            return
        target = self.target(effect.key)
        place = (effect.source.high, effect.source.low)
        if target.stopped is not None:
            done(None, StorageStopped(reason=target.stopped, outcome="not done"))
        elif target.full:
            done(None, DiskFull())
        elif target.applied is not None and place <= target.applied:
            done(AppendResult(effect.key, target.end, ()), None)
        else:
            offsets = self._append(target, effect, place)
            done(AppendResult(effect.key, target.end, offsets), None)

    def _append(self, target: Target, effect: Effect, place: tuple[int, int]) -> list[int]:
        if isinstance(effect, CommitOffsets):
            for places in effect.groups:
                target.places[places.group] = tuple(places.positions)
            target.appends.append(Append(place, [], 0))
            return []
        records = []
        offsets = []
        size = 0
        for batch in effect.batches:
            offsets.append(target.end + size)
            size += len(batch.data)
            for record in records_of(batch.data):
                payload = bytes(batch.data[record.position + 20 : record.position + record.size])
                records.append((record.id, payload))
        self.before_append()
        if not records:
            self.violations.append(f"an append without records at {place}")
        target.appends.append(Append(place, records, size))
        return offsets

    def begin_exclusive(self, key: int, source: SourceId) -> None:
        self.target(key).held += 1
        assert self.target(key).held == 1, "holds do not nest"
        self.asked.append(("hold", key))

    def end_exclusive(self, key: int) -> None:
        self.target(key).held = 0
        self.asked.append(("unhold", key))

    def is_durable(self, mark: AppendResult) -> bool:
        if split_id(mark.key)[0] in self.gone and mark.key != OFFSETS_KEY:
            return True
        return self.target(mark.key).forced * 1000 >= mark.end

    def fsync_to(self, mark: AppendResult, done: DurableCallback) -> None:
        self.asked.append(("force", mark.key))
        self._waiting.append((mark, done))

    def _report_forced(self) -> None:
        waiting, self._waiting = self._waiting, []
        for mark, done in waiting:
            if self.is_durable(mark):
                done(None)
            elif self.target(mark.key).stopped is not None:
                done(StorageStopped())
            else:
                self._waiting.append((mark, done))

    def fail_force(self, key: int, reason: str = "its force failed") -> None:
        """The disk fails under a force of that target: it stops, and what is on the disk is unknown."""
        self.target(key).stopped = reason
        self._report_forced()

    def check_offsets(self, rows: Sequence[Row], session: Any) -> list[GroupPositions]:
        found = []
        for row in rows:
            for epoch, (xid, groups) in self.locks.items():
                if row.group in groups:
                    raise Busy(f"locked by {xid} ({epoch})")
            if self.generations.get(row.group, row.generation) != row.generation:
                raise Fenced()
            found.append(GroupPositions(row.group, row.generation, [(16, 0, row.offset, 0, 1)]))
        return found

    def lock_offsets(self, epoch: int, xid: str, groups: Sequence[GroupPositions]) -> None:
        known = self.locks.get(epoch, (xid, []))
        self.locks[epoch] = (xid, [*known[1], *(each.group for each in groups)])

    def unlock_offsets(self, epoch: int) -> None:
        self.locks.pop(epoch, None)

    def saved(self, group: str) -> int | None:
        """Where a group goes on."""
        places = self.target(OFFSETS_KEY).places.get(group)
        return None if places is None else int(places[0][2])
