"""What the fake broker does with delayed messages: one log of arrivals, its stream rule, turns and outcomes, for real.

Messages wait in `waiting` until the test says `fire(now_ms)`; then they are in `logs`. `broker_ms` is the broker's
time when it takes something: a test moves it, or gives a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from journal.record.batch import verify_batch
from journal.record.format import records_of
from tfmq.errors import BadRequest, SequenceGap, StaleProducer, UnknownProducer
from tfmq.protocol import commands
from tfmq.protocol.commands import DUE_MAX, DUE_RELATIVE
from tfmq.protocol.delayed_handle import Handle, decode_due_times, format_handle, parse_handle

STORE_ID = 0xF00D
NOW_MS = 1_795_262_400_000


class Waiting(NamedTuple):
    """One message that waits."""

    due: int
    number: int
    topic: str
    partition: int
    record: bytes

    @property
    def handle(self) -> str:
        return format_handle(Handle(STORE_ID, 9, self.due, self.number))

    @property
    def payload(self) -> bytes:
        return payloads_of(self.record)[0]


def payloads_of(body: bytes) -> list[bytes]:
    """The payloads of records whose attribute, where they have one, is not looked at."""
    found = []
    for record in records_of(body):
        data = body[record.position + 20 : record.position + record.size]
        found.append(data[4 + int.from_bytes(data[:4], "big") :] if record.flag & 1 else data)
    return found


class FakeDelays:
    """A part of the fake broker: `_check_topic`, `closed_ids` and `_append` are its."""

    closed_ids: dict[int, int]

    def __init__(self) -> None:
        self.broker_ms: Callable[[], int] = lambda: NOW_MS
        self.delayed_streams: dict[int, int] = {}
        self.arrived: list[tuple[commands.Produce, commands.DelayedBatch]] = []
        self.waiting: list[Waiting] = []
        self.outcomes: dict[int, str] = {}
        self.moved: dict[int, str] = {}
        self.numbers = 0
        self.remembers_answers = True

    # Helpers for tests

    def delayed_payloads(self, topic: str = "orders", partition: int | None = None) -> list[bytes]:
        """What waits, in the order in which it came."""
        return [
            each.payload
            for each in sorted(self.waiting, key=lambda each: each.number)
            if each.topic == topic and partition in (None, each.partition)
        ]

    def fire(self, number: int) -> None:
        """That message is delivered."""
        self.waiting = [each for each in self.waiting if each.number != number]
        self.outcomes[number] = "delivered"

    # Sends

    def produce_delayed(self, request: commands.Produce, body: bytes) -> Any:
        self._check_topic(request.topic, request.incarnation)  # type: ignore[attr-defined]
        verify_batch(body, request.blocks, request.producer_id, request.sequence, request.count, verify="records")
        if request.due is None or len(request.due) != 8 * request.count:
            raise BadRequest("due")
        if request.producer_id in self.closed_ids:
            raise StaleProducer(successor=self.closed_ids[request.producer_id])
        for first, reported in self.arrived:
            if (first.producer_id, first.sequence) == (request.producer_id, request.sequence):
                assert (first.count, first.blocks, first.topic) == (request.count, request.blocks, request.topic)
                return self._answer(request, reported if self.remembers_answers else None, True)
        expected = self.delayed_streams.get(request.producer_id, 0)
        if request.sequence != expected:
            raise (SequenceGap() if request.producer_id in self.delayed_streams or expected == 0 else UnknownProducer())
        self.delayed_streams[request.producer_id] = request.sequence + request.count
        reported = self.arrive(request, body)
        self.arrived.append((request, reported))
        return self._answer(request, reported, False)

    def arrive(self, request: commands.Produce, body: bytes) -> commands.DelayedBatch:
        """Records begin to wait; what the reply says of them."""
        first, now = self.numbers, self.broker_ms()
        dues = [effective(due, now) for due in decode_due_times(request.due or b"")]
        records = [body[each.position : each.position + each.size] for each in records_of(body)]
        assert len(dues) == len(records)
        for due, record in zip(dues, records, strict=True):
            self.waiting.append(Waiting(due, self.numbers, request.topic, request.partition, record))
            self.numbers += 1
        return commands.DelayedBatch(STORE_ID, 9, first, b"".join(due.to_bytes(8, "big") for due in dues))

    def _answer(self, request: commands.Produce, reported: commands.DelayedBatch | None, repeated: bool) -> Any:
        return commands.ProduceReply([], max(1, request.acks), repeated, 1, -1, reported)

    # What waits

    def _state(self, text: str) -> tuple[str, Waiting | None]:
        handle = parse_handle(text)
        found = [each for each in self.waiting if (each.due, each.number) == (handle.due, handle.number)]
        if handle.store_id != STORE_ID:
            return "unknown", None
        return ("pending", found[0]) if found else (self.outcomes.get(handle.number, "unknown"), None)

    def cancel_delayed(self, request: commands.CancelDelayed) -> Any:
        state, found = self._state(request.handle)
        if found is not None:
            self.waiting.remove(found)
            state = self.outcomes[found.number] = "cancelled"
        return commands.StateReply(state)

    def reschedule_delayed(self, request: commands.RescheduleDelayed) -> Any:
        state, found = self._state(request.handle)
        number = parse_handle(request.handle).number
        if number in self.moved:
            return commands.RescheduleDelayedReply("rescheduled", self.moved[number])
        if found is None:
            return commands.RescheduleDelayedReply(state, "")
        self.waiting.remove(found)
        self.outcomes[found.number] = "cancelled"
        moved = found._replace(due=effective(request.due, self.broker_ms()), number=self.numbers)
        self.numbers += 1
        self.waiting.append(moved)
        self.moved[number] = moved.handle
        return commands.RescheduleDelayedReply("rescheduled", moved.handle)

    def describe_delayed(self, request: commands.DescribeDelayed) -> Any:
        state, found = self._state(request.handle)
        row = {"state": state} if found is None else self._delayed_row(found)
        return commands.DescriptionReply(row)

    def list_delayed(self, request: commands.ListDelayed) -> Any:
        after = parse_handle(request.after)[2:] if request.after else (-1, -1)
        found = sorted(
            each
            for each in self.waiting
            if request.topic in ("", each.topic)
            and request.partition in (None, each.partition)
            and request.first_due <= each.due < request.end_due
            and (each.due, each.number) > after
        )
        page = found[: min(2, request.limit)]
        more = len(found) > len(page)
        return commands.ListDelayedReply(
            [self._delayed_row(each) for each in page], more, page[-1].handle if more else ""
        )

    def delayed_histogram(self, request: commands.DelayedHistogram) -> Any:
        dues = [each.due for each in self.waiting if request.topic in ("", each.topic)]
        counts = [
            sum(low <= due < high for due in dues) for low, high in zip(request.edges, request.edges[1:], strict=False)
        ]
        return commands.DelayedHistogramReply(counts, len(dues))

    def _delayed_row(self, each: Waiting) -> dict[str, Any]:
        return {
            "handle": each.handle, "state": "pending", "due_ms": each.due, "topic": each.topic,
            "partition": each.partition, "key": None, "size": len(each.record), "born_ms": 5, "number": each.number,
        }  # fmt: skip


def effective(due: int, now_ms: int) -> int:
    """When a message is delivered that is taken at `now_ms`."""
    wanted = now_ms + due - DUE_RELATIVE if due >= DUE_RELATIVE else due
    return min(DUE_MAX, max(now_ms + 1, wanted))
