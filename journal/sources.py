"""How far each source has come in a log: the highest place that was appended, and the one that is on the disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TypeAlias

Key: TypeAlias = tuple[int, int]
"""(kind, id) of a source."""
Place: TypeAlias = tuple[int, int]
"""(high, low)."""


class Sources:
    """See the module. It begins with what is on the disk. Whoever calls it sees to it that one thread does at a time;
    `applied` may be read by any."""

    def __init__(self, sure: Mapping[Key, Place] | None = None) -> None:
        self.applied: dict[Key, Place] = dict(sure or {})
        self._sure: dict[Key, Place] = dict(self.applied)
        self._unsure: deque[tuple[int, Key, Place]] = deque()
        """Of appends that end at these offsets."""

    def note(self, key: Key, place: Place, end: int, forced: int) -> None:
        """An append that ends at `end` has that place; the log is forced up to `forced`."""
        self.applied[key] = max(place, self.applied.get(key, place))
        self._unsure.append((end, key, place))
        self._settle(forced)

    def sure(self, key: Key, forced: int) -> Place | None:
        """The highest place of a source before the offset `forced`, which never goes back; None if there is none."""
        self._settle(forced)
        return self._sure.get(key)

    def _settle(self, forced: int) -> None:
        unsure = self._unsure
        while unsure and unsure[0][0] <= forced:
            _, key, place = unsure.popleft()
            self._sure[key] = max(place, self._sure.get(key, place))
