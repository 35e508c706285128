"""Which member of a group gets which partition: pure functions of the members, the partitions, and who has them now.

Each strategy gives every partition to exactly one of the members that take it, and leaves out those that nobody takes;
the same arguments in another order give the same result.

    sticky            as even as can be, and of all ways to that one that moves as little as it needs to
    range             for each topic contiguous runs of the sorted partitions, to the members sorted by name; the first
                      ones get one more where the numbers do not divide
    consistent_hash   each partition to the next member on a ring of hashes: a member that comes or goes moves only
                      its own, and nothing is exactly even
"""

import hashlib
from bisect import bisect
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Final, NamedTuple

from tfmq.errors import BadRequest
from tfmq.protocol.messages import CONSISTENT_HASH, RANGE, STICKY

POINTS: Final = 64
"""Of a member on the ring: with so many the largest share is seldom above twice the mean."""

EVENING_STEPS_MAX: Final = 2_000_000
"""Looks at a member's partition, or at a member, in search for evener shares; then they are even enough. A plan is made
in the broker's own thread: a thousand members that each name other partitions keep it for a second at most, not for a
minute.
"""

Partition = tuple[str, int]
"""(topic, number)."""


class Candidate(NamedTuple):
    """A member as the strategies see it; `only` None: all partitions of its topics."""

    id: str
    topics: Collection[str]
    only: Collection[Partition] | None = None

    def takes(self, partition: Partition) -> bool:
        return partition[0] in self.topics and (self.only is None or partition in self.only)


def assign(
    strategy: str,
    members: Iterable[Candidate],
    partitions: Iterable[Partition],
    owners: Mapping[Partition, str],
) -> dict[Partition, str]:
    """The member of each partition that any of them takes. `owners` says who has which now; who is not (any more) among
    `members` counts for nothing. Raises BadRequest for an unknown strategy.
    """
    return strategy_of(strategy)(_takers(list(members), sorted(partitions, key=_number_first)), owners)


Takers = dict[Partition, frozenset[str]]
"""Who takes a partition, for those that anybody takes. Low numbers of all topics come first, so that what is taken off
the end of somebody's share is of all topics."""

Strategy = Callable[[Takers, Mapping[Partition, str]], dict[Partition, str]]


def strategy_of(name: str) -> Strategy:
    """Raises BadRequest that names those there are."""
    found = _STRATEGIES.get(name)
    if found is None:
        raise BadRequest(f"{name!r} is no strategy of a group; there are {', '.join(sorted(_STRATEGIES))}.")
    return found


_number_first = itemgetter(1, 0)


def _takers(members: Sequence[Candidate], partitions: Sequence[Partition]) -> Takers:
    """Equal sets are one object, so that to compare thousands of them costs nothing."""
    whole: dict[str, frozenset[str]] = {}
    picked: dict[Partition, set[str]] = {}
    for each in members:
        for partition in each.only or ():
            if partition[0] in each.topics:
                picked.setdefault(partition, set()).add(each.id)
    takers: Takers = {}
    for partition in partitions:
        topic = partition[0]
        if topic not in whole:
            whole[topic] = frozenset(
                each.id for each in members if each.only is None and topic in each.topics
            )
        found = whole[topic]
        if partition in picked:
            found |= picked[partition]
        if found:
            takers[partition] = found
    same = {found: found for found in takers.values()}
    return {partition: same[found] for partition, found in takers.items()}


# range


def _range(takers: Takers, owners: Mapping[Partition, str]) -> dict[Partition, str]:
    """Each run is of partitions of one topic that the same members take."""
    runs: dict[tuple[str, frozenset[str]], list[Partition]] = {}
    for partition in sorted(takers):
        runs.setdefault((partition[0], takers[partition]), []).append(partition)
    assigned = {}
    for (_, members), run in runs.items():
        size, longer = divmod(len(run), len(members))
        start = 0
        for number, member in enumerate(sorted(members)):
            end = start + size + (number < longer)
            assigned.update(dict.fromkeys(run[start:end], member))
            start = end
    return assigned


# consistent hash


def _consistent_hash(takers: Takers, owners: Mapping[Partition, str]) -> dict[Partition, str]:
    points = sorted(
        (_hash(f"{member}#{number}"), member)
        for member in {each for members in takers.values() for each in members}
        for number in range(POINTS)
    )
    return {partition: _next(points, partition, members) for partition, members in takers.items()}


def _next(points: Sequence[tuple[int, str]], partition: Partition, members: Collection[str]) -> str:
    """The first of `members` behind the partition's own point."""
    start = bisect(points, (_hash(f"{partition[0]}/{partition[1]}"), ""))
    for step in range(len(points)):
        member = points[(start + step) % len(points)][1]
        if member in members:
            return member
    raise ValueError("a partition that nobody takes has no place on the ring")


