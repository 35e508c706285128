"""Where a consumer starts to read a partition: at the group's committed offset, or by the rules below.

A committed offset counts only if it was committed in the topic's present incarnation. If a partition has no such
offset, it is read from its earliest offset in two cases: the partition is new, or the group has an offset in another
partition of the topic. Otherwise it is read from the user's `start`. A partition is new if it was created after the
consumer started; unless `start` is "latest", the consumer must also have read the topic before.

In a group with start="latest", the consumer requests the end offsets of all partitions in topics in which the group has
no offset: once, after the first metadata response. So the start does not depend on when a partition is assigned. The
start is committed before anything is read, so that after a crash the next owner starts at the same offset.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from tfmq.client.connection.connection import ClientConnection
from tfmq.client.consumer.message import UNKNOWN, ReadPosition
from tfmq.client.consumer.options import EARLIEST, LATEST, ConsumerOptions, StartPosition
from tfmq.client.consumer.rebalance import Rebalance
from tfmq.client.operation import Operation, Wait
from tfmq.errors import Busy, NotSupported, TfmqError, UnknownTopic
from tfmq.offsets.storage import PartitionName, StoredOffset
from tfmq.protocol.commands import Locate

log = logging.getLogger("tfmq.consumer")


@dataclass(frozen=True, slots=True)
class Starts:
    """Result of `StartPositions.find`. A partition whose start is not known yet is missing in `positions`."""

    positions: Mapping[PartitionName, ReadPosition]
    stored: Mapping[PartitionName, StoredOffset]
    """Offsets of the group, including the start positions that were just committed."""
    generations: Mapping[PartitionName, int]
    """For each partition, the generation of the assignment for which the position was found."""


class StartPositions:
    """Finds the start position of each newly assigned partition. `fenced` is called with partitions whose start
    position was not committed because another member owns them by now."""

    def __init__(
        self,
        options: ConsumerOptions,
        link: ClientConnection,
        group: Rebalance | None,
        fenced: Callable[[list[PartitionName]], None],
    ) -> None:
        self.trouble = OffsetTroubleLog(options.group)
        self._options = options
        self._link = link
        self._group = group
        self._fenced = fenced
        self._initial: dict[PartitionName, int] | None = None
        """The partitions subscribed at the first metadata response, with their topics' incarnations; None before it."""
        self._wanted: Mapping[PartitionName, int] = {}
        self._topics: dict[str, int] = {}
        """The incarnation of each topic of which a partition was read."""
        self._latest_positions: dict[PartitionName, ReadPosition] = {}
        """The positions at which partitions start with start="latest", as far as they are known."""
        self._latest_unresolved: dict[PartitionName, int] | None = None if group and options.start_latest else {}
        """Partitions (with incarnation) whose position for "latest" is still unknown; None: not computed yet."""

    def subscribed(self, wanted: Mapping[PartitionName, int]) -> None:
        """Record the subscribed partitions, with the incarnations of their topics, after a metadata response."""
        self._wanted = wanted
        if self._initial is None:
            self._initial = dict(wanted)

    def started(self, name: PartitionName, incarnation: int) -> None:
        """Remember that the topic of this partition is read, so that partitions added later count as new."""
        self._topics[name.topic] = incarnation

    def resolve_latest(self) -> Operation[None]:
        """In a group with start="latest", find the ends of the partitions in topics for which the group has no offset.
        If an end is not found, the next call requests it again."""
        if self._latest_unresolved is None:
            assert self._group is not None and self._initial is not None
            initial = self._initial
            stored = yield from self._read_all(initial)
            begun = {(name.topic, each.incarnation) for name, each in stored.items()}
            self._latest_unresolved = {n: each for n, each in initial.items() if (n.topic, each) not in begun}
        if self._latest_unresolved:
            questions = dict.fromkeys(self._latest_unresolved, LATEST)
            self._latest_positions |= yield from self._locate_all(self._latest_unresolved, questions)
            self._latest_unresolved = {
                name: incarnation
                for name, incarnation in self._latest_unresolved.items()
                if name not in self._latest_positions and self._wanted.get(name) == incarnation
            }

    def find(self, fresh: Mapping[PartitionName, int]) -> Operation[Starts]:
        """Return the start positions of the newly assigned partitions `fresh`, a map to the incarnations of their
        topics. With start="latest", also commit these positions in the group."""
        stored: dict[PartitionName, StoredOffset] = {}
        generations: dict[PartitionName, int] = {}
        refused: set[PartitionName] = set()
        locked: dict[PartitionName, Busy] = {}
        if self._group is not None:
            assigned, offsets = self._group.membership.assigned, self._group.offsets
            generations = {name: assigned[name].grant for name in fresh}
            claimed, refused = yield from offsets.claim(fresh)
            stored, locked = yield from self._read_unlocked(list(fresh))
            stored |= claimed
            for busy in locked.values():
                self.trouble.log(busy)
                break
            if self._options.start != EARLIEST and not all(
                name in stored and stored[name].incarnation == each
                for name, each in fresh.items()
                if name not in locked
            ):
                # Some partition has no offset: find out whether the group has an offset in another partition of the
                # topic. The offsets of all partitions are requested only in this case, because a thousand members
                # may request them at the same time. With EARLIEST the result makes no difference.
                stored = (yield from self._read_all(self._wanted)) | stored
            self.trouble.log_refused(refused)
        known = {name.topic: each.incarnation for name, each in stored.items()}
        positions: dict[PartitionName, ReadPosition] = {}
        questions: dict[PartitionName, StartPosition] = {}
        for name, incarnation in fresh.items():
            kept = stored.get(name)
            if name in refused or name in locked or name in (self._latest_unresolved or ()):
                continue
            if kept is not None and kept.incarnation == incarnation:
                positions[name] = read_position_of(name, kept)
            elif name in self._latest_positions and not self._is_new_partition(name, incarnation):
                positions[name] = self._latest_positions[name]
            elif known.get(name.topic) == incarnation or self._is_new_partition(name, incarnation):
                questions[name] = EARLIEST
            elif self._options.start.exact:
                positions[name] = ReadPosition(self._options.start.value, UNKNOWN, UNKNOWN)
            else:
                questions[name] = self._options.start
        positions |= yield from self._locate_all(fresh, questions)
        if self._options.start_latest:
            stored |= yield from self._commit_start_positions(fresh, generations, positions, stored)
        return Starts(positions, stored, generations)

    def _is_new_partition(self, name: PartitionName, incarnation: int) -> bool:
        """Return whether a partition is new (see the module). If a new partition has no committed offset, it is read
        from its earliest offset."""
        if self._initial is None or self._initial.get(name) == incarnation:
            return False
        return self._options.start_latest or self._topics.get(name.topic) == incarnation

    # The group's offsets

    def _read_unlocked(
        self, names: list[PartitionName], *, others: bool = False
    ) -> Operation[tuple[dict[PartitionName, StoredOffset], dict[PartitionName, Busy]]]:
        """Return the stored offsets, and the broker's error for each partition whose offset is in doubt.

        An offset is in doubt while a prepared transaction that commits it has not ended. The broker refuses a request
        that names a partition with such an offset. So a refused request is halved until these partitions are found, and
        the group continues with the other ones. With `others`, request the offsets of all partitions of the group.
        """
        assert self._group is not None
        try:
            return (yield from self._group.offsets.read(names, while_busy=False, others=others)), {}
        except Busy as busy:
            if "xid" not in busy.details:
                raise
            if len(names) == 1 and not others:
                return {}, {names[0]: busy}
        if others:
            return (yield from self._read_unlocked(names))
        middle = len(names) // 2
        stored, locked = yield from self._read_unlocked(names[:middle])
        more, more_locked = yield from self._read_unlocked(names[middle:])
        return stored | more, locked | more_locked

    def _read_all(self, wanted: Mapping[PartitionName, int]) -> Operation[dict[PartitionName, StoredOffset]]:
        """Return the group's offsets that are not in doubt. Raises Busy if all offsets in one topic are in doubt."""
        stored, locked = yield from self._read_unlocked(list(wanted), others=True)
        known = {(name.topic, each.incarnation) for name, each in stored.items()}
        for name, busy in locked.items():
            if (name.topic, wanted[name]) not in known:
                raise busy
        return stored

    def _commit_start_positions(
        self,
        fresh: Mapping[PartitionName, int],
        generations: Mapping[PartitionName, int],
        positions: dict[PartitionName, ReadPosition],
        stored: Mapping[PartitionName, StoredOffset],
    ) -> Operation[dict[PartitionName, StoredOffset]]:
        """Commit the start positions of partitions for which the group has no offset. Return what was committed.
        `generations`: the generation of each assignment. Partitions whose commit is fenced are removed from
        `positions`."""
        if self._group is None:
            return {}
        rows = {
            name: StoredOffset(position.offset, 0, fresh[name], position.epoch, generations[name])
            for name, position in positions.items()
            if name not in stored or stored[name].incarnation != fresh[name]
        }
        if not rows:
            return {}
        until = self._link.now() + self._options.timeout
        refused = yield from self._group.offsets.save(rows, until)
        generation_of = self._group.membership.generation_of
        for name in refused:
            positions.pop(name, None)
        if lost := [name for name in refused if generation_of(name) == generations[name]]:
            self._fenced(lost)
        return {name: row for name, row in rows.items() if name not in refused}

    # Positions from the broker

    def _locate_all(
        self, fresh: Mapping[PartitionName, int], questions: Mapping[PartitionName, StartPosition]
    ) -> Operation[dict[PartitionName, ReadPosition]]:
        """Request all the start positions in `questions` from the broker at once, and return the positions found.

        If the broker replies with a retriable error or does not know the topic, the partition is left out of the
        result, and `Assignment.run` tries again later. Other errors are raised.
        """
        found, requests = {}, {}
        for name, each in questions.items():
            request = Locate(name.topic, fresh[name], name.partition, each.by, each.value)
            requests[name] = self._link.send_request(request)
        try:
            for name, pending in requests.items():
                while not pending.done:
                    yield Wait((pending,))
                if pending.error is None:
                    found[name] = ReadPosition(pending.reply.offset, pending.reply.ordinal, pending.reply.epoch)
                elif not pending.error.retriable and not isinstance(pending.error, UnknownTopic):
                    raise pending.error
        finally:
            for pending in requests.values():
                self._link.abandon(pending)
        return found


