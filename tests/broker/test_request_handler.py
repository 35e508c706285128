"""The engine's surface: a method for every command, one answer for every request, a stop that loses nothing."""

import inspect

import pytest

from tests.broker.helpers import Broker, Session, payloads_of
from tfmq.protocol import commands
from tfmq.protocol.commands import ACKS_SYNCED, ACKS_WRITTEN, COMMANDS, Metadata, Ping, Status


def test_item_12_every_command_of_the_table_has_its_method() -> None:
    """HELLO, AUTHENTICATE and STATUS are answered by the session."""
    engine = Broker().engine
    tables = (engine.with_reply, engine.with_session, engine.with_body)
    served = [kind for table in tables for kind in table]
    assert len(served) == len(COMMANDS) - 3
    assert {commands.Hello, commands.Authenticate, Status, *served} == {each.request.shape for each in COMMANDS}
    for arguments, table in enumerate(tables, start=2):
        for method in table.values():
            inspect.signature(method).bind(*range(arguments))


def test_item_10_many_topics_are_loaded_at_the_start_all_of_them() -> None:
    broker = Broker()
    names = [f"orders.{number % 5}.{number}" for number in range(40)]
    producer = broker.lease()
    for name in names:
        broker.create(name, 3)
        assert broker.produce(producer, 0, [name.encode()], topic=name, partition=2).code == "ok"
    again = broker.restart()
    rows = again.ask(Metadata(None, False)).topics
    assert [row[0] for row in rows] == sorted(names)
    assert all(again.payloads(name, 2) == [name.encode()] for name in names)


def test_ping_returns_the_broker_s_time() -> None:
    broker = Broker()
    assert broker.ask(Ping()).time_ms == broker.clock.wall_ms()


def test_status_counts_what_is_stored() -> None:
    broker = Broker()
    broker.create(partitions=2)
    broker.produce(broker.lease(), 0, [b"a", b"b"])
    broker.clock.advance(90)
    status = broker.ask(Status()).status
    assert (status["topics"], status["partitions"], status["messages"]) == (1, 2, 2)
    assert status["bytes"] == broker.log().size_bytes
    assert status["uptime_seconds"] == 90 and status["stopped"] == []


def test_status_names_what_is_stopped() -> None:
    broker = Broker()
    broker.create()
    broker.disk.faults.fail("write", path="orders-0/0")
    broker.produce(broker.lease(), 0)
    (stopped,) = broker.ask(Status()).status["stopped"]
    assert (stopped["topic"], stopped["partition"]) == ("orders", 0) and stopped["reason"]


def test_a_stop_writes_and_fsyncs_what_was_taken_and_wakes_who_waits() -> None:
    broker = Broker(queued=True)
    broker.create()
    producer = broker.lease()
    broker.produce(producer, 0)
    broker.work()
    fetch = broker.fetch(broker.log().end_offset, wait_ms=60_000, session=Session())
    taken = broker.produce(producer, 1, [b"last"], acks=ACKS_SYNCED, turn=False)
    broker.stop()
    assert taken.durability == ACKS_SYNCED
    assert fetch.code in ("busy", "ok")
    refused = broker.produce(producer, 2, incarnation=1)
    assert refused.code == "busy" and refused.failure is not None and refused.failure.outcome == "not done"
    again = Broker(broker.disk.crash(keep="nothing"))
    assert again.payloads() == [b"hello", b"last"]


def test_non_durable_data_is_fsynced_in_its_time() -> None:
    broker = Broker(queued=True, flush__seconds=5)
    broker.create()
    producer = broker.lease()
    broker.produce(producer, 0)
    broker.work()
    broker.produce(producer, 1, acks=ACKS_WRITTEN)
    broker.advance(1.1)
    broker.work()  # log.mark says what was forced first
    broker.advance(3.8)
    assert not broker.jobs
    broker.advance(0.2)
    broker.work()
    assert broker.log().forced_offset == broker.log().end_offset


@pytest.mark.parametrize("values", [{"flush__messages": 0}, {"flush__seconds": 0}, {"flush__messages": 3}])
def test_non_durable_data_is_fsynced_after_so_many_messages(values: dict[str, int]) -> None:
    broker = Broker(None, None, **values)  # type: ignore[arg-type]
    broker.create()
    broker.produce(broker.lease(), 0, [b"x"] * 3, acks=ACKS_WRITTEN)
    assert broker.log().forced_offset == broker.log().end_offset


def test_a_fault_of_ours_is_an_answer_too() -> None:
    broker = Broker()
    answer = broker.ask(commands.DescribeTopic(None))  # type: ignore[arg-type]
    assert answer.code == "unknown_topic"
    broker.engine.broker.topics = None  # type: ignore[assignment]
    assert broker.ask(commands.DescribeTopic("orders")).code == "internal_error"


def test_what_is_read_after_a_restart_is_what_was_sent() -> None:
    broker = Broker()
    broker.create()
    producer = broker.lease()
    for sequence in range(50):
        broker.produce(producer, sequence, [b"%d" % sequence], acks=ACKS_WRITTEN if sequence % 7 else ACKS_SYNCED)
    again = broker.restart()
    answer = again.fetch(0, max_bytes=1 << 20)
    assert payloads_of(answer) == [b"%d" % n for n in range(50)]
