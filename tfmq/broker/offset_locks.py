"""Offsets that a transaction has in doubt: until it has ended nobody reads, saves or resets them.

Whoever read the old place would begin there, and whoever saved another would be overwritten. One offset may be
locked by several transactions after a crash, when an earlier one, decided, is applied again.
"""

from collections.abc import Iterable, Sequence

from tfmq.apply_target import GroupPlaces
from tfmq.broker.register import Key
from tfmq.errors import Busy


class OffsetLocks:
    """Locks by group and partition; who holds one is known by its epoch."""

    def __init__(self) -> None:
        self._holders: dict[str, dict[Key, dict[int, str]]] = {}
        self._held: dict[int, list[tuple[str, Key]]] = {}

    def lock(self, epoch: int, xid: str, groups: Sequence[GroupPlaces]) -> None:
        """Adds to what the epoch holds."""
        held = self._held.setdefault(epoch, [])
        for each in groups:
            locked = self._holders.setdefault(each.group, {})
            for place in each.places:
                key = (place[0], place[1])
                locked.setdefault(key, {})[epoch] = xid
                held.append((each.group, key))

    def unlock(self, epoch: int) -> None:
        """Lets go of all that the epoch holds; harmless if that is nothing."""
        for group, key in self._held.pop(epoch, ()):
            locked = self._holders.get(group, {})
            holders = locked.get(key, {})
            holders.pop(epoch, None)
            if not holders:
                locked.pop(key, None)
            if not locked:
                self._holders.pop(group, None)

    def refusal(self, group: str, keys: Iterable[Key] | None) -> Busy | None:
        """Why these offsets of the group (None: all of them) cannot be touched now; None if they can."""
        locked = self._holders.get(group)
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
