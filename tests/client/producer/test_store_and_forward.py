"""Conformance item 32, an ordered sender with a partition down and back: order, and each message once, over failures
at every step."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tfmq
from tests.scale import scaled
from tfmq.client.producer import outbox, store_and_forward
from tfmq.client.producer.outbox import Outbox
from tfmq.client.producer.store_and_forward import StorableBatch
from tfmq.errors import Busy
from tfmq.message import SendResult
from tfmq.protocol.commands import ACKS_NONE, ACKS_SYNCED
from tfmq.testing.broker import SimulatedBroker

TOPIC = "orders"


@pytest.fixture
def broker() -> Iterator[SimulatedBroker]:
    with SimulatedBroker() as made:
        with made.admin() as admin:
            admin.create_topic(TOPIC, partitions=3)
        yield made


def producer(broker: SimulatedBroker, store: Path, numbers: tuple[int, ...] = (1,), **options: Any) -> Any:
    return broker.producer(selector=tfmq.StrictPartitions({TOPIC: numbers}, store), **options)


def texts(broker: SimulatedBroker, partition: int = 1) -> list[str]:
    return [message.text for message in broker.sent(TOPIC, partition)]


def kept_count(store: Path) -> int:
    with sqlite3.connect(store) as database:
        found: int = database.execute("select coalesce(sum(count), 0) from kept").fetchone()[0]
    return found


def test_while_all_is_well_nothing_is_kept(broker: SimulatedBroker, tmp_path: Path) -> None:
    with producer(broker, tmp_path / "store") as sender:
        results = [sender.send(TOPIC, f"{number}").result() for number in range(5)]
    assert {(each.partition, each.durability) for each in results} == {(1, "synced")}
    assert [each.offset for each in results] == sorted({each.offset for each in results})
    assert texts(broker) == list("01234")


def test_item_32_a_partition_down_and_back(broker: SimulatedBroker, tmp_path: Path) -> None:
    with producer(broker, tmp_path / "store") as sender:
        assert sender.send(TOPIC, "0").result().durability == "synced"
        broker.fail_next("send", tfmq.StorageStopped, times=3)
        result = sender.send(TOPIC, "1").result()
        assert (result.durability, result.offset, result.partition) == ("kept", None, 1)
        handles = [sender.send(TOPIC, f"{number}") for number in range(2, 6)]
        assert {handle.result().durability for handle in handles} == {"kept"}
        assert texts(broker) == ["0"]
        broker.clock.advance(seconds=5)
        assert texts(broker) == list("012345"), "forwarded in order"
        assert sender.send(TOPIC, "6").result().durability == "synced"
    assert texts(broker) == list("0123456")
    assert kept_count(tmp_path / "store") == 0
    assert texts(broker, 0) == texts(broker, 2) == [], "no other partition is ever taken"


def test_a_message_is_in_the_file_before_its_handle_says_so(broker: SimulatedBroker, tmp_path: Path) -> None:
    broker.stop()
    with producer(broker, tmp_path / "store") as sender:
        for number in range(3):
            assert sender.send(TOPIC, f"{number}").result().durability == "kept"
            assert kept_count(tmp_path / "store") == number + 1
    broker.start()


def test_the_next_process_forwards_what_one_before_left(broker: SimulatedBroker, tmp_path: Path) -> None:
    broker.stop()
    with producer(broker, tmp_path / "store") as sender:
        sender.send_many(TOPIC, [f"{number}" for number in range(4)]).result()
    broker.start()
    with producer(broker, tmp_path / "store") as sender:
        sender.send(TOPIC, "4")
        broker.clock.advance(seconds=5)
    assert texts(broker) == list("01234")


def test_what_was_stored_although_its_answer_was_lost_is_not_doubled(broker: SimulatedBroker, tmp_path: Path) -> None:
    with producer(broker, tmp_path / "store") as sender:
        sender.send(TOPIC, "0").result()
        broker.fail_next("send", tfmq.StorageStopped, done=True)
        assert sender.send(TOPIC, "1").result().durability == "kept"
        sender.send(TOPIC, "2").result()
        broker.clock.advance(seconds=5)
    assert texts(broker) == list("012")


METHODS = ("partitions", "append", "read_oldest", "record_sent_as", "remove")


class Dying:
    """A process that dies before, or after, the `count`-th use of its store: it does nothing after that."""

    def __init__(self, count: int, after: bool) -> None:
        self.left, self.after = count, after
        self.used: list[str] = []

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        for name in METHODS:
            patch.setattr(Outbox, name, self._dying(name, getattr(Outbox, name)))

    def _dying(self, name: str, original: Any) -> Any:
        def method(store: Outbox, *arguments: Any) -> Any:
            self.left -= 1
            if self.left < 0 or (self.left == 0 and not self.after):
                raise tfmq.Closed("the process is gone")
            self.used.append(name)
            result = original(store, *arguments)
            if self.left == 0:
                raise tfmq.Closed("the process is gone")
            return result

        return method


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("count", range(1, 13))
def test_a_crash_at_every_step_loses_nothing_and_doubles_nothing(
    broker: SimulatedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, done: bool, after: bool
) -> None:
    store, said, dying = tmp_path / "store", [], Dying(count, after)
    with monkeypatch.context() as patch:
        dying.patch(patch)
        sender = producer(broker, store)
        broker.fail_next("send", tfmq.StorageStopped, times=2, done=done)
        for number in range(6):
            handle = sender.send(TOPIC, f"{number}")
            try:
                handle.result(10)
            except tfmq.TfmqError:
                break  # it is dead
            said.append(f"{number}")
            if number == 3:
                broker.clock.advance(seconds=3)
        sender._core.store_and_forward.close()
        sender._driver.close()
    with producer(broker, store) as sender:
        sender.send(TOPIC, "last").result()
        broker.clock.advance(seconds=10)
    found = texts(broker)
    assert found == sorted(set(found)), "in order, each once"
    assert set(said) <= set(found), "what was said to be kept is there"
    assert found[-1] == "last"
    assert count > len(METHODS) or len(dying.used) >= count - 1, "the step was reached"


@pytest.mark.parametrize("seed", range(max(5, scaled(100))))
def test_random_troubles(broker: SimulatedBroker, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    sent = {1: 0, 2: 0}
    said: dict[int, set[int]] = {1: set(), 2: set()}
    sender, handles = producer(broker, tmp_path / "store", (1, 2)), []
    down = False
    for _ in range(40):
        step = chance.random()
        if step < 0.5:
            for _ in range(chance.randrange(1, 5)):
                partition = chance.choice((1, 2))
                handles.append(
                    (partition, sent[partition], sender.send(TOPIC, f"{sent[partition]}", partition=partition))
                )
                sent[partition] += 1
        elif step < 0.65:
            error = chance.choice([tfmq.StorageStopped, tfmq.TimedOut, tfmq.Busy, tfmq.DiskFull])
            broker.fail_next("send", error, times=chance.randrange(1, 4), done=chance.random() < 0.5)
        elif step < 0.75:
            (broker.start if down else broker.stop)()
            down = not down
        elif step < 0.8 and not down:
            broker.crash(chance.choice(["nothing", "everything"]))
        elif step < 0.85:
            broker.disconnect()
        elif step < 0.92:
            sender.close()  # flushes: nothing is in memory alone, and the next one goes on with the file
            sender = producer(broker, tmp_path / "store", (1, 2))
        else:
            broker.clock.advance(seconds=chance.choice([0.1, 1, 3]))
    if down:
        broker.start()
    for partition in sent:
        sender.send(TOPIC, f"{sent[partition]}", partition=partition)
        sent[partition] += 1
    broker.clock.advance(seconds=30)
    for partition, number, handle in handles:
        handle.result(60)
        said[partition].add(number)
    sender.close()
    for partition, count in sent.items():
        assert texts(broker, partition) == [f"{number}" for number in range(count)], seed
    assert kept_count(tmp_path / "store") == 0


def test_where_the_broker_forgot_the_producer_sequence_the_log_decides(
    broker: SimulatedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with producer(broker, tmp_path / "store") as sender:
        sender.send(TOPIC, "0").result()
        broker.fail_next("send", tfmq.StorageStopped, done=True)
        broker.fail_next("succeed_producer", tfmq.UnknownProducer)
        assert sender.send(TOPIC, "1").result().durability == "kept"
        sender.send(TOPIC, "2").result()
        broker.clock.advance(seconds=5)
    assert texts(broker) == list("012")


def test_a_full_store_is_reported_and_what_it_has_stays(broker: SimulatedBroker, tmp_path: Path) -> None:
    broker.stop()
    selector = tfmq.StrictPartitions({TOPIC: [1]}, tmp_path / "store", store_bytes=300)
    sender = broker.producer(selector=selector)
    assert sender.send(TOPIC, "a" * 100).result().durability == "kept"
    with pytest.raises(tfmq.Busy, match="its limit is 300"):
        for _ in range(10):
            sender.send(TOPIC, "b" * 100).result()
    sender.flush()
    broker.start()
    broker.clock.advance(seconds=10)
    sender.send(TOPIC, "c").result()
    sender.close()
    found = texts(broker)
    assert (found[0], found[-1]) == ("a" * 100, "c")


@pytest.mark.parametrize(("done", "outcome"), [(True, "unknown"), (False, "unknown"), (None, "not done")])
def test_what_cannot_be_kept_says_whether_the_broker_may_have_it(
    broker: SimulatedBroker, tmp_path: Path, done: bool | None, outcome: str
) -> None:
    selector = tfmq.StrictPartitions({TOPIC: [1]}, tmp_path / "store", store_bytes=1)
    sender: Any
    with broker.producer(selector=selector) as sender:
        sender.send(TOPIC, "0").result()
        if done is None:
            broker.stop()
            broker.fail_next("connect", tfmq.ConnectionFailed)
            sender._core.store_and_forward._partitions[TOPIC, 1]._producer = None  # so it has nothing to be sent by
        else:
            broker.fail_next("send", tfmq.StorageStopped, done=done)
        with pytest.raises(tfmq.Busy) as caught:
            sender.send(TOPIC, "1").result()
        assert caught.value.outcome == outcome
        if done is None:
            broker.start()


def test_a_store_has_one_process(broker: SimulatedBroker, tmp_path: Path) -> None:
    with producer(broker, tmp_path / "store") as one:
        one.send(TOPIC, "0").result()
        other = producer(broker, tmp_path / "store")
        with pytest.raises(tfmq.NotAllowed, match="in use by another"):
            other.send(TOPIC, "1").result()
    assert other.send(TOPIC, "2").result().durability == "synced"
    other.close()


def test_what_is_no_fault_of_the_partition_fails(broker: SimulatedBroker, tmp_path: Path) -> None:
    with broker.producer(selector=tfmq.StrictPartitions({TOPIC: [1, 7]}, tmp_path / "store")) as sender:
        with pytest.raises(tfmq.BadRequest, match="not among the topics"):
            sender.send("others", "x")
        with pytest.raises(tfmq.UnknownPartition, match="not configured"):
            sender.send(TOPIC, "x", partition=2)
        with pytest.raises(tfmq.BadRequest, match="delayed"):
            sender.send(TOPIC, "x", partition=1, delay=5)
        with pytest.raises(tfmq.UnknownPartition, match="0 to 2"):
            sender.send(TOPIC, "x", partition=7).result()
        assert sender.send(TOPIC, "x", partition=1).result().durability == "synced"


def test_everything_of_a_message_survives_the_store(broker: SimulatedBroker, tmp_path: Path) -> None:
    broker.stop()
    with producer(broker, tmp_path / "store") as sender:
        sender.send(TOPIC, "x", key="k", tag="t", properties={"a": "b"})
        sender.send(TOPIC, None, key="k")
    broker.start()
    with producer(broker, tmp_path / "store") as sender:
        sender.send(TOPIC, "last").result()
        broker.clock.advance(seconds=5)
    first, second, _ = broker.sent(TOPIC, 1)
    assert (first.text, first.key, first.tag, dict(first.properties)) == ("x", "k", "t", {"a": "b"})
    assert second.payload is None


def test_bounds_have_reasons() -> None:
    assert store_and_forward.PAUSE_SECONDS_MAX <= store_and_forward.REPLY_TIMEOUT_SECONDS
    assert outbox.NEVER_SENT.producer_id == 0


# What handles say of messages that are kept.


def batch() -> StorableBatch:
    owner: Any = None
    made = StorableBatch(owner, "orders", 1, 1000, b"", 0.0)
    made.add(b"x", None, None)
    made.add(b"y", None, None)
    made.seal()
    return made


def test_a_kept_one_says_so_and_has_no_offset_yet() -> None:
    made = batch()
    made.assign_sequence(7, 3)
    made.is_in_outbox = True
    made.set_stored((), ACKS_NONE)
    assert made.result_of(1) == SendResult("orders", 1, None, 0, "kept", 1)


def test_a_sent_one_is_as_any_other() -> None:
    made = batch()
    made.assign_sequence(7, 3)
    made.set_stored([(0, 100)], ACKS_SYNCED)
    result = made.result_of(0, 2)
    assert (result.offset, result.durability, result.message_id) == (100, "synced", (7 << 24) + 3)


def test_a_failed_one_raises() -> None:
    made = batch()
    made.set_failed(Busy("full"))
    with pytest.raises(Busy, match="full"):
        made.result_of(0)


def test_the_sender_takes_none_for_open() -> None:
    owner: Any = None
    made = StorableBatch(owner, "orders", 1, 1000, b"", 0.0)
    assert (made.is_open, made.is_gathering) == (False, True)


def test_one_that_leaves_counts_its_messages_once() -> None:
    made = batch()
    made.assign_sequence(7, 3)
    made.seal()
    assert (made.count, made.is_gathering) == (2, False)
