"""How the delay queue writes to the arrival log: like a send, never in the sequence of a producer."""

import logging
from array import array
from collections.abc import Sequence

import pytest

from journal.record.batch import Appended, Batch
from tests.broker.helpers import Broker, after, batch
from tfmq.broker.delayed_produce import ArrivalPartition
from tfmq.delay.arrivals import header as notes
from tfmq.delay.arrivals.header import TurnColumns
from tfmq.delay.arrivals.log import arrival_batches, header_batch, read_batches
from tfmq.delay.due_time import RELATIVE_FLAG, due_times_of
from tfmq.protocol.commands import ACKS_WRITTEN

Told = list[tuple[Sequence[Appended] | None, BaseException | None]]

HOUR = 3_600_000
CANCEL = header_batch(notes.cancel_header(TurnColumns(array("Q", (5,)), array("Q", (6,)))))


@pytest.fixture
def broker() -> Broker:
    made = Broker()
    made.create()
    return made


def landing(broker: Broker) -> ArrivalPartition:
    house = broker.engine.broker
    return house.delay_commands.partition


def append(broker: Broker, *batches: Batch, turn: bool = True) -> Told:
    reported: Told = []
    landing(broker).append(batches, lambda answers, error: reported.append((answers, error)))
    if turn:
        broker.engine.broker.end_turn()
    return reported


def copies(broker: Broker, producer: int, sequence: int) -> list[Batch]:
    """A message of `producer` that gets another time: its record again, after a note that says so."""
    data = batch(producer, sequence, [b"copied"])
    dues = due_times_of(array("Q", (broker.clock.wall_ms() + HOUR,)), RELATIVE_FLAG)
    old = TurnColumns(array("Q", (7,)), array("Q", (8,)))
    note = notes.reschedule_header(broker.log().log_id, "orders", dues, len(data), old)
    return arrival_batches(note, data, (), producer, sequence, 1)


def test_what_the_queue_writes_comes_after_what_was_sent_before_in_the_same_turn(broker: Broker) -> None:
    sent = broker.delay(broker.lease(), 0, due=after(HOUR), acks=ACKS_WRITTEN, turn=False)
    reported = append(broker, CANCEL)
    ((answers, error),) = reported
    assert error is None and answers is not None
    assert answers[0].first_ordinal == sent.delayed.first_number + 1
    assert sent.append_time == answers[0].append_time, "one append for both"


def test_a_copy_is_not_a_next_sequence(broker: Broker) -> None:
    producer = broker.lease()
    broker.delay(producer, 0, [b"a", b"b", b"c"], due=after(HOUR))
    reported = append(broker, *copies(broker, producer, 0), turn=False)
    next_one = broker.delay(producer, 3, due=after(HOUR))
    assert next_one.code == "ok", "the copy of its first message says nothing about its next"
    ((answers, error),) = reported
    assert error is None and answers is not None and len(answers) == 2
    again = broker.restart()
    assert again.delay(producer, 4, due=after(HOUR)).code == "ok"


def test_a_stopped_log_refuses_and_nothing_was_done(broker: Broker) -> None:
    broker.arrivals.stop("a test stops it")
    ((answers, error),) = append(broker, CANCEL)
    assert answers is None and getattr(error, "code", "") == "storage_stopped"
    assert getattr(error, "outcome", "") == "not done" and "start the broker again" in str(error)


def test_what_was_written_when_its_fsync_failed_may_have_happened(broker: Broker) -> None:
    reported: list[BaseException | None] = []
    broker.delay(broker.lease(), 0, due=after(HOUR), acks=ACKS_WRITTEN, turn=False)
    broker.disk.faults.fail("force", path="arrivals/")
    broker.engine.broker.delay_commands.partition.write()
    landing(broker).when_forced(broker.arrivals.end_offset, reported.append)
    broker.engine.broker.end_turn()
    assert [getattr(error, "outcome", None) for error in reported] == ["unknown"]


def test_a_full_disk_is_reported(broker: Broker) -> None:
    broker.delay(broker.lease(), 0, due=after(HOUR))
    broker.disk.space_bytes = broker.disk.used_bytes()
    ((answers, error),) = append(broker, *copies(broker, 1 << 30, 0))
    assert answers is None and getattr(error, "code", "") == "disk_full"


def test_a_truncation_waits_for_the_append_and_the_append_for_it() -> None:
    broker = Broker(queued=True)
    broker.create()
    producer = broker.lease()
    broker.work()
    first = broker.delay(producer, 0, due=after(HOUR))
    broker.work()
    assert first.code == "ok"
    ended: list[BaseException | None] = []
    end = broker.arrivals.end_offset
    landing(broker).truncate_before(end, lambda result, error: ended.append(error))
    second = broker.delay(producer, 1, due=after(HOUR))
    assert not ended and second.code == "waiting"
    broker.work()
    assert ended == [None] and second.code == "ok"
    assert broker.arrivals.first_offset == end
    (stored,) = read_batches(broker.arrivals, end, broker.arrivals.end_offset)
    assert stored.first_number == second.delayed.first_number


def test_when_it_is_on_the_disk_is_reported(broker: Broker) -> None:
    append(broker, CANCEL)
    reported: list[BaseException | None] = []
    landing(broker).when_forced(landing(broker).log.end_offset, reported.append)
    broker.engine.broker.end_turn()
    assert reported == [None] and broker.arrivals.forced_offset == broker.arrivals.end_offset


def test_a_reader_of_its_stop_is_advised_to_start_again(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    producer = broker.lease()
    broker.disk.faults.fail("force", path="arrivals")
    with caplog.at_level(logging.ERROR, "tfmq.broker"):
        broker.delay(producer, 0, due=after(HOUR))
    assert "start the broker again" in caplog.text and "topic resume" not in caplog.text
