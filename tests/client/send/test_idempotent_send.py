"""Sending under a place that was written down before: once, however often, over lost answers, crashes and years."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.dead_letters.helpers import Process
from tests.scale import scaled, seeded
from tfmq.client.send.idempotent_send import (
    ProducerPartition,
    RecordContent,
    close_producer,
    fetch_messages,
    find_records,
    lease_producer_id,
    locate_log_end,
    send_idempotent,
)
from tfmq.errors import (
    BadRequest,
    ConnectionFailed,
    OffsetOutOfRange,
    SequenceGap,
    StaleProducer,
    TimedOut,
    UnknownProducer,
    UnknownTopic,
)
from tfmq.message import decode_attribute, encode_attribute
from tfmq.protocol.commands import BY_EARLIEST, BY_LATEST
from tfmq.testing.broker import SimulatedBroker


@pytest.fixture
def broker() -> Iterator[SimulatedBroker]:
    with SimulatedBroker() as made:
        made.admin().create_topic("orders")
        yield made


class Sender:
    """One process that has a place."""

    def __init__(self, broker: SimulatedBroker, stream: ProducerPartition | None = None) -> None:
        self.process = Process(broker, "unused")
        incarnation = broker.admin().topic("orders").incarnation
        self.stream = stream or ProducerPartition(
            "orders", incarnation, 0, self.run(lease_producer_id(self.process.link, self.until()))
        )

    def until(self, seconds: float = 10.0) -> float:
        return self.process.link.now() + seconds

    def run(self, operation: Any) -> Any:
        return self.process.run(operation)

    def send(self, sequence: int, *texts: str) -> list[int]:
        contents = [RecordContent(text.encode(), encode_attribute(key=text)) for text in texts]
        found: list[int] = self.run(send_idempotent(self.process.link, self.stream, sequence, contents, self.until()))
        return found

    def find(self, *sequences: int, since: int = 0) -> dict[int, int]:
        found: dict[int, int] = self.run(find_records(self.process.link, self.stream, sequences, since, self.until()))
        return found

    def close(self) -> int:
        last: int = self.run(close_producer(self.process.link, self.stream, self.until()))
        return last


def texts(broker: SimulatedBroker) -> list[str]:
    return [each.text for each in broker.sent("orders")]


def test_the_same_place_is_stored_once_whichever_client_sends_it(broker: SimulatedBroker) -> None:
    sender = Sender(broker)
    offsets = sender.send(0, "a", "b", "c")
    assert offsets == [each.offset for each in broker.sent("orders")]
    another = Sender(broker, sender.stream)
    assert another.send(0, "a", "b", "c") == offsets
    assert another.send(1, "b") == [offsets[1]]
    another.send(3, "d")
    assert sender.send(3, "d") == [broker.sent("orders")[-1].offset]
    assert texts(broker) == ["a", "b", "c", "d"]
    assert [each.key for each in broker.sent("orders")] == ["a", "b", "c", "d"]


def test_it_is_on_the_disk_when_it_ends(broker: SimulatedBroker) -> None:
    sender = Sender(broker)
    sender.send(0, "a")
    broker.crash()
    assert texts(broker) == ["a"]
    sender.send(0, "a")
    sender.send(1, "b")
    assert texts(broker) == ["a", "b"]


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("error", [TimedOut, ConnectionFailed])
def test_while_nothing_is_known_it_is_sent_again(broker: SimulatedBroker, done: bool, error: type[Any]) -> None:
    sender = Sender(broker)
    broker.fail_next("send", error, times=3, done=done)
    assert sender.send(0, "a", "b") == [each.offset for each in broker.sent("orders")]
    assert texts(broker) == ["a", "b"]


def test_after_its_time_it_is_reported_that_nothing_is_known(broker: SimulatedBroker) -> None:
    sender = Sender(broker)
    broker.fail_next("send", TimedOut, times=1000, done=True)
    with pytest.raises(TimedOut):
        sender.send(0, "a")
    assert texts(broker) == ["a"]


def test_a_gap_and_a_part_are_refused(broker: SimulatedBroker) -> None:
    sender = Sender(broker)
    sender.send(0, "a")
    with pytest.raises(SequenceGap):
        sender.send(2, "c")
    with pytest.raises(BadRequest):
        sender.send(0, "a", "b")
    assert texts(broker) == ["a"]


def test_a_closed_producer_sequence_says_how_far_it_came_and_takes_nothing_more(broker: SimulatedBroker) -> None:
    sender, late = Sender(broker), None
    assert Sender(broker).close() == -1
    sender.send(0, "a", "b")
    late = Sender(broker, sender.stream)
    assert (sender.close(), late.close()) == (1, 1)
    broker.crash()
    with pytest.raises(StaleProducer):
        late.send(2, "c")
    assert late.close() == 1
    assert texts(broker) == ["a", "b"]


def test_what_the_broker_forgot_is_found_in_its_log(broker: SimulatedBroker) -> None:
    sender = Sender(broker)
    broker.producer().send("orders", "before").result()
    since = sender.run(locate_log_end(sender.process.link, sender.stream, BY_LATEST, sender.until()))
    offsets = sender.send(0, "a", "b")
    broker.producer().send("orders", "behind").result()
    broker.clock.advance(days=9)
    broker.restart()
    with pytest.raises(UnknownProducer):
        sender.send(2, "c")
    with pytest.raises(UnknownProducer):
        sender.close()
    assert sender.find(0, 1, 2, since=since) == {0: offsets[0], 1: offsets[1]}
    assert sender.find(7) == {}
    assert texts(broker) == ["before", "a", "b", "behind"]


def test_a_log_that_does_not_reach_back_so_far_says_so(broker: SimulatedBroker) -> None:
    sender = Sender(broker)
    sender.send(0, "a")
    with pytest.raises(OffsetOutOfRange):
        sender.find(0, 9, since=10**9)
    broker.admin().delete_topic("orders")
    with pytest.raises(UnknownTopic):
        sender.find(0, 9)


def test_a_tombstone_and_a_tag_travel(broker: SimulatedBroker) -> None:
    sender = Sender(broker)
    contents = [RecordContent(None, encode_attribute(tag="new"), "new"), RecordContent(b"", b"")]
    sender.run(send_idempotent(sender.process.link, sender.stream, 0, contents, sender.until()))
    first, second = broker.sent("orders")
    assert (first.payload, first.tag, second.payload, second.tag) == (None, "new", b"", None)
    assert [each.payload for each in broker.consumer("orders", tags="new").poll(1)] == [None]
    assert decode_attribute(first.attribute_bytes or b"").tag == "new"


def test_a_partition_is_read_piece_by_piece(broker: SimulatedBroker) -> None:
    broker.producer().send_many("orders", [bytes(40_000)] * 100).result()
    sender = Sender(broker)
    link, stream = sender.process.link, sender.stream
    offset = sender.run(locate_log_end(link, stream, BY_EARLIEST, sender.until()))
    count, looks = 0, 0
    while True:
        chunk = sender.run(fetch_messages(link, stream, offset, sender.until(), 300_000))
        count, looks, offset = count + len(chunk.messages), looks + 1, chunk.next_offset
        if chunk.at_end:
            break
    assert count == 100 and looks > 5


def test_random_senders_of_the_same_places_store_each_once() -> None:
    for run in range(scaled(300)):
        chance = seeded("numbered", run)
        with SimulatedBroker(seed=run) as broker:
            broker.admin().create_topic("orders")
            first = Sender(broker)
            senders = [first, Sender(broker, first.stream), Sender(broker, first.stream)]
            cuts = sorted(chance.sample(range(1, 30), 6))
            runs = list(zip([0, *cuts], [*cuts, 30], strict=True))
            for begin, end in runs:
                for _ in range(chance.randrange(1, 4)):
                    trouble(broker, chance)
                    chance.choice(senders).send(begin, *(str(number) for number in range(begin, end)))
            assert texts(broker) == [str(number) for number in range(30)], f"run {run}"


def trouble(broker: SimulatedBroker, chance: Any) -> None:
    """Something may go wrong with the next send."""
    kind = chance.randrange(6)
    if kind == 0:
        broker.fail_next("send", chance.choice([TimedOut, ConnectionFailed]), done=chance.random() < 0.5)
    elif kind == 1:
        broker.crash(chance.choice(["nothing", "some", "everything"]))
    elif kind == 2:
        broker.disconnect()
