"""Verbs for tests of schedules: a broker whose clock begins at a moment that is named."""

from datetime import UTC, datetime
from typing import Any, NamedTuple

from journal.record.format import FLAG_TOMBSTONE, records_of, split_body
from journal.testing import SimulatedClock, SimulatedDisk
from tests.broker.helpers import Answer, Broker
from tfmq.message import decode_attribute, encode_attribute
from tfmq.protocol import commands


def ms(text: str) -> int:
    """An ISO time (UTC where it names no zone) in ms since 1970."""
    moment = datetime.fromisoformat(text)
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


class Sent(NamedTuple):
    """A message that a schedule sent."""

    id: int
    payload: bytes | None
    key: bytes | str | None
    tag: str | None
    properties: dict[str, str]
    born_ms: int | None

    @property
    def at(self) -> str:
        return self.properties["scheduled_for"]


class Scheduling(Broker):
    """A broker with a topic `orders`, at a moment."""

    def __init__(
        self,
        disk: SimulatedDisk | None = None,
        clock: SimulatedClock | None = None,
        *,
        at: str = "2026-11-23T08:00:30",
        **values: Any,
    ) -> None:
        super().__init__(disk, clock or SimulatedClock(wall_ms=ms(at)), **values)

    @classmethod
    def with_topic(cls, partitions: int = 1, **values: Any) -> "Scheduling":
        broker = cls(**values)
        broker.create(partitions=partitions)
        return broker

    def restart(self, **values: Any) -> "Scheduling":
        self.stop()
        return Scheduling(self.disk, self.clock, queued=self.queued, **{**self.values, **values})

    def crashed(self, disk: SimulatedDisk) -> "Scheduling":
        return Scheduling(disk, self.clock, queued=self.queued, **self.values)

    def wall(self) -> str:
        return datetime.fromtimestamp(self.clock.wall_ms() / 1000, UTC).isoformat()

    def advance(self, seconds: float) -> None:
        """Time goes on, in steps to whatever is due and cannot wait for something else."""
        end = self.clock.monotonic() + seconds
        while (due := self.engine.broker.timers.next_not_deferrable()) is not None and due <= end:
            self.tick_at(due)
        self.tick_at(end)

    def tick_at(self, moment: float) -> None:
        self.clock.advance(max(0.0, moment - self.clock.monotonic()))
        self.engine.broker.timers.tick(self.clock.monotonic())
        self.engine.broker.end_turn()

    def until(self, text: str) -> None:
        """Time goes on, in steps to whatever is due, until the wall clock shows that."""
        self.advance((ms(text) - self.clock.wall_ms()) / 1000)
        self.work()

    def down_until(self, text: str, **values: Any) -> "Scheduling":
        """Stopped now, started at that time, given a moment to look at the clock."""
        self.stop()
        self.clock.advance((ms(text) - self.clock.wall_ms()) / 1000)
        again = Scheduling(self.disk, self.clock, queued=self.queued, **{**self.values, **values})
        again.look()
        return again

    def look(self) -> None:
        """What is due now happens, as at the end of a poll."""
        self.advance(0.02)
        self.work()

    def add(
        self,
        cron: str = "0 9 * * *",
        name: str = "daily",
        *,
        topic: str = "orders",
        payload: bytes | None = b"go",
        timezone: str = "UTC",
        partition: int | None = None,
        misfire: str = "one",
        key: bytes | str | None = None,
        tag: str | None = None,
        properties: dict[str, str] | None = None,
    ) -> Answer:
        attribute = encode_attribute(None, key, tag, properties)
        request = commands.AddSchedule(name, cron, timezone, topic, partition, misfire, attribute, payload is None)
        answer = self.ask(request, payload or b"")
        self.work()
        return answer

    def schedule(self, name: str = "daily") -> dict[str, Any]:
        """As lists show it."""
        found = self.whole(name)
        del found["payload"], found["attribute"]
        return found

    def whole(self, name: str) -> dict[str, Any]:
        """With what it sends."""
        (found,) = self.ask(commands.ListSchedules(name)).schedules
        return dict(found)

    def names(self) -> list[str]:
        return [each["name"] for each in self.ask(commands.ListSchedules()).schedules]

    def pause(self, name: str = "daily") -> Answer:
        answer = self.ask(commands.PauseSchedule(name))
        self.work()
        return answer

    def resume(self, name: str = "daily") -> Answer:
        answer = self.ask(commands.ResumeSchedule(name))
        self.work()
        return answer

    def remove(self, name: str = "daily", id: int = 0) -> Answer:
        answer = self.ask(commands.RemoveSchedule(name, id))
        self.work()
        return answer

    def sent(self, topic: str = "orders", partition: int = 0) -> list[Sent]:
        """Every message of the partition, also those that are only written."""
        log = self.log(topic, partition)
        found, offset = [], log.first_offset
        while offset < log.end_offset:
            chunk = log.read(offset, 1 << 20, upto="written")
            for record in records_of(bytes(chunk.data)):
                body = memoryview(chunk.data)[record.position + 20 : record.position + record.size]
                if record.flag & 0x40:
                    continue
                attribute, payload = split_body(body, record.flag)
                known = decode_attribute(bytes(attribute or b"\x80"))
                found.append(
                    Sent(
                        record.id,
                        None if record.flag & FLAG_TOMBSTONE else bytes(payload),
                        known.key,
                        known.tag,
                        dict(known.properties),
                        known.born_ms,
                    )
                )
            if chunk.next == offset:
                break  # it is stopped, and what is after its forced mark may not be there
            offset = chunk.next
        return found

    def times(self, topic: str = "orders", partition: int = 0) -> list[str]:
        """For which times messages were sent, in their order."""
        return [each.at for each in self.sent(topic, partition)]
