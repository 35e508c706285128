"""How the parts are joined: settings by precedence, one force a turn, a stop that waits for its workers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from journal.log.options import LogOptions
from tests.broker.helpers import DATA, Broker, after
from tfmq.broker.producer_state import ProducerState
from tfmq.protocol.commands import ACKS_WRITTEN, CreateTopic, Status


def test_a_topic_s_settings_win_over_the_broker_s() -> None:
    broker = Broker(flush__messages=5, retention__action="archive")
    house = broker.engine.broker
    options = house.partition_dirs.log_options("orders", 3, {"flush.messages": 9})
    assert isinstance(options, LogOptions)
    assert options.flush_messages == 9
    assert options.archive_folder == "/data/archive/orders-3"
    assert house.partition_dirs.log_options("orders", 3, {}).flush_messages == 5


def test_one_fsync_serves_all_partitions_of_a_turn() -> None:
    broker = Broker(queued=True)
    broker.create(partitions=20)
    producer = broker.lease()
    for partition in range(20):
        broker.produce(producer, 0, partition=partition, acks=ACKS_WRITTEN)
    broker.work()
    house = broker.engine.broker
    before, joint = house.forcer.forces, house.forcer.joint_forces
    answers = [broker.produce(producer, 1, partition=partition, turn=False) for partition in range(20)]
    broker.engine.broker.end_turn()
    broker.work()
    assert all(answer.code == "ok" for answer in answers)
    assert house.forcer.forces == before + 1 and house.forcer.joint_forces == joint + 1


def test_what_comes_while_an_fsync_runs_shares_the_next() -> None:
    broker = Broker(queued=True)
    broker.create()
    producer = broker.lease()
    broker.produce(producer, 0)
    broker.work()
    before = broker.engine.broker.forcer.forces
    first = broker.produce(producer, 1)
    rest = [broker.produce(producer, n) for n in range(2, 12)]
    broker.step()
    assert first.code == "ok" and all(answer.code == "waiting" for answer in rest)
    broker.step()
    assert all(answer.code == "ok" for answer in rest)
    assert broker.engine.broker.forcer.forces == before + 2


def test_a_turn_calls_only_components_with_work() -> None:
    broker = Broker()
    broker.create()
    producer = broker.lease()
    writes = broker.engine.broker._writes
    called: list[str] = []

    def recording(name: str, write: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            called.append(name)
            write()

        return run

    writes.update({name: recording(name, write) for name, write in writes.items()})
    assert broker.produce(producer, 0).code == "ok"
    assert called == ["partitions"]
    broker.engine.broker.end_turn()
    assert called == ["partitions"]


def test_a_stop_waits_for_every_worker() -> None:
    broker = Broker(queued=True)
    broker.create()
    creating = broker.ask(CreateTopic("bills", 2, {}))
    stopped: list[bool] = []
    broker.engine.broker.stop(lambda: stopped.append(True))
    assert not stopped
    broker.work()
    assert stopped and creating.done


def test_a_stop_without_memory_ends_and_the_next_start_has_everything(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broker = Broker()
    broker.create()
    assert broker.produce(broker.lease(), 0, [b"kept"]).code == "ok"

    def dump(_: object) -> bytes:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(ProducerState, "dump", dump)
        broker.stop()
    reported = [each.getMessage() for each in caplog.records]
    assert "orders-0 could not be closed cleanly: out of memory" in reported
    assert Broker(broker.disk, broker.clock).payloads() == [b"kept"]


# What STATUS says: numbers that add up, and every trouble by its name.


def test_it_counts_what_the_broker_holds() -> None:
    broker = Broker()
    broker.create(partitions=2)
    broker.create("bills")
    producer = broker.lease()
    broker.produce(producer, 0, [b"a", b"b"])
    broker.produce(producer, 0, [b"c"], partition=1)
    status = broker.ask(Status()).status
    assert (status["topics"], status["partitions"], status["messages"]) == (2, 3, 3)
    assert status["bytes"] == sum(broker.log("orders", number).size_bytes for number in (0, 1))
    assert status["stopped"] == status["damaged"] == status["unknown_folders"] == []
    assert status["catalog"] == "open" and status["transactions"]["journal"] == "open"


def test_it_names_what_is_in_trouble() -> None:
    broker = Broker()
    broker.create()
    broker.log().stop("its disk failed")
    assert broker.ask(Status()).status["stopped"] == [{"topic": "orders", "partition": 0, "reason": "its disk failed"}]


def test_it_names_what_is_not_served() -> None:
    broker = Broker()
    broker.create(partitions=2)
    broker.stop()
    broker.disk.rename(f"{DATA}/orders-1", "/elsewhere")
    broker.disk.write_file(f"{DATA}/orders-1", b"")
    (stopped,) = Broker(broker.disk).ask(Status()).status["stopped"]
    assert (stopped["topic"], stopped["partition"]) == ("orders", 1)
    assert "a folder belongs there" in stopped["reason"]


def test_it_says_what_waits_for_its_time() -> None:
    broker = Broker()
    broker.create()
    broker.delay(broker.lease(), 0, [b"a", b"b"], due=after(60_000))
    status = broker.ask(Status()).status["delay"]
    assert status["pending"] == 2 and status["arrivals"] == "open"
    assert broker.ask(Status()).status["messages"] == 0, "it is in no partition yet"
