"""A broker for tests, from the side of who writes them."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

import tfmq
from tfmq.client.drivers.blocking import BlockingDriver
from tfmq.client.producer import interpreter_exit
from tfmq.errors import StorageStopped
from tfmq.message import Message
from tfmq.testing.broker import SimulatedBroker, partition_messages, sent_messages
from tfmq.testing.simulation import NothingComes


@pytest.fixture
def broker() -> Any:
    with SimulatedBroker() as made:
        yield made


def texts(messages: list[Any]) -> list[str]:
    return [message.text for message in messages]


# Sending and reading


def test_what_is_sent_is_on_the_disk_when_the_result_is_there(broker: SimulatedBroker) -> None:
    result = broker.producer().send("orders", "x", key="42").result()
    assert (result.topic, result.offset, result.durability) == ("orders", 0, "synced")
    broker.crash()
    assert texts(broker.sent("orders")) == ["x"]


def test_no_caller_needs_to_wait_for_a_send_to_be_seen(broker: SimulatedBroker) -> None:
    producer, lingering = broker.producer(), tfmq.Producer(broker.servers)
    before = broker.clock.now
    producer.send("orders", "at once")
    lingering.send("orders", "lingers")
    lingering.send("orders", "with it")
    assert texts(broker.sent("orders")) == ["at once", "lingers", "with it"]
    assert broker.clock.now == before
    lingering.close()


def test_without_lingering_a_message_goes_with_its_send(broker: SimulatedBroker) -> None:
    for topic in ("fresh", "fresh", "known"):
        assert broker.producer().send(topic, "x", key="42").done()


def test_a_batch_that_lingers_goes_when_its_time_is_over(broker: SimulatedBroker) -> None:
    producer = broker.producer(linger_ms=50)
    producer.send("orders", "the topic is known").result()
    delivery = producer.send("orders", "x")
    broker.clock.advance(milliseconds=49)
    assert not delivery.done()
    broker.clock.advance(milliseconds=1)
    assert delivery.done()


def test_a_consumer_in_a_group_goes_on_where_another_left(broker: SimulatedBroker) -> None:
    producer = broker.producer()
    producer.send_many("orders", ["one", "two", "three"]).result()
    with broker.consumer("orders", group="billing") as consumer:
        assert texts(consumer.poll(max_messages=2)) == ["one", "two"]
    with broker.consumer("orders", group="billing") as consumer:
        assert texts(consumer.poll()) == ["three"]
    assert broker.admin().group("billing").lag == 0


def test_a_loop_ends_with_the_sentence_where_nothing_more_comes(broker: SimulatedBroker) -> None:
    broker.producer().send_many("orders", ["one", "two"]).result()
    seen = []
    with pytest.raises(NothingComes, match="wait for ever"):
        for message in broker.consumer("orders"):
            seen.append(message.text)
    assert seen == ["one", "two"]


def test_a_poll_with_nothing_to_come_takes_its_time_and_no_real_one(broker: SimulatedBroker) -> None:
    broker.admin().create_topic("orders")
    consumer = broker.consumer("orders")
    before = broker.clock.now
    assert consumer.poll(timeout=300) == []
    assert broker.clock.now - before == timedelta(seconds=300)
    assert consumer.poll(timeout=0) == []
    assert broker.clock.now - before == timedelta(seconds=300)


def test_the_first_poll_brings_what_is_there_also_without_any_time(broker: SimulatedBroker) -> None:
    broker.producer().send_many("orders", ["one", "two"]).result()
    before = broker.clock.now
    assert texts(broker.consumer("orders", group="billing").poll(timeout=0)) == ["one", "two"]
    assert texts(broker.consumer("orders", start="latest").poll(timeout=0)) == []
    assert broker.clock.now == before


def test_a_poll_without_an_end_moves_no_time(broker: SimulatedBroker) -> None:
    consumer = broker.consumer("orders")
    before = broker.clock.now
    with pytest.raises(NothingComes):
        consumer.poll(timeout=None)
    assert broker.clock.now == before
    broker.producer().send("orders", "x").result()
    broker.clock.advance(1)
    assert texts(consumer.poll(timeout=None)) == ["x"], "it is as good as before"


# Transactions


def test_a_transactions_messages_are_there_once_it_is_committed(broker: SimulatedBroker) -> None:
    producer = broker.producer()
    with producer.transaction() as tx:
        tx.send("orders", "order")
        tx.send("payments", "payment")
        assert broker.sent("orders") == []
    assert texts(broker.sent("orders") + broker.sent("payments")) == ["order", "payment"]
    with pytest.raises(ZeroDivisionError), producer.transaction() as tx:
        tx.send("orders", "never")
        1 / 0  # noqa: B018
    assert texts(broker.sent("orders")) == ["order"]


def test_a_prepared_transaction_outlives_a_power_cut_and_an_open_one_does_not(broker: SimulatedBroker) -> None:
    producer = broker.producer()
    prepared, left_open = producer.begin("order-1"), producer.begin("order-2")
    prepared.send("orders", "prepared")
    left_open.send("orders", "open")
    prepared.prepare()
    broker.crash()
    assert broker.sent("orders") == []
    resumed = broker.producer().resume("order-1")
    assert resumed.state == "prepared"
    resumed.commit()
    assert texts(broker.sent("orders")) == ["prepared"]


def test_an_unprepared_transaction_ends_at_its_timeout(broker: SimulatedBroker) -> None:
    tx = broker.producer().begin("order-1", timeout=60)
    tx.send("orders", "x")
    broker.clock.advance(59)
    assert broker.admin().transaction("order-1").state == "open"
    broker.clock.advance(2)
    with pytest.raises(tfmq.TransactionError, match="It timed out"):
        tx.commit()
    assert broker.admin().transaction("order-1").state == "rolled_back"
    assert broker.sent("orders") == []


def test_a_check_is_asked_about_a_transaction_that_was_not_ended(broker: SimulatedBroker) -> None:
    asked = []
    owner = broker.producer(group="shop")

    @owner.transaction_check
    def check(transaction: Any) -> str:
        asked.append(transaction.xid)
        return "commit"

    tx = owner.begin("order-1")
    tx.send("orders", "x")
    tx.prepare()
    broker.clock.advance(minutes=10)
    assert asked == ["order-1"]
    assert texts(broker.sent("orders")) == ["x"]


# Time


def test_a_group_is_free_when_its_member_was_silent_for_a_session(broker: SimulatedBroker) -> None:
    broker.producer().send("orders", "x").result()
    lost = broker.consumer("orders", group="billing", session=30)
    broker.drain(lost)
    broker._simulation.clients.remove(lost._driver)  # type: ignore[arg-type]
    # Its process hangs: no heartbeat comes any more, and the connection stands.
    heir = broker.consumer("orders", group="billing")
    assert heir.poll(timeout=20) == []
    broker.clock.advance(11)
    assert texts(heir.poll(timeout=10)) == ["x"]


@pytest.mark.long
def test_heartbeats_keep_a_place_for_hours(broker: SimulatedBroker) -> None:
    broker.producer().send("orders", "x").result()
    consumer = broker.consumer("orders", group="billing")
    broker.drain(consumer)
    broker.clock.advance(hours=3)
    consumer.commit()
    assert consumer.stats()["connections"] == 1


def test_ten_years_without_open_consumers_take_no_time_to_pass(broker: SimulatedBroker) -> None:
    producer = broker.producer()
    producer.send("orders", "then").result()
    broker.clock.advance(days=3652)
    producer.send("orders", "now").result()
    then, now = broker.sent("orders")
    assert now.appended_at - then.appended_at == timedelta(days=3652)


def test_old_messages_go_at_their_age() -> None:
    settings = {"retention.seconds": 86_400, "log.segment_bytes": 1 << 20}
    with SimulatedBroker(settings) as broker:
        producer = broker.producer()
        producer.send_many("orders", [b"x" * 100_000] * 25).result()
        broker.clock.advance(days=2)
        assert len(broker.sent("orders")) < 25


# What goes wrong


def test_the_next_send_fails_as_planned_and_the_one_after_it_does_not(broker: SimulatedBroker) -> None:
    producer = broker.producer()
    producer.send("orders", "first").result()
    broker.fail_next("send", tfmq.TimedOut)
    with pytest.raises(tfmq.TimedOut):
        producer.send("orders", "second").result()
    producer.send("orders", "third").result()
    assert texts(broker.sent("orders")) == ["first", "third"]


def test_an_answer_can_be_lost_although_it_is_done(broker: SimulatedBroker) -> None:
    producer = broker.producer()
    broker.fail_next("send", tfmq.TimedOut, done=True)
    with pytest.raises(tfmq.TimedOut) as caught:
        producer.send("orders", "x").result()
    assert caught.value.outcome == "unknown"
    assert texts(broker.sent("orders")) == ["x"]


def test_what_the_client_mends_by_itself_costs_time_and_is_not_seen(broker: SimulatedBroker) -> None:
    broker.fail_next("send", tfmq.Busy, times=3)
    before = broker.clock.monotonic()
    broker.producer().send("orders", "x").result()
    assert 0.1 < broker.clock.monotonic() - before < 5
    assert texts(broker.sent("orders")) == ["x"]


def test_a_commit_can_fail(broker: SimulatedBroker) -> None:
    tx = broker.producer().begin("order-1")
    tx.send("orders", "x")
    broker.fail_next("commit", tfmq.TransactionRolledBack)
    with pytest.raises(tfmq.TransactionRolledBack):
        tx.commit()
    assert broker.sent("orders") == []


def test_a_refused_connection_is_tried_again(broker: SimulatedBroker) -> None:
    broker.fail_next("connect", tfmq.ConnectionFailed, times=3)
    broker.producer().send("orders", "x").result()
    assert texts(broker.sent("orders")) == ["x"]


def test_a_connection_that_breaks_doubles_nothing(broker: SimulatedBroker) -> None:
    producer = broker.producer(linger_ms=1000)
    consumer = broker.consumer("orders", group="billing")
    for number in range(5):
        producer.send("orders", str(number))
        if number % 2:
            broker.settle()
        broker.disconnect()
    producer.flush()
    assert texts(broker.drain(consumer)) == [*"01234"]
    assert producer.stats()["connections"] > 1


def test_a_full_disk_refuses_and_goes_on_when_there_is_room(broker: SimulatedBroker) -> None:
    producer = broker.producer()
    producer.send("orders", "first").result()
    broker.disk.space_bytes = broker.disk.used_bytes()
    with pytest.raises(tfmq.DiskFull):
        producer.send("orders", "second").result()
    broker.disk.space_bytes = None
    producer.send("orders", "third").result()
    assert texts(broker.sent("orders")) == ["first", "third"]


def test_a_disk_that_fails_stops_its_partition_and_says_so(broker: SimulatedBroker) -> None:
    producer = broker.producer()
    producer.send("orders", "first").result()
    broker.disk.faults.fail("force", path="orders-0")
    broker.disk.faults.fail("sync_file", path="orders-0")
    with pytest.raises(tfmq.StorageStopped):
        producer.send("orders", "second").result()
    assert broker.admin().topic("orders").partitions[0].state == "stopped"


@pytest.mark.parametrize(("keep", "left"), [("nothing", []), ("everything", ["x"])])
def test_a_power_cut_takes_what_was_not_fsynced_the_death_of_the_process_does_not(
    broker: SimulatedBroker, keep: str, left: list[str]
) -> None:
    broker.admin().create_topic("orders")
    broker.producer(acks="written").send("orders", "x").result()
    broker.crash(keep)
    assert texts(broker.sent("orders")) == left


def test_clients_find_the_broker_again_after_a_restart_and_a_power_cut(broker: SimulatedBroker) -> None:
    producer, consumer = broker.producer(), broker.consumer("orders", group="billing")
    sent: list[str] = []
    for word, happens in (
        ("first", broker.settle),
        ("restarted", broker.restart),
        ("crashed", broker.crash),
        ("after an hour", partial(broker.restart, down=timedelta(hours=1))),
    ):
        happens()
        producer.send("orders", word).result()
        sent.append(word)
        assert texts(broker.drain(consumer, timeout=60)) == [word]
    assert texts(broker.sent("orders")) == sent


def test_a_wrong_word_does_not_end_the_broker(broker: SimulatedBroker) -> None:
    with pytest.raises(ValueError, match="'bits' is nothing that a crash leaves: nothing, some, everything"):
        broker.crash("bits")
    for end in (broker.crash, broker.restart):
        with pytest.raises(ValueError, match="away for 0 s or longer"):
            end(down=-5)
        with pytest.raises(TypeError, match="A time is"):
            end(down="1h")  # type: ignore[arg-type]
    broker.producer().send("orders", "x").result()
    assert len(broker.sent("orders")) == 1


def test_no_client_is_reached_while_it_is_stopped(broker: SimulatedBroker) -> None:
    broker.stop()
    before = broker.clock.monotonic()
    with pytest.raises(tfmq.ConnectionFailed, match="Nothing listens"):
        broker.producer().send("orders", "x").result()
    assert broker.clock.monotonic() - before < 60
    with pytest.raises(RuntimeError, match=r"start\(\)"):
        broker.sent("orders")
    broker.start()
    assert broker.sent("orders") == []


# The house


def test_settings_are_the_servers(broker: SimulatedBroker) -> None:
    with SimulatedBroker({"topics.partitions": 4, "limits.message_bytes": 2000}) as other:
        producer = other.producer()
        producer.send("orders", "x").result()
        assert len(other.admin().topic("orders").partitions) == 4
        with pytest.raises(tfmq.MessageTooLarge):
            producer.send("orders", "x" * 3000)
        assert other.servers != broker.servers
        assert broker.sent("orders") == []
    with pytest.raises(tfmq.ConfigError, match=r"topics\.partitons"):
        SimulatedBroker({"topics.partitons": 4})


def test_two_runs_are_the_same() -> None:
    def run() -> list[Any]:
        with SimulatedBroker() as broker:
            result = broker.producer().send("orders", "x").result()
            return [result, broker.admin().status()["node"], broker.sent("orders")[0].appended_at]

    assert run() == run()


@pytest.mark.long
def test_no_thread_and_no_reactor_is_needed(broker: SimulatedBroker) -> None:
    before = threading.active_count()
    broker.producer(linger_ms=5).send("orders", "x").result()
    broker.drain(broker.consumer("orders", group="billing"))
    assert threading.active_count() == before
    program = (
        "import sys\nfrom tfmq.testing import SimulatedBroker\n"
        "with SimulatedBroker() as b: b.producer().send('orders', 'x').result()\n"
        "print([name for name in ('twisted', 'tfmq.aio', 'sqlalchemy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_its_end_delivers_what_lingers_and_closes_everybody(caplog: pytest.LogCaptureFixture) -> None:
    broker = SimulatedBroker()
    producer, own = broker.producer(linger_ms=1000), tfmq.Producer(broker.servers)
    deliveries = [producer.send("orders", "x"), own.send("orders", "y")]
    with caplog.at_level(logging.ERROR):
        broker.close()
        broker.close()
        interpreter_exit._close_all_at_exit()
    assert [delivery.result().durability for delivery in deliveries] == ["synced", "synced"]
    assert producer._core.owner not in interpreter_exit.open_producers
    assert caplog.records == []
    with pytest.raises(tfmq.Closed):
        own.send("orders", "z").result()
    interpreter_exit.open_producers.discard(own._core.owner)


def test_after_its_end_its_address_is_free() -> None:
    with SimulatedBroker() as broker:
        pass
    assert type(tfmq.Admin(broker.servers)._driver) is BlockingDriver


# What a topic holds, read from its logs.


def test_it_gives_messages_with_everything_in_them() -> None:
    with SimulatedBroker() as broker:
        broker.producer().send("orders", "x", key="42", tag="new", properties={"n": "1"}).result()
        assert broker._server.engine is not None
        (message,) = sent_messages(broker._server.engine, "orders")
        assert (message.text, message.key, message.tag, message.properties) == ("x", "42", "new", {"n": "1"})
        assert message.born_at == message.appended_at == broker.clock.now
        assert (message.topic, message.partition, message.ordinal) == ("orders", 0, 0)


def test_many_partitions_are_given_in_the_order_of_appending_and_one_alone() -> None:
    with SimulatedBroker({"topics.partitions": 3}) as broker:
        producer = broker.producer()
        for number in range(9):
            producer.send("orders", str(number), partition=number % 3).result()
            broker.clock.advance(milliseconds=1)
        assert [message.text for message in broker.sent("orders")] == [*"012345678"]
        assert [message.text for message in broker.sent("orders", partition=1)] == ["1", "4", "7"]
        assert broker.sent("orders", partition=3) == []


def test_no_topic_has_no_messages() -> None:
    with SimulatedBroker() as broker:
        assert broker.sent("nothing") == []


def test_a_log_of_many_segments_is_read_to_its_end() -> None:
    with SimulatedBroker({"log.segment_bytes": 1 << 20}) as broker:
        payloads = [bytes([number]) * 100_000 for number in range(40)]
        broker.producer().send_many("orders", payloads).result()
        assert [message.payload for message in broker.sent("orders")] == payloads


def test_a_tombstone_is_a_message_without_payload() -> None:
    with SimulatedBroker() as broker:
        broker.producer().send("orders", Message(None, key="42")).result()
        assert [(message.key, message.payload) for message in broker.sent("orders")] == [("42", None)]


def test_a_partition_that_could_not_be_opened_is_said() -> None:
    with pytest.raises(StorageStopped, match="orders could not be opened: its disk"):
        list(partition_messages("orders", "its disk is gone"))


def test_of_a_stopped_partition_it_gives_what_is_surely_there() -> None:
    with SimulatedBroker() as broker:
        producer = broker.producer()
        producer.send("orders", "forced").result()
        broker.disk.faults.fail("force", path="orders-0")
        broker.disk.faults.fail("sync_file", path="orders-0")
        with pytest.raises(StorageStopped):
            producer.send("orders", "not forced").result()
        assert [message.text for message in broker.sent("orders")] == ["forced"]
