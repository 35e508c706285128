"""Committed offsets of groups: commits by members and by transactions, reads, and locks of transactions.

An offset belongs to one incarnation of a topic. Offsets of deleted topics are ignored in commits and reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

from tfmq.apply_target import OFFSETS_KEY, AppendResult, CommitOffsets, GroupPositions
from tfmq.broker.catalog import Catalog
from tfmq.broker.catalog_state import OFFSETS, TX_OFFSETS, CommittedOffset, GroupState, Key
from tfmq.broker.groups.lag import MeasuredOffset, offsets_with_lag
from tfmq.broker.partition import Waiter
from tfmq.broker.reply import Reply, Run, client_error, reply_when_done
from tfmq.broker.topics import Topics
from tfmq.errors import UNKNOWN, Busy, NotAllowed, StorageStopped
from tfmq.protocol.commands import GroupOffset, PartitionName, ReadOffsets

ANY_INCARNATION = 0

OffsetRow = tuple[int, int, int, int, int]
"""(incarnation, partition, offset, index, log epoch)."""


class GroupOffsetStore:
    """Commits and reads offsets, and replies when they are durable. Raises Busy if a transaction locked an offset."""

    def __init__(self, catalog: Catalog, topics: Topics, run: Run, offsets_max: int, locks: OffsetLocks) -> None:
        self._catalog, self._topics, self._run, self._locks = catalog, topics, run, locks
        self._offsets_max = offsets_max

    def commit(
        self,
        group: str,
        generation: int,
        places: Sequence[OffsetRow],
        reply: Reply,
        *,
        fenced: Sequence[PartitionName] | None = None,
        before: Sequence[Sequence[Any]] = (),
        done: Waiter | None = None,
    ) -> None:
        """Commit the offsets `places`. The reply has their number, and the list `fenced` unless that is None.

        The catalog entries `before` are written before the offsets, in the same append. `done(error)` is called before
        the reply. Raises Busy if a transaction has one of the offsets in doubt, NotAllowed above the limit of offsets.
        """
        self.require_free(group, places)

        def forced(error: BaseException | None) -> None:
            if done is not None:
                done(error)
            if error is not None:
                reply.error(client_error(error))
            elif fenced is None:
                reply.ok(len(places))
            else:
                reply.ok(len(places), list(fenced))

        entries = [*before, (OFFSETS, group, generation, places)] if places else before
        if entries:
            self._catalog.submit(entries[0], forced, *entries[1:])
        else:
            forced(None)

    def require_free(self, group: str, places: Sequence[OffsetRow]) -> None:
        """Raise Busy if a transaction has one of the offsets in doubt, NotAllowed if they exceed the broker's limit."""
        self.require_unlocked(group, [place[:2] for place in places])
        register = self._catalog.state
        if register.offsets_count + len(places) <= self._offsets_max:
            return
        row = register.groups.get(group, GroupState())
        new = {place[:2] for place in places} - row.offsets.keys()
        if register.offsets_count + len(new) > self._offsets_max:
            raise NotAllowed(
                f"The broker keeps {register.offsets_count} offsets of groups; its limit is limits.group_offsets."
            )

    def require_unlocked(self, group: str, keys: Iterable[Key] | None = None) -> None:
        """Raise Busy if a transaction has in doubt the group's offset in one of `keys` (None: in any partition)."""
        refusal = self._locks.busy_error(group, keys)
        if refusal is not None:
            raise refusal

    def offset_row(self, each: GroupOffset, any_incarnation: bool = False) -> OffsetRow | None:
        """Return `each` as a row of an OFFSETS entry; None if its topic, incarnation or partition does not exist.

        If `any_incarnation` is set, ANY_INCARNATION in `each` stands for the topic's present incarnation.
        """
        topic = self._topics.get(each.topic)
        if topic is None or each.partition >= len(topic.partitions):
            return None
        if each.incarnation != topic.incarnation and not (any_incarnation and each.incarnation == ANY_INCARNATION):
            return None
        return topic.incarnation, each.partition, each.offset, each.index, each.epoch

    def read(self, request: ReadOffsets, reply: Reply) -> None:
        """Reply with the committed offsets when they are durable. Raises Busy if a transaction has locked one."""
        keys = wanted = None
        if request.partitions is not None:
            found = ((self._topics.get(each.topic), each.partition) for each in request.partitions)
            keys = [(topic.incarnation, number) for topic, number in found if topic is not None]
            wanted = {tuple(each) for each in request.partitions}
        self.require_unlocked(request.group, keys)
        rows = [
            (name, *key, *place)
            for key, place, name in self.in_existing_topics(self._catalog.state.groups.get(request.group, GroupState()))
            if wanted is None or (name, key[1]) in wanted
        ]
        self._catalog.when_durable(reply_when_done(reply, lambda: (rows,)))

    def in_existing_topics(self, group: GroupState) -> Iterable[tuple[Key, CommittedOffset, str]]:
        """Yield (partition, committed offset, topic name) for the group's offsets in existing topics."""
        for key, place in group.offsets.items():
            name = self._topics.by_incarnation(key[0])
            if name is not None:
                yield key, place, name

    def describe(
        self, group: GroupState, member_of: Callable[[Key], str], reply: Reply, description: dict[str, Any]
    ) -> None:
        """Reply with `description`, and the group's offsets with their lag in messages.

        A partition without a committed offset is included if a member owns it, or has owned and released it.
        `member_of` returns the living owner of a partition, "" if there is none. The catalog does not show that,
        because it names a dead member until another one owns the partition.
        """
        rows: list[MeasuredOffset] = [
            (name, key[1], member_of(key), place, self._topics.find_partition(*key))
            for key, place, name in self.in_existing_topics(group)
        ]
        for key in (group.owners.keys() | group.released) - group.offsets.keys():
            name = self._topics.by_incarnation(key[0])
            if name is not None:
                rows.append((name, key[1], member_of(key), None, self._topics.find_partition(*key)))

        done = reply_when_done(reply, lambda offsets: ({**description, "offsets": offsets},))
        self._run(partial(offsets_with_lag, rows), done)


