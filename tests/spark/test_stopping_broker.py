"""A broker that stops, and comes back, is waited for like one that is gone: in every question that Spark has."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.transaction.test_commit_group import batch
from tests.spark.drivers import Drivers
from tests.spark.trial import Trial, trial_of
from tests.spark.wiretap import Exchange
from tfmq.errors import Busy, ConnectionFailed
from tfmq.producer import Producer
from tfmq.protocol.commands import CommitGroup, CommitMember
from tfmq.spark.log_reader import SourceAddress, open_log_reader
from tfmq.spark.offsets import PartitionOffset
from tfmq.spark.ranges import OffsetRange
from tfmq.spark.sink_task import CommitGroupClient
from tfmq.spark.stream_reader import GroupProgress
from tfmq.testing.broker import SimulatedBroker
from tools.rigs.live_server import LiveServer

STOPPING = Busy("The broker is stopping. Connect again when it is back.")
ROUNDS = 3


@pytest.fixture
def broker(tfmq_broker: SimulatedBroker) -> SimulatedBroker:
    tfmq_broker.admin().create_topic("orders", 1)
    tfmq_broker.producer().send("orders", "one").result()
    return tfmq_broker


@pytest.mark.parametrize("question", ["ping", "metadata", "locate", "fetch"])
def test_every_question_of_a_query_is_asked_again(broker: SimulatedBroker, question: str) -> None:
    broker.fail_next(question, STOPPING, times=4)
    with open_log_reader(SourceAddress(servers=broker.servers)) as logs:
        assert logs.broker_id()
        assert logs.topics() == ["orders"]
        (log,) = logs.partitions("orders")
        (bounds,) = logs.all_bounds([log])
        assert logs.next_message_offset(log, 0) == 0
        (chunk,) = logs.read_blocks(OffsetRange(log, bounds.first, bounds.end))
        assert len(chunk.data) == bounds.end


def test_one_that_stops_for_good_is_reported_after_the_time(broker: SimulatedBroker) -> None:
    with open_log_reader(SourceAddress(servers=broker.servers, timeout=5.0)) as logs:
        broker.fail_next("metadata", STOPPING, times=1000)
        before = broker.clock.now
        with pytest.raises(Busy, match="is stopping"):
            logs.topics()
        assert 2 < (broker.clock.now - before).total_seconds() <= 5


@pytest.mark.parametrize("question", ["describe_group", "locate", "reset_group"])
def test_so_is_the_group_that_gets_the_progress(broker: SimulatedBroker, question: str) -> None:
    progress = GroupProgress(SourceAddress(servers=broker.servers), "spark")
    broker.fail_next(question, STOPPING, times=4)
    progress.save({("orders", 0): PartitionOffset(broker.admin().topic("orders").incarnation, 0)})
    assert broker.admin().group("spark").lag == 1
    progress.close()


@pytest.mark.parametrize("question", ["ping", "metadata", "begin", "prepare", "commit_group"])
def test_so_are_the_tasks_of_a_sink_and_the_verdict(broker: SimulatedBroker, question: str) -> None:
    broker.fail_next(question, STOPPING, times=4)
    with CommitGroupClient(broker.servers, 30.0) as client:
        client.connect()
        client.topic("orders")
        part = client.open_part(CommitMember("query", 0, "run-1"))
        part.send(batch(client, [b"two"]))
        client.commit(CommitGroup("query", 0, "run-1", part.prepare(), 1))
    assert [each.payload for each in broker.sent("orders")] == [b"one", b"two"]


def test_a_query_that_has_begun_waits_for_its_broker_from_its_first_question_on(broker: SimulatedBroker) -> None:
    """The process that asks may be a new one, which never reached it."""
    broker.stop()
    for patient, least, most in ((False, 1, 5), (True, 20, 22)):
        began = broker.clock.monotonic()
        with (
            open_log_reader(SourceAddress(servers=broker.servers, timeout=20.0), wait_for_broker=patient) as logs,
            pytest.raises(ConnectionFailed),
        ):
            logs.topics()
        assert least <= broker.clock.monotonic() - began <= most
    broker.start()


@pytest.mark.long
def test_a_real_one_is_stopped_and_started_under_questions(tmp_path: Path) -> None:
    server = LiveServer(tmp_path / "data")
    server.start()
    with Producer(server.address) as producer:
        producer.send("orders", "one").result()
    asked, failed, over = [0], [], threading.Event()
    address = SourceAddress(servers=server.address, timeout=60.0)

    def ask() -> None:
        try:
            with open_log_reader(address) as logs:
                while not over.is_set():
                    (log,) = logs.partitions("orders")
                    (bounds,) = logs.all_bounds([log])
                    assert [len(chunk.data) for chunk in logs.read_blocks(OffsetRange(log, 0, bounds.end))] == [
                        bounds.end
                    ]
                    asked[0] += 1
        except Exception as error:
            failed.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    for _ in range(ROUNDS):
        before = asked[0]
        while asked[0] < before + 10 and not failed:
            over.wait(0.01)
        server.stop()
        server.start()
    before = asked[0]
    while asked[0] == before and not failed:
        over.wait(0.01)
    over.set()
    asking.join()
    server.stop()
    assert failed == []


# Through Spark


@pytest.fixture
def trial(drivers: Drivers, spark_server: LiveServer, topic: str, tmp_path: Path) -> Iterator[Trial]:
    with trial_of(drivers, spark_server, topic, tmp_path) as each:
        yield each


@pytest.mark.long
def test_a_query_goes_on_when_its_broker_was_stopped_and_started(trial: Trial) -> None:
    """At a question of the driver's and at one of a task's."""

    def restarted(exchange: Exchange) -> str:
        trial.server.stop()
        trial.server.start()
        return "cut"

    for step in ("LOCATE", "FETCH", "COMMIT_GROUP"):
        trap = trial.tap.trap(step, "request", restarted)
        trial.run()
        trap.wait()
        trial.check()
        trial.more()
