"""Commit groups: many prepared transactions that one record commits, in sequences that never go back.

Per group: the last committed sequence with its rows and run, the runs that were aborted behind it, and the live
transactions that belong to it. A group that has committed is never forgotten by time, since a writer that comes back
after a year must still be told that its sequence is old; their number is limited, and an operator can forget one.
One that has committed nothing is, when nothing of its aborted runs can come any more.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from tfmq.errors import GroupFenced, GroupStale, NotAllowed
from tfmq.transaction.requests import Member

FENCED_MAX: Final = 1000
"""Aborted runs remembered of one group until a later commit. A run ends within hours of its abort, and a writer
that fails for ever must not grow without bound: the oldest go first. Those of other groups never do: all together
have a limit, at which an abort is refused."""

ABORTED_MS: Final = 86_400_000
"""So long behind its last abort a group is remembered that has committed nothing: what is left of an aborted run, a
task that nobody could stop, does not live for so long."""

LATER = "The commit group {group} has committed sequence {last} already, and {sequence} is older."
OTHER_TOTAL = (
    "The commit group {group} has committed sequence {sequence} with {known} rows, and this is another total, {rows}:"
    " the writer's checkpoint was set back, or its query gives other rows each time."
)
TOO_MANY = (
    "The broker remembers as many commit groups as it may ({most}), and {group} would be one more. Forget those"
    " whose writers are gone for good, or raise limits.commit_groups."
)

TOO_MANY_FENCES = (
    "The broker remembers as many aborted runs as it may ({most}), and {run} of the commit group {group} would be one"
    " more, so it is not aborted. Its members end by their time. Forget groups whose writers are gone for good, or"
    " raise limits.commit_group_fences."
)


class Committed(NamedTuple):
    """The last commit of a group."""

    sequence: int
    rows: int
    run: str
    time_ms: int


class CommitGroup:
    """`last`: None before the first commit. `fenced`: run -> sequence of its abort. `members`: epoch -> Member of
    live transactions that are not decided.
    """

    __slots__ = ("fenced", "last", "members")

    def __init__(self) -> None:
        self.last: Committed | None = None
        self.fenced: dict[str, int] = {}
        self.members: dict[int, Member] = {}

    @property
    def lasting(self) -> bool:
        """Whether there is something to remember besides its members."""
        return self.last is not None or bool(self.fenced)


class CommitGroups:
    """The groups by name, in `by_name`."""

    def __init__(self, *, groups_max: int, fences_max: int) -> None:
        self._groups_max, self._fences_max = groups_max, fences_max
        self.by_name: dict[str, CommitGroup] = {}
        self._names: list[str] = []
        """All of them in order, so that a page costs what lies in it."""
        self._fences = 0
        """Of all groups together."""
        self._aborted: dict[str, int] = {}
        """When the groups that have committed nothing were aborted last, the longest ago first."""

    def clear(self) -> None:
        """Nothing, as before the first entry."""
        self.by_name.clear()
        self._names.clear()
        self._aborted.clear()
        self._fences = 0

    # What may be done

    def begin(self, member: Member) -> bool:
        """Whether a transaction of that member may begin; False if its sequence is committed already ("done").

        Raises GroupStale (a later sequence is committed), GroupFenced (its run was aborted), NotAllowed (too many
        groups). Before a prepare the same is asked again.
        """
        group = self._known(member.group)
        if group is None:
            return True
        if group.last is not None and member.sequence <= group.last.sequence:
            if member.sequence < group.last.sequence:
                raise GroupStale(_later(member.group, group.last, member.sequence))
            return False
        if member.run in group.fenced:
            raise GroupFenced()
        return True

    def repeated(
        self, group: str, sequence: int, run: str, rows: int, *, other_total: bool
    ) -> Committed | None:
        """The first answer if that sequence is committed; None if it is the next.

        Raises GroupStale (later sequence, or other rows without `other_total`), GroupFenced, NotAllowed.
        """
        known = self._known(group)
        if known is None:
            return None
        last = known.last
        if last is not None and sequence < last.sequence:
            raise GroupStale(_later(group, last, sequence))
        if last is not None and sequence == last.sequence:
            if rows != last.rows and not other_total:
                raise GroupStale(
                    OTHER_TOTAL.format(group=group, sequence=sequence, known=last.rows, rows=rows)
                )
            return last
        if run in known.fenced:
            raise GroupFenced()
        return None

    def too_late(self, group: str, sequence: int) -> bool:
        """Whether an abort of that sequence changes nothing, because it is committed. Raises NotAllowed."""
        known = self._known(group)
        return known is not None and known.last is not None and sequence <= known.last.sequence

    def require_fence(self, group: str, run: str) -> None:
        """Whether one more run can be fenced: while its sequence is not committed, nothing else keeps it out.

        Raises NotAllowed (too many, of all groups).
        """
        known = self.by_name.get(group)
        mine = known.fenced if known is not None else {}
        if self._fences >= self._fences_max and run not in mine and len(mine) < FENCED_MAX:
            raise NotAllowed(TOO_MANY_FENCES.format(most=self._fences_max, run=run, group=group))

    def page(self, after: str, limit: int) -> tuple[list[tuple[str, CommitGroup]], bool]:
        """(up to `limit` groups by name from the one behind `after` on, whether there are more)."""
        first = bisect_right(self._names, after)
        names = self._names[first : first + limit]
        return [(name, self.by_name[name]) for name in names], first + limit < len(self._names)

    def missing(self, group: str, sequence: int, epochs: Iterable[int]) -> list[int]:
        """Those of `epochs` that are no members of exactly (group, sequence)."""
        known = self.by_name.get(group)
        members = known.members if known is not None else {}
        return [epoch for epoch in epochs if epoch not in members or members[epoch].sequence != sequence]

    def leftovers(self, group: str, sequence: int, epochs: Iterable[int] = ()) -> list[int]:
        """Epochs of the group's members, without `epochs`, with a sequence up to `sequence`: they end with its
        commit.
        """
        known = self.by_name.get(group)
        if known is None:
            return []
        kept = set(epochs)
        return [
            epoch
            for epoch, member in known.members.items()
            if member.sequence <= sequence and epoch not in kept
        ]

    def of_run(self, group: str, run: str) -> list[int]:
        """Epochs of members that an abort of `run` ends."""
        known = self.by_name.get(group)
        if known is None:
            return []
        return [epoch for epoch, member in known.members.items() if member.run == run]

    def _known(self, name: str) -> CommitGroup | None:
        group = self.by_name.get(name)
        if group is None and len(self.by_name) >= self._groups_max:
            raise NotAllowed(TOO_MANY.format(most=self._groups_max, group=name))
        return group

    # The fold

    def join(self, epoch: int, member: Member) -> None:
        """A transaction of the group is live."""
        self._group(member.group).members[epoch] = member

    def leave(self, epoch: int, member: Member) -> None:
        """It is decided, or gone; harmless if it was so before."""
        group = self.by_name.get(member.group)
        if group is not None:
            group.members.pop(epoch, None)
            self._tidy(member.group, group)

    def committed(self, name: str, sequence: int, run: str, rows: int, time_ms: int) -> None:
        """A commit is in the journal; a repeated one changes nothing."""
        group = self._group(name)
        self._aborted.pop(name, None)
        if group.last is None or sequence > group.last.sequence:
            group.last = Committed(sequence, rows, run, time_ms)
            self._fences -= len(group.fenced)
            group.fenced = {run: at for run, at in group.fenced.items() if at > sequence}
            self._fences += len(group.fenced)

    def aborted(self, name: str, sequence: int, run: str, time_ms: int) -> None:
        """An abort is in the journal; one behind the commit changes nothing."""
        group = self._group(name)
        if group.last is None:
            self._aborted.pop(name, None)
            self._aborted[name] = time_ms
        if group.last is None or sequence > group.last.sequence:
            self._fences -= len(group.fenced)
            group.fenced.pop(run, None)
            group.fenced[run] = sequence
            if len(group.fenced) > FENCED_MAX:
                del group.fenced[next(iter(group.fenced))]
            self._fences += len(group.fenced)
        self._tidy(name, group)

    def expire(self, time_ms: int) -> None:
        """It is that time: groups that have committed nothing, and were aborted long ago, are forgotten."""
        while self._aborted:
            name, aborted_ms = next(iter(self._aborted.items()))
            if aborted_ms + ABORTED_MS > time_ms:
                return
            self.forget(name)

    def forget(self, name: str) -> None:
        """Nothing is remembered of it but its live members."""
        self._aborted.pop(name, None)
        group = self.by_name.get(name)
        if group is not None:
            group.last = None
            self._fences -= len(group.fenced)
            group.fenced.clear()
            self._tidy(name, group)

    def _group(self, name: str) -> CommitGroup:
        group = self.by_name.get(name)
        if group is None:
            group = self.by_name[name] = CommitGroup()
            insort(self._names, name)
        return group

    def _tidy(self, name: str, group: CommitGroup) -> None:
        if not group.members and not group.lasting:
            del self.by_name[name]
            del self._names[bisect_left(self._names, name)]

    # Snapshots

    def dump(self) -> tuple[Any, ...]:
        """All but the members, which their transactions name; by name."""
        return tuple(
            (name, group.last, tuple(group.fenced.items()), *self._aborted_ms(name))
            for name, group in sorted(self.by_name.items())
            if group.lasting
        )

    def _aborted_ms(self, name: str) -> tuple[int, ...]:
        return (self._aborted[name],) if name in self._aborted else ()

    def load(self, rows: Sequence[Any]) -> None:
        """Starts from what `dump` gave. Raises ValueError or TypeError if it is none."""
        self.clear()
        aborted: list[tuple[int, str]] = []
        for name, last, fenced, *more in rows:
            group = self._group(name)
            group.last = Committed(*last[:4]) if last is not None else None
            group.fenced = dict(fenced)
            self._fences += len(group.fenced)
            if last is None:
                aborted.append((int(more[0]) if more else 0, name))
        self._aborted.update((name, time_ms) for time_ms, name in sorted(aborted))


def _later(group: str, last: Committed, sequence: int) -> str:
    return LATER.format(group=group, last=last.sequence, sequence=sequence)
