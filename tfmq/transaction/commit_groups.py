"""State of commit groups.

In a commit group, one journal record commits many prepared transactions, its members, under a sequence (a number that
only increases). A run is one attempt at a sequence. After its abort a run is fenced: its requests are rejected.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from tfmq.errors import GroupFenced, GroupStale, NotAllowed
from tfmq.transaction.requests import CommitGroupMember

FENCES_PER_GROUP: Final = 1000
"""Maximum of aborted runs stored for one group. The oldest runs are removed first, because their tasks have ended."""

ABORTED_RETENTION_MS: Final = 86_400_000
"""How long a group without a commit is stored after its last abort: longer than any task of an aborted run takes."""

SEQUENCE_TOO_OLD = "The commit group {group} has committed sequence {last} already, and {sequence} is older."
OTHER_TOTAL = (
    "The commit group {group} has committed sequence {sequence} with {known} rows, and this is another total, {rows}:"
    " the writer's checkpoint was set back, or its query gives other rows each time."
)
TOO_MANY = (
    "The limit of {most} commit groups is reached, so {group} is not added. Forget groups whose writers no longer"
    " exist, or raise limits.commit_groups."
)

TOO_MANY_FENCES = (
    "The limit of {most} aborted runs is reached, so {run} of the commit group {group} is not aborted. Its members"
    " end when they expire. Forget groups whose writers no longer exist, or raise limits.commit_group_fences."
)


class LastCommit(NamedTuple):
    sequence: int
    rows: int
    run: str
    time_ms: int


@dataclass(slots=True, eq=False)
class CommitGroup:
    """State of one commit group.

    `fenced`: aborted run -> the sequence in the abort request. `members`: epoch -> membership, for each transaction
    of the group that is neither committed nor rolled back.
    """

    last_commit: LastCommit | None = None
    fenced: dict[str, int] = field(default_factory=dict)
    members: dict[int, CommitGroupMember] = field(default_factory=dict)

    @property
    def has_history(self) -> bool:
        """Whether the group has state besides its members: a commit or an aborted run."""
        return self.last_commit is not None or bool(self.fenced)


class CommitGroups:
    """All commit groups by name, rebuilt by replaying the journal.

    A group with a commit never expires, because a writer that returns with an old sequence after a year must still be
    rejected. Therefore the number of groups is limited, and an operator can remove a group with the forget command. A
    group without a commit expires ABORTED_RETENTION_MS after its last abort.
    """

    def __init__(self, *, groups_max: int, fences_max: int) -> None:
        self._groups_max, self._fences_max = groups_max, fences_max
        self.clear()

    def clear(self) -> None:
        self.by_name: dict[str, CommitGroup] = {}
        self._sorted_names: list[str] = []
        """Sorted names, so that the time for one page of the list does not depend on the number of groups."""
        self._fence_count = 0
        self._abort_times: dict[str, int] = {}
        """Name of each aborted group without a commit -> time of its last abort, oldest first."""

    # Checks of commands

    def may_join(self, member: CommitGroupMember) -> bool:
        """Return whether a transaction with this membership may begin or prepare; False if its sequence is committed.

        Raises GroupStale if a later sequence is committed, GroupFenced if the run was aborted, and NotAllowed if the
        group is new and the limit of groups is reached.
        """
        group = self._find_or_require_room(member.group)
        if group is None:
            return True
        if group.last_commit is not None and member.sequence <= group.last_commit.sequence:
            if member.sequence < group.last_commit.sequence:
                raise GroupStale(_too_old(member.group, group.last_commit, member.sequence))
            return False
        if member.run in group.fenced:
            raise GroupFenced()
        return True

    def find_commit(self, group: str, sequence: int, run: str, rows: int, *, other_total: bool) -> LastCommit | None:
        """Return the commit of this sequence; None if the sequence is new.

        Raises GroupStale if a later sequence is committed, or if this sequence is committed with another number of rows
        and `other_total` is false; GroupFenced if the run was aborted; NotAllowed if a new group is one too many.
        """
        known = self._find_or_require_room(group)
        if known is None:
            return None
        last = known.last_commit
        if last is not None and sequence < last.sequence:
            raise GroupStale(_too_old(group, last, sequence))
        if last is not None and sequence == last.sequence:
            if rows != last.rows and not other_total:
                raise GroupStale(OTHER_TOTAL.format(group=group, sequence=sequence, known=last.rows, rows=rows))
            return last
        if run in known.fenced:
            raise GroupFenced()
        return None

    def is_committed(self, group: str, sequence: int) -> bool:
        """Return whether `sequence` or a later one is committed. Raises NotAllowed if a new group is one too many."""
        known = self._find_or_require_room(group)
        return known is not None and known.last_commit is not None and sequence <= known.last_commit.sequence

    def require_fence_capacity(self, group: str, run: str) -> None:
        """Raise NotAllowed if `run` cannot be fenced (stored as aborted), because the limit of such runs is reached."""
        known = self.by_name.get(group)
        mine = known.fenced if known is not None else {}
        if self._fence_count >= self._fences_max and run not in mine and len(mine) < FENCES_PER_GROUP:
            raise NotAllowed(TOO_MANY_FENCES.format(most=self._fences_max, run=run, group=group))

    def page(self, after: str, limit: int) -> tuple[list[tuple[str, CommitGroup]], bool]:
        """Return up to `limit` groups with names above `after`, and whether there are more."""
        first = bisect_right(self._sorted_names, after)
        names = self._sorted_names[first : first + limit]
        return [(name, self.by_name[name]) for name in names], first + limit < len(self._sorted_names)

    def find_nonmembers(self, group: str, sequence: int, epochs: Iterable[int]) -> list[int]:
        members = self._members(group)
        return [epoch for epoch in epochs if epoch not in members or members[epoch].sequence != sequence]

    def find_leftovers(self, group: str, sequence: int, epochs: Iterable[int] = ()) -> list[int]:
        """Return the epochs of the group's members with a sequence up to `sequence`, except those in `epochs`."""
        kept = set(epochs)
        return [
            epoch for epoch, member in self._members(group).items() if member.sequence <= sequence and epoch not in kept
        ]

    def find_run_members(self, group: str, run: str) -> list[int]:
        return [epoch for epoch, member in self._members(group).items() if member.run == run]

    def _members(self, group: str) -> Mapping[int, CommitGroupMember]:
        known = self.by_name.get(group)
        return known.members if known is not None else {}

    def _find_or_require_room(self, name: str) -> CommitGroup | None:
        group = self.by_name.get(name)
        if group is None and len(self.by_name) >= self._groups_max:
            raise NotAllowed(TOO_MANY.format(most=self._groups_max, group=name))
        return group

    # Replay of journal entries

    def add_member(self, epoch: int, member: CommitGroupMember) -> None:
        self._get_or_add(member.group).members[epoch] = member

    def remove_member(self, epoch: int, member: CommitGroupMember) -> None:
        group = self.by_name.get(member.group)
        if group is not None:
            group.members.pop(epoch, None)
            self._remove_if_empty(member.group, group)

    def apply_commit(self, name: str, sequence: int, run: str, rows: int, time_ms: int) -> None:
        """Apply a commit record. A record whose sequence is not above the last committed one changes nothing."""
        group = self._get_or_add(name)
        self._abort_times.pop(name, None)
        if group.last_commit is None or sequence > group.last_commit.sequence:
            group.last_commit = LastCommit(sequence, rows, run, time_ms)
            self._fence_count -= len(group.fenced)
            group.fenced = {run: at for run, at in group.fenced.items() if at > sequence}
            self._fence_count += len(group.fenced)

    def apply_abort(self, name: str, sequence: int, run: str, time_ms: int) -> None:
        """Apply an abort record. A record whose sequence is not above the last committed one changes nothing."""
        group = self._get_or_add(name)
        if group.last_commit is None:
            self._abort_times.pop(name, None)
            self._abort_times[name] = time_ms
        if group.last_commit is None or sequence > group.last_commit.sequence:
            self._fence_count -= len(group.fenced)
            group.fenced.pop(run, None)
            group.fenced[run] = sequence
            if len(group.fenced) > FENCES_PER_GROUP:
                del group.fenced[next(iter(group.fenced))]
            self._fence_count += len(group.fenced)
        self._remove_if_empty(name, group)

    def expire(self, time_ms: int) -> None:
        """Remove groups without a commit whose last abort is older than ABORTED_RETENTION_MS."""
        while self._abort_times:
            name, aborted_ms = next(iter(self._abort_times.items()))
            if aborted_ms + ABORTED_RETENTION_MS > time_ms:
                return
            self.forget_group(name)

    def forget_group(self, name: str) -> None:
        """Remove the last commit and the aborted runs of a group; its members stay."""
        self._abort_times.pop(name, None)
        group = self.by_name.get(name)
        if group is not None:
            group.last_commit = None
            self._fence_count -= len(group.fenced)
            group.fenced.clear()
            self._remove_if_empty(name, group)

    def _get_or_add(self, name: str) -> CommitGroup:
        group = self.by_name.get(name)
        if group is None:
            group = self.by_name[name] = CommitGroup()
            insort(self._sorted_names, name)
        return group

    def _remove_if_empty(self, name: str, group: CommitGroup) -> None:
        if not group.members and not group.has_history:
            del self.by_name[name]
            del self._sorted_names[bisect_left(self._sorted_names, name)]

    # Snapshots

    def dump(self) -> tuple[Any, ...]:
        """Return all groups as plain values, by name. Members are left out: the rows of the transactions have them."""
        aborted_ms = {name: (time_ms,) for name, time_ms in self._abort_times.items()}
        return tuple(
            (name, group.last_commit, tuple(group.fenced.items()), *aborted_ms.get(name, ()))
            for name, group in sorted(self.by_name.items())
            if group.has_history
        )

    def load(self, rows: Sequence[Any]) -> None:
        """Restore the result of `dump`. Raises ValueError or TypeError for malformed fields."""
        self.clear()
        aborted: list[tuple[int, str]] = []
        for name, last, fenced, *more in rows:
            group = self._get_or_add(name)
            group.last_commit = LastCommit(*last[:4]) if last is not None else None
            group.fenced = dict(fenced)
            self._fence_count += len(group.fenced)
            if last is None:
                aborted.append((int(more[0]) if more else 0, name))
        self._abort_times.update((name, time_ms) for time_ms, name in sorted(aborted))


def _too_old(group: str, last: LastCommit, sequence: int) -> str:
    return SEQUENCE_TOO_OLD.format(group=group, last=last.sequence, sequence=sequence)