OFFSETS_PER_CHANGE_MAX: Final = 10_000
"""Maximum offsets in one change, unless one effect has more. They take 400 KB, far less than a segment of 8 MiB."""

AppliedCallback = Callable[[AppendResult | None, BaseException | None], None]


class TransactionOffsetQueue:
    """Queue of offsets that transactions commit, written in the order of their LSNs (positions in the journal).

    An effect has the offsets of one commit. The effects that are queued during a turn are written as one change of the
    catalog, completely or not at all. The next change waits until this one is written: the catalog stores only the
    highest applied LSN, so an effect must never be written while an earlier one is missing. `write` is called at the
    end of a turn, before `Catalog.write`.
    """

    def __init__(self, catalog: Catalog, mark_ready: Callable[[], None]) -> None:
        self._catalog, self._mark_ready = catalog, mark_ready
        self._queue: list[tuple[CommitOffsets, AppliedCallback]] = []
        self._writing = False

    def enqueue(self, effect: CommitOffsets, done: AppliedCallback) -> None:
        """Queue an effect. Calls `done(result, None)` when it is written, or `done(None, error)`.

        If the effect was written before, because a committed transaction is applied again, `done` is called at once.
        """
        applied = self._catalog.state.applied_lsns.get(effect.source.id)
        stopped = self._catalog.log.stopped
        if applied is None or effect.source[2:] > applied:
            self._queue.append((effect, done))
            self._mark_ready()
        elif stopped is not None:
            done(None, StorageStopped(reason=stopped, outcome=UNKNOWN))
        else:
            done(self._mark(), None)

    def write(self) -> None:
        """Submit queued effects to the catalog. Does nothing while earlier effects are being written."""
        if not self._queue or self._writing:
            return
        count = self._next_change_length()
        queue, self._queue = self._queue[:count], self._queue[count:]
        entries = [
            (TX_OFFSETS, *effect.source[1:], [(each.group, each.generation, each.positions) for each in effect.groups])
            for effect, _ in queue
        ]
        self._writing = True
        self._catalog.submit(entries[0], partial(self._written, queue), *entries[1:], wait_durable=False)

    def _next_change_length(self) -> int:
        places = 0
        for count, (effect, _) in enumerate(self._queue):
            places += sum(len(group.positions) for group in effect.groups)
            if count and places > OFFSETS_PER_CHANGE_MAX:
                return count
        return len(self._queue)

    def _mark(self) -> AppendResult:
        return AppendResult(OFFSETS_KEY, self._catalog.log.end_offset, ())

    def _written(self, queue: list[tuple[CommitOffsets, AppliedCallback]], error: BaseException | None) -> None:
        self._writing = False
        if error is not None:
            queue, self._queue = [*queue, *self._queue], []
        self._mark_ready()
        mark = self._mark() if error is None else None
        for _, done in queue:
            done(mark, error)


class OffsetLocks:
    """Offsets that transactions have in doubt, by group and partition. No other request may read or change them.

    Otherwise a reader would continue from the old offset, and the transaction would overwrite a commit of a member.
    Usually one transaction locks an offset. After a crash several may, because a committed transaction is applied
    again. A lock is identified by the epoch (number) of its transaction.
    """

    def __init__(self) -> None:
        self._locks_by_group: dict[str, dict[Key, dict[int, str]]] = {}
        self._locks_by_epoch: dict[int, list[tuple[str, Key]]] = {}

    def lock(self, epoch: int, xid: str, groups: Sequence[GroupPositions]) -> None:
        """Lock the offsets of `groups` for the transaction with the number `epoch` and the name `xid`."""
        held = self._locks_by_epoch.setdefault(epoch, [])
        for each in groups:
            locked = self._locks_by_group.setdefault(each.group, {})
            for place in each.positions:
                key = (place[0], place[1])
                locked.setdefault(key, {})[epoch] = xid
                held.append((each.group, key))

    def unlock(self, epoch: int) -> None:
        """Release all locks of the transaction with this epoch, if it has any."""
        for group, key in self._locks_by_epoch.pop(epoch, ()):
            locked = self._locks_by_group.get(group, {})
            holders = locked.get(key, {})
            holders.pop(epoch, None)
            if not holders:
                locked.pop(key, None)
            if not locked:
                self._locks_by_group.pop(group, None)

    def busy_error(self, group: str, keys: Iterable[Key] | None) -> Busy | None:
        """Return an error if a transaction has locked the group's offset in one of `keys` (None: in any), else None."""
        locked = self._locks_by_group.get(group)
        if not locked:
            return None
        for key in locked if keys is None else keys:
            for xid in locked.get(key, {}).values():
                return Busy(
                    f"The transaction {xid} has offsets of the group {group} in doubt. They are free when it has ended:"
                    f" wait, or look at it with tfmq tx show {xid}.",
                    xid=xid,
                )
        return None