def read_position_of(name: PartitionName, kept: StoredOffset) -> ReadPosition:
    """Return the read position of a stored offset. Raises NotSupported for an offset inside a compressed batch."""
    if kept.index:
        raise NotSupported(
            f"{name}: the group's offset is inside a compressed batch, which this release cannot read;"
            " use a newer client."
        )
    return ReadPosition(kept.offset, UNKNOWN, kept.epoch)


# Logging

SQL_XID_PREFIX: Final = "tfmq.sql."
"""Prefix of the names of transactions that `tfmq.sql` begins."""
SQL_ADVICE: Final = (
    " It is a transaction of tfmq.sql: it ends when a program of its producer group that has called"
    " tfmq.sql.check(producer, engine) answers the broker's check. If this program is the only one, call that"
    " before the first message is read: without it this consumer may wait without end."
)


class OffsetTroubleLog:
    """Logs once, and not with each retry, why the offsets of `group` cannot be read."""

    def __init__(self, group: str | None) -> None:
        self._group = group
        self._last = ""

    def log(self, trouble: TfmqError) -> None:
        """Log why the offsets cannot be read: a transaction is in doubt, or the storage failed."""
        if trouble.sentence != self._last:
            self._last = trouble.sentence
            advice = SQL_ADVICE if str(trouble.details.get("xid", "")).startswith(SQL_XID_PREFIX) else ""
            log.warning("Group %s waits for its offsets: %s%s", self._group, trouble, advice)

    def log_refused(self, refused: Iterable[PartitionName]) -> None:
        """Log which partitions the offset storage refused.

        The refusal is transient if another member has just got the partitions, and permanent if the storage has later
        generations than this broker will assign, for example those of another broker.
        """
        names = ", ".join(map(str, sorted(refused)))
        if names and names != self._last:
            self._last = names
            text = "Group %s: the offset storage has a later generation of %s; trying again."
            log.warning(text, self._group, names)

    def end(self) -> None:
        """Record that all offsets have been read: the next trouble is logged even if it is the same as the last one."""
        self._last = ""
