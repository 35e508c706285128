"""The letters that a topic's events add up to. Pure; what is in memory for each letter is small: no body, no traceback,
and where its events stand, so that the rest is read again when somebody looks at it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tfmq.client.received import ReceivedMessage
from tfmq.dead_letters.course import after
from tfmq.dead_letters.letter import RETRYING, WAITING, Letter
from tfmq.dead_letters.selection import Page, Selection
from tfmq.dead_letters.topic_events import event_of


class Fold:
    """`letters` by id. Every event is taken once, in the order of the log."""

    def __init__(self) -> None:
        self.letters: dict[str, Letter] = {}
        self.places: dict[str, list[int]] = {}
        """The offsets of a letter's events, those that did nothing left out."""
        self._coming: dict[str, Letter] = {}

    def take(self, message: ReceivedMessage[Any]) -> Letter | None:
        """The letter behind the event of `message`; None where it did nothing."""
        found = event_of(message)
        if found is None:
            return None
        id, event = found
        letter = after(self.letters.get(id), event)
        if letter is None:
            return None
        self.letters[id] = slim(letter)
        self.places.setdefault(id, []).append(message.offset)
        if letter.state in (WAITING, RETRYING):
            self._coming[id] = self.letters[id]
        else:
            self._coming.pop(id, None)
        return letter

    def forget(self, before: int) -> None:
        """What the topic does not have any more: the letters of which nothing stands from `before` on."""
        for id in [id for id, places in self.places.items() if places[-1] < before]:
            del self.letters[id], self.places[id]
            self._coming.pop(id, None)

    def due(self, group: str, now_ms: int, broker: str = "") -> str | None:
        """The id of the one of `broker` that should have been handled longest ago."""
        found = [(time, id) for time, id in self._times(group, broker) if time <= now_ms]
        return min(found)[1] if found else None

    def next_due_ms(self, group: str, broker: str = "") -> int | None:
        """When the next one of `broker` is due."""
        return min((time for time, _ in self._times(group, broker)), default=None)

    def waiting_for_others(self, group: str, broker: str, behind: Page, count: int) -> list[Letter]:
        """At most `count` letters of the group that wait and are of other brokers, as `find`."""
        waiting = [each for each in self._coming.values() if each.group == group]
        others = [each for each in waiting if each.broker not in ("", broker)]
        others = [each for each in others if (each.kept_ms, each.id) > behind]
        return sorted(others, key=lambda each: (each.kept_ms, each.id))[:count]

    def find(self, selection: Selection, behind: Page, count: int) -> list[Letter]:
        """At most `count`, in the order in which they were first kept."""
        meant = [each for each in self.letters.values() if selection.holds(each)]
        meant = [each for each in meant if (each.kept_ms, each.id) > behind]
        return sorted(meant, key=lambda each: (each.kept_ms, each.id))[:count]

    def _times(self, group: str, broker: str) -> list[tuple[int, str]]:
        """One that names no broker is of the broker that has this topic."""
        return [
            (each.next_ms if each.state == WAITING else each.lease_ms, each.id)
            for each in self._coming.values()
            if each.group == group and each.broker in ("", broker)
        ]


def slim(letter: Letter) -> Letter:
    """What is kept in memory."""
    failures = tuple(each._replace(traceback="") for each in letter.failures)
    return replace(letter, body=None, failures=failures)