def _hash(text: str) -> int:
    """The same in every process and every release."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


# sticky


def _sticky(takers: Takers, owners: Mapping[Partition, str]) -> dict[Partition, str]:
    """Whoever has a partition and takes it keeps it, as far as that is even; the rest goes to those who have least."""
    kept = {
        partition: owners[partition]
        for partition, members in takers.items()
        if owners.get(partition) in members
    }
    kinds = set(takers.values())
    if len(kinds) == 1:
        return _even(next(iter(kinds)), takers, kept)
    shares = _Shares(takers, kept)
    while shares.even_out():
        pass
    return shares.assigned


def _even(
    members: Collection[str], partitions: Collection[Partition], kept: Mapping[Partition, str]
) -> dict[Partition, str]:
    """All take all: each gets the quotient, and those who have most anyhow one more where it does not divide."""
    has: dict[str, list[Partition]] = {member: [] for member in sorted(members)}
    for partition, member in kept.items():
        has[member].append(partition)
    size, longer = divmod(len(partitions), len(has))
    rest = [partition for partition in partitions if partition not in kept]
    most_first = sorted(has, key=lambda member: -len(has[member]))
    for number, member in enumerate(most_first):
        own = has[member]
        rest += own[size + (number < longer) :]
        del own[size + (number < longer) :]
    rest.sort(key=_number_first, reverse=True)
    for number, member in enumerate(most_first):
        while len(has[member]) < size + (number < longer):
            has[member].append(rest.pop())
    return {partition: member for member, own in has.items() for partition in own}


class _Shares:
    """Who has what, where not all members take the same, while it is evened out by chains of single moves.

    Where no chain brings two members' numbers nearer to each other, nothing is evener (that is the theorem on optimal
    semi-matchings); and who could not be helped cannot be later, because those who have most come first. The search
    ends after `EVENING_STEPS_MAX`.
    """

    def __init__(self, takers: Takers, kept: Mapping[Partition, str]) -> None:
        self.assigned: dict[Partition, str] = {}
        self._takers = takers
        self._has: dict[str, dict[Partition, None]] = {
            member: {} for members in takers.values() for member in members
        }
        self._settled: set[str] = set()
        self._steps = EVENING_STEPS_MAX
        for partition, member in kept.items():
            self._give(partition, member)
        for partition, members in takers.items():
            if partition not in kept:
                self._give(partition, min(members, key=self._size_and_name))

    def _size_and_name(self, member: str) -> tuple[int, str]:
        return len(self._has[member]), member

    def _give(self, partition: Partition, member: str) -> None:
        before = self.assigned.get(partition)
        if before is not None:
            del self._has[before][partition]
        self.assigned[partition] = member
        self._has[member][partition] = None

    def even_out(self) -> bool:
        """One chain of moves from the member that has most, if there is one that helps; whether there was."""
        open_ones = self._has.keys() - self._settled
        self._steps -= len(open_ones)
        for member in sorted(open_ones, key=self._size_and_name, reverse=True):
            chain = self._chain(member)
            if chain:
                for partition, to in chain:
                    self._give(partition, to)
                return True
            self._settled.add(member)
        return False

    def _chain(self, start: str) -> list[tuple[Partition, str]]:
        """Moves, each from the one before, that end at the nearest member with at least two less than `start`."""
        most = len(self._has[start]) - 2
        came: dict[str, tuple[Partition, str]] = {}
        waiting = deque([start])
        while waiting and self._steps > 0:
            member = waiting.popleft()
            for to, partition in self._neighbours(member):
                if to == start or to in came:
                    continue
                came[to] = (partition, member)
                if len(self._has[to]) <= most:
                    return _backwards(came, to, start)
                waiting.append(to)
        return []

    def _neighbours(self, member: str) -> list[tuple[str, Partition]]:
        """Who could take a partition of `member`, those who have least first, and the last one that they could."""
        last = {self._takers[partition]: partition for partition in self._has[member]}
        found = {to: partition for members, partition in last.items() for to in members}
        self._steps -= len(self._has[member]) + sum(map(len, last)) + len(found)
        return sorted(found.items(), key=lambda each: self._size_and_name(each[0]))


def _backwards(
    came: Mapping[str, tuple[Partition, str]], end: str, start: str
) -> list[tuple[Partition, str]]:
    moves = []
    while end != start:
        partition, member = came[end]
        moves.append((partition, end))
        end = member
    return moves


_STRATEGIES: Final[Mapping[str, Strategy]] = {
    STICKY: _sticky,
    RANGE: _range,
    CONSISTENT_HASH: _consistent_hash,
}
