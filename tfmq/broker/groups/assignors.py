"""Assignment strategies of consumer groups, as pure functions.

Each strategy assigns every partition to exactly one of the members that accept the partition, and leaves out partitions
that no member accepts. The result does not depend on the order in which members and partitions are passed.

`sticky` makes the numbers of partitions as even as possible with the fewest changes of owners. `range` sorts the
members by name and assigns a contiguous range of each topic's partitions to each member. `consistent_hash` assigns each
partition to the next member on a hash ring: if a member joins or leaves, only its partitions change their owner.
"""

import hashlib
from bisect import bisect
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Final, NamedTuple

from tfmq.errors import BadRequest
from tfmq.protocol.commands import CONSISTENT_HASH, RANGE, STICKY

POINTS_PER_MEMBER: Final = 64
"""Points of each member on the hash ring: enough that a member rarely gets more than twice the mean of partitions."""

SEARCH_STEPS_MAX: Final = 2_000_000
"""Limit of steps in the search for more even assignments; each step examines a partition or a member. The search runs
in the broker's thread. With this limit it takes a second at most for a thousand members with different partition lists,
and without it a minute."""

Partition = tuple[str, int]
"""(topic, partition number)."""


class Candidate(NamedTuple):
    """A member, as input of a strategy. It accepts all partitions of its topics or, if `only` is given, just these."""

    id: str
    topics: Collection[str]
    only: Collection[Partition] | None = None

    def accepts(self, partition: Partition) -> bool:
        return partition[0] in self.topics and (self.only is None or partition in self.only)


def assign(
    strategy: str, members: Iterable[Candidate], partitions: Iterable[Partition], owners: Mapping[Partition, str]
) -> dict[Partition, str]:
    """Return the assigned member of each partition that any member accepts. Raises BadRequest (unknown strategy).

    `owners` has the current owners. An owner that is not in `members` any more is ignored.
    """
    return strategy_of(strategy)(_accepting_members(list(members), sorted(partitions, key=_number_first)), owners)


AcceptingMembers = dict[Partition, frozenset[str]]
"""Partition -> the members that accept it. The partitions are sorted by number, then topic. If a member has too
many partitions, it loses the last ones in this order. So the lost partitions are spread over the topics."""

Strategy = Callable[[AcceptingMembers, Mapping[Partition, str]], dict[Partition, str]]


def strategy_of(name: str) -> Strategy:
    """Return the function of the strategy `name`. Raises BadRequest, which lists the known strategies."""
    found = _STRATEGIES.get(name)
    if found is None:
        raise BadRequest(f"{name!r} is no strategy of a group; there are {', '.join(sorted(_STRATEGIES))}.")
    return found


_number_first = itemgetter(1, 0)


def _accepting_members(members: Sequence[Candidate], partitions: Sequence[Partition]) -> AcceptingMembers:
    """Return the members that accept each partition. Equal sets are the same object, to be compared quickly."""
    whole: dict[str, frozenset[str]] = {}
    picked: dict[Partition, set[str]] = {}
    for each in members:
        for partition in each.only or ():
            if partition[0] in each.topics:
                picked.setdefault(partition, set()).add(each.id)
    takers: AcceptingMembers = {}
    for partition in partitions:
        topic = partition[0]
        if topic not in whole:
            whole[topic] = frozenset(each.id for each in members if each.only is None and topic in each.topics)
        found = whole[topic]
        if partition in picked:
            found |= picked[partition]
        if found:
            takers[partition] = found
    same = {found: found for found in takers.values()}
    return {partition: same[found] for partition, found in takers.items()}


# The strategy `range`


def _range(takers: AcceptingMembers, owners: Mapping[Partition, str]) -> dict[Partition, str]:
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


# The strategy `consistent_hash`


def _consistent_hash(takers: AcceptingMembers, owners: Mapping[Partition, str]) -> dict[Partition, str]:
    points = sorted(
        (_hash(f"{member}#{number}"), member)
        for member in {each for members in takers.values() for each in members}
        for number in range(POINTS_PER_MEMBER)
    )
    return {partition: _next_on_ring(points, partition, members) for partition, members in takers.items()}


def _next_on_ring(points: Sequence[tuple[int, str]], partition: Partition, members: Collection[str]) -> str:
    start = bisect(points, (_hash(f"{partition[0]}/{partition[1]}"), ""))
    for step in range(len(points)):
        member = points[(start + step) % len(points)][1]
        if member in members:
            return member
    raise ValueError("a partition that nobody takes has no place on the ring")


