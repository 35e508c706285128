"""What the soak compares: the messages that are stored, and what the clients' diaries say was acknowledged.

`receive` is called with each message once, in the order of its partition, while the soak runs; `learn` with each line
of a diary. Both may come in any order. A contradiction becomes a sentence in `faults` as soon as it is certain; what is
only missing so far is a fault when `check_complete` is called, at the end, when nothing is in progress any more.

Payloads are text, separated by "|":

    s|NAME|NUMBER|...           a numbered message; NAME counts from 0 in each partition
    t|NAME|NUMBER|INDEX|COUNT|  one of COUNT messages of transaction NUMBER
    d|NAME|NUMBER|              a delayed message

A diary line is a JSON array: [event, NAME, ...], see `Audit.learn`.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

SOURCE: Final = "source"
TARGET: Final = "target"
WORK: Final = "work"
TICKS: Final = "ticks"
BILLING: Final = "billing"
SHIPPING: Final = "shipping"
"""The groups that handle WORK."""
POISON_EVERY: Final = 200
POISON_FIRST: Final = 5
"""Of POISON_EVERY messages of WORK one always fails. The first one of each sender is this one."""
COMMITTED: Final = "committed"
ABSENT: Final = "absent"
UNKNOWN: Final = "unknown"
CANCELLED: Final = "cancelled"
EARLY_MS: Final = 5
"""Append times are by the wall clock, due times by broker time: the system may adjust the one meanwhile."""
FAULTS_MAX: Final = 100
EXAMPLES: Final = 5


def is_poison(number: int) -> bool:
    """Return whether the message of WORK with this number always fails."""
    return number % POISON_EVERY == POISON_FIRST


class Audit:
    """Counts and compares. Not thread-safe: one thread at a time calls it."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.fault_count = 0
        self.troubles: Counter[str] = Counter()
        """Errors that clients met, by code."""
        self.received = 0
        self._next: dict[tuple[str, str, int], int] = {}
        """By (topic, name, partition): the number that must be stored next."""
        self._stored: dict[tuple[str, str, int], int] = {}
        """Likewise: how many are acknowledged."""
        self._seen: dict[tuple[str, int], set[int]] = defaultdict(set)
        """By transaction: the indexes of its messages that were received."""
        self._whole: set[tuple[str, int]] = set()
        self._fates: dict[tuple[str, int], str] = {}
        self._timers: dict[tuple[str, int], int] = {}
        """When a delayed message was appended, ms since 1970."""
        self._due: dict[tuple[str, int], int] = {}
        """When an acknowledged one is due, ms since 1970."""
        self._cancelled: set[tuple[str, int]] = set()
        self._asked: set[tuple[str, int]] = set()
        """Those whose cancel or new time was requested and not answered."""
        self._ticks: dict[str, list[datetime]] = defaultdict(list)
        """By schedule: the times for which it has sent."""
        self._handled: dict[str, set[tuple[str, int, int]]] = {BILLING: set(), SHIPPING: set()}
        """By group: (name, partition, number) of what it has handled."""

    # What is stored

    def receive(self, topic: str, partition: int, text: str, appended_ms: int, properties: Any = None) -> None:
        """Count a stored message."""
        self.received += 1
        if topic == TICKS:
            self._receive_tick(properties or {})
            return
        kind, name, *fields = text.split("|")
        if kind == "s":
            self._receive_numbered(topic, name, partition, int(fields[0]))
        elif kind == "t":
            self._receive_part(name, int(fields[0]), int(fields[1]), int(fields[2]))
        elif kind == "d":
            key = (name, int(fields[0]))
            if key in self._timers:
                self._fault(f"the delayed message {name} {key[1]} is stored twice")
            self._timers[key] = appended_ms
        else:
            self._fault(f"nobody sent {text[:60]!r} to {topic}")

    def _receive_numbered(self, topic: str, name: str, partition: int, number: int) -> None:
        key = (topic, name, partition)
        expected = self._next.get(key, 0)
        if number < expected:
            self._fault(f"{topic} {partition}: {name} {number} is stored twice")
            return
        if number > expected:
            self._fault(f"{topic} {partition}: {name} {expected} to {number - 1} are missing before {number}")
        self._next[key] = number + 1

    def _receive_part(self, name: str, number: int, index: int, count: int) -> None:
        key = (name, number)
        seen = self._seen[key]
        if key in self._whole or index in seen:
            self._fault(f"message {index} of transaction {name} {number} is stored twice")
            return
        seen.add(index)
        if len(seen) == count:
            self._whole.add(key)
            del self._seen[key]
        if self._fates.get(key) == ABSENT:
            self._fault(f"transaction {name} {number} was rolled back, and its message {index} is stored")

    def _receive_tick(self, properties: Any) -> None:
        name, time = properties.get("schedule", ""), datetime.fromisoformat(properties["scheduled_for"])
        times = self._ticks[name]
        if times and time <= times[-1]:
            self._fault(f"the schedule {name} sent for {time} after {times[-1]}")
            return
        times.append(time)

    # What clients know

    def learn(self, line: list[Any], role: str = "") -> None:
        """Take over one line of a diary of a client with that role.

        ["stored", NAME, TOPIC, PARTITION, COUNT]: the first COUNT numbers are acknowledged.
        ["ended", NAME, NUMBER, FATE]: how transaction NUMBER ended: COMMITTED, ABSENT or UNKNOWN.
        ["delayed", NAME, NUMBER, DUE_MS]: acknowledged, also with a new time.
        ["ask", NAME, NUMBER]: a cancel or a new time is about to be requested.
        ["cancel", NAME, NUMBER, STATE]: the answer to a cancel, or to a new time that came too late.
        ["handled", NAME, PARTITION, NUMBER]: a message of WORK was handled by the group `role`.
        ["trouble", NAME, CODE]: an error that the client met.
        """
        event, name, *fields = line
        if event == "stored":
            topic, partition, count = fields
            self._stored[topic, name, partition] = count
        elif event == "ended":
            self._learn_fate((name, fields[0]), fields[1])
        elif event == "delayed":
            self._due[name, fields[0]] = fields[1]
            self._asked.discard((name, fields[0]))
        elif event == "ask":
            self._asked.add((name, fields[0]))
        elif event == "cancel":
            self._asked.discard((name, fields[0]))
            if fields[1] == CANCELLED:
                self._cancelled.add((name, fields[0]))
        elif event == "handled":
            self._handled[role].add((name, fields[0], fields[1]))
        elif event == "trouble":
            self.troubles[fields[0]] += 1

    def _learn_fate(self, key: tuple[str, int], fate: str) -> None:
        self._fates[key] = fate
        if fate == ABSENT and (key in self._whole or self._seen.get(key)):
            self._fault(f"transaction {key[0]} {key[1]} was rolled back, and messages of it are stored")

    # What must hold at the end

    def is_under_way(self) -> bool:
        """Return whether clients of all kinds have done something."""
        topics = {topic for topic, _, _ in self._next}
        return {SOURCE, TARGET, WORK} <= topics and bool(self._whole and self._timers) and all(self._handled.values())

    def missing(self) -> str:
        """Return a phrase that says what is acknowledged and not stored yet; "" if nothing is."""
        parts = {
            "messages": sum(1 for key, count in self._stored.items() if self._next.get(key, 0) < count),
            "copies": sum(1 for name, count in self._sources() if self._next.get((TARGET, *name), 0) < count),
            "transactions": sum(1 for key, fate in self._fates.items() if fate == COMMITTED and key not in self._whole),
            "parts of transactions": len(self._seen),
            "delayed messages": sum(1 for key in self._waiting() if key not in self._timers),
            "handled messages": sum(len(self._not_handled(group)) for group in self._handled),
        }
        return ", ".join(f"{what} {count}" for what, count in parts.items() if count)

    def check_times(self) -> None:
        """Compare append times with due times, and cancelled messages with stored ones."""
        for key in self._cancelled & self._timers.keys():
            self._fault(f"the delayed message {key[0]} {key[1]} is cancelled, and stored")
        self._cancelled -= self._timers.keys()
        for key, due in list(self._due.items()):
            appended = self._timers.get(key)
            if appended is not None and key not in self._asked and appended < due - EARLY_MS:
                self._fault(f"the delayed message {key[0]} {key[1]} came {due - appended} ms early")
                del self._due[key]

    def check_complete(self) -> None:
        """Check that nothing of what was acknowledged is missing."""
        self.check_times()
        for (topic, name, partition), count in self._stored.items():
            found = self._next.get((topic, name, partition), 0)
            if found < count:
                self._fault(f"{topic} {partition}: {name} {found} to {count - 1} are acknowledged, and not stored")
        for (name, partition), count in self._sources():
            found = self._next.get((TARGET, name, partition), 0)
            if found != count:
                self._fault(f"{TARGET} {partition} has {found} messages of {name}, {SOURCE} has {count}")
        for key, fate in self._fates.items():
            if fate == COMMITTED and key not in self._whole:
                seen = sorted(self._seen.get(key, ()))
                self._fault(f"transaction {key[0]} {key[1]} is committed, and only its messages {seen} are stored")
        for key, part in self._seen.items():
            if self._fates.get(key) != COMMITTED:
                self._fault(f"of transaction {key[0]} {key[1]} only the messages {sorted(part)} are stored")
        for key in self._waiting():
            if key not in self._timers:
                self._fault(f"the delayed message {key[0]} {key[1]} is acknowledged, and not stored")

    def _sources(self) -> Iterator[tuple[tuple[str, int], int]]:
        for (topic, name, partition), count in self._next.items():
            if topic == SOURCE:
                yield (name, partition), count

    def _waiting(self) -> Iterator[tuple[str, int]]:
        """Acknowledged delayed messages that must be stored at the end."""
        for key in self._due:
            if key not in self._cancelled and key not in self._asked:
                yield key

    def _work(self) -> Iterator[tuple[str, int, int]]:
        for (topic, name, partition), count in self._next.items():
            if topic == WORK:
                for number in range(count):
                    yield name, partition, number

    def poison(self) -> set[tuple[str, int, int]]:
        """Return (name, partition, number) of the stored messages of which each group has a dead letter at the end."""
        return {key for key in self._work() if is_poison(key[2])}

    def _not_handled(self, group: str) -> list[tuple[str, int, int]]:
        return [key for key in self._work() if not is_poison(key[2]) and key not in self._handled[group]]

    def check_handled(self, group: str, dead: list[tuple[str, int, int]]) -> None:
        """Check that a group has handled each message of WORK, or has it as a dead letter (`dead`), once."""
        lost = self._not_handled(group)
        if lost:
            self._fault(f"{len(lost)} messages of {WORK} were never handled by {group}: {lost[:EXAMPLES]}")
        twice = [key for key, count in Counter(dead).items() if count > 1]
        if twice:
            self._fault(f"{len(twice)} messages are two dead letters of {group}: {twice[:EXAMPLES]}")
        left, more = self.poison() - set(dead), set(dead) - self.poison()
        if left or more:
            examples = sorted(left | more)[:EXAMPLES]
            self._fault(f"{len(left)} dead letters of {group} are missing, {len(more)} are too many: {examples}")

    def check_ticks(self, ended_at: datetime) -> None:
        """Check that each schedule has sent for each minute from its first time up to `ended_at`."""
        for name, times in self._ticks.items():
            gaps = [a for a, b in pairwise(times) if b - a != timedelta(minutes=1)]
            if gaps:
                self._fault(f"the schedule {name} left out times after {gaps[:EXAMPLES]}")
            if times[-1] + timedelta(minutes=1) < ended_at:
                self._fault(f"the schedule {name} sent last for {times[-1]}")

    def counts(self) -> dict[str, int]:
        """Return what was counted, for the report."""
        fates = Counter(self._fates.values())
        return {
            "messages_received": self.received,
            "messages_acknowledged": sum(self._stored.values()),
            "copied_exactly_once": sum(count for (topic, _, _), count in self._next.items() if topic == TARGET),
            "transactions_committed": fates[COMMITTED],
            "transactions_rolled_back": fates[ABSENT],
            "transactions_without_an_answer": fates[UNKNOWN],
            "delayed_acknowledged": len(self._due),
            "delayed_delivered": len(self._timers),
            "delayed_cancelled": len(self._cancelled),
            "schedule_times": sum(map(len, self._ticks.values())),
            "work_handled": sum(map(len, self._handled.values())),
            "dead_letters": len(self._handled) * len(self.poison()),
        }

    def _fault(self, sentence: str) -> None:
        self.fault_count += 1
        if len(self.faults) < FAULTS_MAX:
            self.faults.append(sentence)


class Diary:
    """The lines that a client has written so far. A torn last line is read when its rest is there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0

    def read(self) -> Iterator[list[Any]]:
        """Iterate over the lines that were added since the last call."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._position += len(line)
                yield json.loads(line)
