"""Plain, delayed and transactional sends of one producer, mixed, whatever breaks: client, wire, broker and disk are the
real ones, in memory (see `tfmq.testing`).

- No send is ever refused for its sequence.
- What was acknowledged is there, once; what was called "not done" is not; nothing is there twice.
- A delayed message is not there before its time, however often that was changed. One that was cancelled never is; one
  that was delivered is there.
- Plain messages of one partition are in the order in which they were sent.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.scale import scaled
from tfmq.client.send.batch import Delivery
from tfmq.errors import (
    Busy,
    ConnectionFailed,
    DeliveryFailed,
    DiskFull,
    SequenceGap,
    StaleProducer,
    StorageStopped,
    TfmqError,
    TimedOut,
)
from tfmq.message import Message
from tfmq.testing.broker import SimulatedBroker

TOPICS = ("orders", "bills")
PARTITIONS = 2
DELAYS = (0, 0.001, 0.01, 0.5, 3.0, 70.0)
LONGER_THAN_ANY = 100.0

places = st.tuples(st.sampled_from(TOPICS), st.integers(0, PARTITIONS - 1), st.none() | st.sampled_from(DELAYS))
Place = tuple[str, int, float | None]
STEPS = st.one_of(
    st.tuples(st.just("send"), places),
    st.tuples(st.just("send"), places),
    st.tuples(st.just("many"), st.lists(places, min_size=1, max_size=4)),
    st.tuples(st.just("transaction"), st.lists(places, max_size=4), st.sampled_from(["local", "named"]), st.booleans()),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("reschedule"), st.integers(0, 20), st.sampled_from(DELAYS)),
    st.tuples(st.just("advance"), st.sampled_from([0.0, 0.001, 0.02, 1.0, 5.0])),
    st.tuples(st.just("crash"), st.sampled_from(["nothing", "some", "everything"])),
    st.tuples(st.just("restart")),
    st.tuples(st.just("disconnect")),
    st.tuples(st.just("fail"), st.sampled_from(["busy", "full", "done, and nobody knows"])),
)


FAULTS: dict[str, tuple[TfmqError, bool]] = {
    "busy": (Busy(), False),
    "full": (DiskFull(), False),
    "done, and nobody knows": (StorageStopped("Nobody knows.", outcome="unknown"), True),
}


class Story:
    """One producer, and what was reported of each of its messages."""

    def __init__(self, broker: SimulatedBroker) -> None:
        self.broker = broker
        self.producer = broker.producer(timeout=20.0)
        self.places: dict[bytes, Place] = {}
        self.called_at: dict[bytes, float] = {}
        self.deliveries: dict[bytes, Delivery] = {}
        self.ended: dict[bytes, str] = {}
        """What became of messages of transactions: "there", "not there" or "unknown"."""
        self.cancelled: dict[bytes, str] = {}
        self.handles: dict[bytes, list[str]] = {}
        """All that lead to a message that was rescheduled."""
        self.moved: dict[bytes, float] = {}
        """Not to come before this time; of two where it is unknown, the earlier."""

    def message(self, place: Place) -> tuple[str, Message]:
        topic, partition, delay = place
        payload = b"%06d" % len(self.places)
        self.places[payload] = place
        self.called_at[payload] = self.broker.clock.time()
        return topic, Message(payload, partition=partition, delay=delay)

    def send(self, place: Place) -> None:
        topic, message = self.message(place)
        try:
            self.deliveries[message.payload] = self.producer.send(topic, message)
        except TfmqError as error:
            self.ended[message.payload] = reported(error)

    def many(self, several: list[Place]) -> None:
        topic = several[0][0]
        messages = [self.message((topic, *place[1:]))[1] for place in several]
        try:
            runs = self.producer.send_many(topic, messages).runs
        except TfmqError:
            self.ended.update(dict.fromkeys((each.payload for each in messages), "unknown"))
            return
        found = [Delivery((batch, first + n)) for batch, first, count in runs for n in range(count)]
        self.deliveries.update(zip((each.payload for each in messages), found, strict=True))

    def transaction(self, several: list[Place], kind: str, commit: bool) -> None:
        begun = []
        became = "unknown"
        try:
            if kind == "named":
                transaction = self.producer.begin(f"x-{len(self.places)}-{self.broker.clock.time()}")
            else:
                transaction = self.producer.transaction()
            for place in several:
                topic, message = self.message(place)
                begun.append(message.payload)
                transaction.send(topic, message)
            if commit:
                self.called_at.update(dict.fromkeys(begun, self.broker.clock.time()))
                transaction.commit()
                became = "there"
            else:
                transaction.rollback()
                became = "not there"
        except TfmqError as error:
            refuse_sequences(error)
            became = "unknown"
        self.ended.update(dict.fromkeys(begun, became))

    def delayed(self, number: int) -> tuple[bytes, list[str]] | None:
        """One of the delayed messages that have handles."""
        for payload, delivery in self.deliveries.items():
            if delivery.done() and delivery.peek() is None and delivery.result().delayed:
                self.handles.setdefault(payload, [delivery.result().delayed])
        found = list(self.handles.items())
        return found[number % len(found)] if found else None

    def cancel(self, number: int) -> None:
        if (chosen := self.delayed(number)) is None:
            return
        payload, handles = chosen
        try:
            state = self.producer.cancel(handles[number % len(handles)])
        except TfmqError as error:
            assert isinstance(error, ConnectionFailed | Busy | DiskFull | TimedOut), error
            state = "unknown"
        assert self.cancelled.get(payload, state) in (state, "unknown"), "the first answer stays"
        self.cancelled[payload] = state

    def reschedule(self, number: int, delay: float) -> None:
        if (chosen := self.delayed(number)) is None:
            return
        payload, handles = chosen
        before = self.moved.get(payload, self.called_at[payload] + (self.places[payload][2] or 0.0))
        later = self.broker.clock.time() + delay
        try:
            moved = self.producer.reschedule(handles[number % len(handles)], delay)
        except TfmqError as error:
            assert isinstance(error, ConnectionFailed | Busy | DiskFull | TimedOut), error
            self.moved[payload] = min(before, later)
            return
        if moved.handle is None:
            known = self.cancelled.get(payload, "unknown")
            assert known in (moved.state, "unknown"), "it says what a cancel was told"
        else:
            assert self.cancelled.get(payload, "unknown") == "unknown"
            self.moved[payload] = later
            handles.append(moved.handle)

    def play(self, step: tuple[Any, ...]) -> None:
        what, *arguments = step
        if what in ("send", "many", "transaction", "cancel", "reschedule"):
            getattr(self, what)(*arguments)
        elif what == "advance":
            self.broker.clock.advance(arguments[0])
        elif what == "fail":
            error, done = FAULTS[arguments[0]]
            self.broker.fail_next("send", error, done=done)
        else:
            getattr(self.broker, what)(*arguments)

    # The end

    def finish(self) -> None:
        with suppress(DeliveryFailed, TimedOut):  # whose, and why, is looked at below
            self.producer.flush(60.0)
        self.broker.clock.advance(LONGER_THAN_ANY)
        self.broker.settle()

    def check(self) -> None:
        there: Counter[bytes] = Counter()
        appended: dict[bytes, float] = {}
        for topic in TOPICS:
            for partition in range(PARTITIONS):
                found = self.broker.sent(topic, partition)
                payloads = [message.payload for message in found]
                there.update(payloads)
                appended |= {each.payload: each.appended_at.timestamp() for each in found}
                plain = [each for each in payloads if each in self.deliveries and self.places[each][2] is None]
                assert plain == sorted(plain), "plain ones in order"
                assert all(self.places[each][:2] == (topic, partition) for each in payloads)
        assert max(there.values(), default=1) == 1, "nothing twice"
        for payload, delivery in self.deliveries.items():
            error = delivery.peek()
            if error is None:
                cancelled = self.cancelled.get(payload)
                if cancelled in (None, "delivered"):
                    assert there[payload], "acknowledged, and not there"
                elif cancelled == "cancelled":
                    assert not there[payload], "cancelled, and there"
            else:
                refuse_sequences(error)
                if error.outcome == "not done":
                    assert not there[payload], "not done, and there"
        for payload, became in self.ended.items():
            if became != "unknown":
                assert there[payload] == (became == "there")
        for payload, at in appended.items():
            due = self.moved.get(payload, self.called_at[payload] + (self.places[payload][2] or 0.0))
            assert at >= due - 0.001, "early"


def reported(error: TfmqError) -> str:
    refuse_sequences(error)
    return "not there" if error.outcome == "not done" else "unknown"


def refuse_sequences(error: TfmqError) -> None:
    assert not isinstance(error, SequenceGap | StaleProducer), error


@pytest.mark.long
@settings(max_examples=scaled(2000), deadline=None)
@given(steps=st.lists(STEPS, min_size=1, max_size=30))
def test_plain_delayed_and_transactional_sends_of_one_producer_never_trip_the_sequence_rule(
    steps: list[tuple[Any, ...]],
) -> None:
    with SimulatedBroker({"topics.partitions": PARTITIONS}) as broker:
        story = Story(broker)
        for step in steps:
            event(step[0])
            story.play(step)
        story.finish()
        story.check()