def _hash(text: str) -> int:
    """Return a hash that is the same in every process and release."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


# The strategy `sticky`


def _sticky(takers: AcceptingMembers, owners: Mapping[Partition, str]) -> dict[Partition, str]:
    """Let owners keep partitions up to an even share. Assign the other partitions to the members with the fewest."""
    kept = {partition: owners[partition] for partition, members in takers.items() if owners.get(partition) in members}
    kinds = set(takers.values())
    if len(kinds) == 1:
        return _assign_evenly(next(iter(kinds)), takers, kept)
    shares = _EvenAssignment(takers, kept)
    while shares.improve():
        pass
    return shares.assigned


def _assign_evenly(
    members: Collection[str], partitions: Collection[Partition], kept: Mapping[Partition, str]
) -> dict[Partition, str]:
    """Assign evenly; all members accept all partitions. The remainder goes to the members that keep the most."""
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


class _EvenAssignment:
    """Makes the numbers of partitions even, by chains of moves. Used if the members accept different partitions.

    In a chain, a partition of one member is moved to a second member, a partition of the second to a third, and so on.
    An assignment is optimal when no chain brings the numbers of partitions of two members closer together (optimal
    semi-matching). Chains that start at the member with the most partitions are tried first. If no chain starts at a
    member, it is not tried again: later moves cannot make a chain possible. The search ends after SEARCH_STEPS_MAX.
    """

    def __init__(self, takers: AcceptingMembers, kept: Mapping[Partition, str]) -> None:
        self.assigned: dict[Partition, str] = {}
        self._takers = takers
        self._partitions_of: dict[str, dict[Partition, None]] = {
            member: {} for members in takers.values() for member in members
        }
        self._optimal: set[str] = set()
        self._steps = SEARCH_STEPS_MAX
        for partition, member in kept.items():
            self._assign(partition, member)
        for partition, members in takers.items():
            if partition not in kept:
                self._assign(partition, min(members, key=self._size_and_name))

    def _size_and_name(self, member: str) -> tuple[int, str]:
        return len(self._partitions_of[member]), member

    def _assign(self, partition: Partition, member: str) -> None:
        before = self.assigned.get(partition)
        if before is not None:
            del self._partitions_of[before][partition]
        self.assigned[partition] = member
        self._partitions_of[member][partition] = None

    def improve(self) -> bool:
        """Apply a chain of moves, from a member with as many partitions as possible. Return False if there is none."""
        open_ones = self._partitions_of.keys() - self._optimal
        self._steps -= len(open_ones)
        for member in sorted(open_ones, key=self._size_and_name, reverse=True):
            chain = self._chain(member)
            if chain:
                for partition, to in chain:
                    self._assign(partition, to)
                return True
            self._optimal.add(member)
        return False

    def _chain(self, start: str) -> list[tuple[Partition, str]]:
        """Return the shortest chain of moves from `start` to a member with at least two partitions less; [] if none."""
        most = len(self._partitions_of[start]) - 2
        came: dict[str, tuple[Partition, str]] = {}
        waiting = deque([start])
        while waiting and self._steps > 0:
            member = waiting.popleft()
            for to, partition in self._neighbours(member):
                if to == start or to in came:
                    continue
                came[to] = (partition, member)
                if len(self._partitions_of[to]) <= most:
                    return _moves_to(came, to, start)
                waiting.append(to)
        return []

    def _neighbours(self, member: str) -> list[tuple[str, Partition]]:
        """Return (other, partition of `member` that the other accepts), members with the fewest partitions first."""
        last = {self._takers[partition]: partition for partition in self._partitions_of[member]}
        found = {to: partition for members, partition in last.items() for to in members}
        self._steps -= len(self._partitions_of[member]) + sum(map(len, last)) + len(found)
        return sorted(found.items(), key=lambda each: self._size_and_name(each[0]))


def _moves_to(came: Mapping[str, tuple[Partition, str]], end: str, start: str) -> list[tuple[Partition, str]]:
    moves = []
    while end != start:
        partition, member = came[end]
        moves.append((partition, end))
        end = member
    return moves


_STRATEGIES: Final[Mapping[str, Strategy]] = {STICKY: _sticky, RANGE: _range, CONSISTENT_HASH: _consistent_hash}
