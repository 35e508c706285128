"""Commit groups: many prepared transactions that one record commits, in sequences that never go back.

Per group: the last committed sequence with its rows and run, the runs that were aborted behind it, and who belongs
to it. A group is never forgotten by time, since a writer that comes back after a year must still be told that its
sequence is old; their number is limited, and an operator can forget one.
"""

from collections.abc import Iterable
from typing import NamedTuple

from tfmq.transaction.requests import Member


class Committed(NamedTuple):
    """The last commit of a group."""

    sequence: int
    rows: int
    run: str
    time_ms: int


class CommitGroup:
    """`last`: None before the first commit. `fenced`: run -> sequence of its abort. `members`: epoch -> Member of live
    transactions.
    """

    __slots__ = ("fenced", "last", "members")

    def __init__(self) -> None:
        self.last: Committed | None = None
        self.fenced: dict[str, int] = {}
        self.members: dict[int, Member] = {}


class CommitGroups:
    """The groups by name, in `by_name`, sorted by nothing."""

    def __init__(self, *, groups_max: int) -> None:
        self.by_name: dict[str, CommitGroup] = {}

    def begin(self, member: Member) -> bool:
        """Whether a transaction of that member may begin; False if its sequence is committed already ("done").

        Raises GroupStale (a later sequence is committed), GroupFenced (its run was aborted), NotAllowed (too many
        groups). Before a prepare the same is asked again.
        """
        return True

    def repeated(
        self, group: str, sequence: int, run: str, rows: int, *, other_total: bool
    ) -> Committed | None:
        """The first answer if that sequence is committed; None if it is the next.

        Raises GroupStale (later sequence, or other rows without `other_total`), GroupFenced, NotAllowed.
        """
        ...

    def missing(self, group: str, sequence: int, epochs: Iterable[int]) -> list[int]:
        """Those of `epochs` that are no members of exactly (group, sequence)."""
        return []

    def leftovers(self, group: str, sequence: int, epochs: Iterable[int] = ()) -> list[int]:
        """Epochs of the group's other members with a sequence up to `sequence`: they end with its commit."""
        return []

    def of_run(self, group: str, sequence: int, run: str) -> list[int]:
        """Epochs of members that an abort of `run` ends."""
        return []
