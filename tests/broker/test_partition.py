"""The queue of a partition: order kept, size bounded, workers waited for."""

import itertools
from collections.abc import Callable

from journal.filenames import join, log_checkpoint_name
from journal.log.checkpoint import LogCheckpointFile
from journal.record.batch import Batch, Source
from journal.record.block_trailer import SOURCE_DELAY, SOURCE_TRANSACTION
from tests.broker.helpers import Broker, batch
from tfmq.apply_target import Append
from tfmq.broker.partition import Partition
from tfmq.errors import UNKNOWN, DiskFull, StorageStopped
from tfmq.protocol.commands import ACKS_WRITTEN

Told = list[BaseException | None]


def test_while_file_work_runs_the_queue_waits_and_keeps_its_order() -> None:
    broker = Broker(queued=True, log__segment_bytes=1 << 16)
    broker.create(partitions=2)
    producer, other = broker.lease(), broker.lease()
    for sequence in range(2):
        broker.produce(producer, sequence, [bytes(25_000)])
        broker.work()
    answers = [broker.produce(producer, n, [bytes(25_000)], acks=ACKS_WRITTEN) for n in (2, 3)]
    assert [answer.code for answer in answers] == ["waiting"] * 2
    elsewhere = broker.produce(other, 0, partition=1, acks=ACKS_WRITTEN)
    broker.work()
    assert [answer.code for answer in (*answers, elsewhere)] == ["ok"] * 3
    assert answers[0].first_ordinal == 2 and answers[1].first_ordinal == 3
    assert broker.log().segment_count == 2


def test_one_append_is_bounded_and_the_rest_follows_in_the_same_turn() -> None:
    broker = Broker(limits__append_bytes=100_000)
    broker.create()
    producer = broker.lease()
    answers = [broker.produce(producer, n, [bytes(40_000)], turn=False) for n in range(5)]
    broker.engine.end_turn()
    assert [answer.code for answer in answers] == ["ok"] * 5
    assert len({answer.positions[0][1] for answer in answers}) == 5


def test_appends_fit_small_segments_and_a_batch_that_cannot_gets_a_segment_of_its_own() -> None:
    broker = Broker(log__segment_bytes=1 << 16)
    broker.create()
    producer = broker.lease()
    answers = [broker.produce(producer, n, [bytes(30_000)], turn=False) for n in range(6)]
    broker.engine.end_turn()
    assert [answer.code for answer in answers] == ["ok"] * 6
    large = broker.produce(producer, 6, [bytes(30_000)] * 4)
    assert large.code == "ok"
    assert broker.produce(producer, 10, [bytes(90_000)]).code == "ok"
    assert broker.produce(producer, 11).code == "ok"
    assert broker.log().end_ordinal == 12


def test_a_full_disk_at_the_roll_is_an_error_and_the_next_try_rolls() -> None:
    broker = Broker(queued=True, log__segment_bytes=1 << 16)
    broker.create()
    producer = broker.lease()
    for sequence in range(2):
        broker.produce(producer, sequence, [bytes(25_000)])
        broker.work()
    broker.disk.space_bytes = broker.disk.used_bytes()
    failed = broker.produce(producer, 2, [bytes(25_000)])
    broker.work()
    assert failed.code == "disk_full"
    broker.disk.space_bytes = None
    done = broker.produce(producer, 2, [bytes(25_000)])
    broker.work()
    assert done.code == "ok"


def test_work_that_needs_the_log_alone_waits_for_file_work_and_holds_the_queue() -> None:
    broker = Broker(queued=True)
    broker.create()
    broker = broker.restart()
    producer = broker.lease()
    partition = broker.engine.broker.topics.partition("orders", broker.incarnation(), 0)
    first = broker.produce(producer, 0, acks=ACKS_WRITTEN)
    seen: list[str] = []
    partition.run_exclusively(lambda: seen.append("alone"), lambda result, error: seen.append("done"))
    second = broker.produce(producer, 1, acks=ACKS_WRITTEN)
    assert (first.code, second.code, seen) == ("waiting", "waiting", [])
    broker.work()
    assert (first.code, second.code, seen) == ("ok", "ok", ["alone", "done"])


# Holds


def held(broker: Broker) -> tuple[Partition, Callable[..., Told]]:
    """A partition that a large transaction holds, and how to apply its next slice."""
    partition = broker.engine.broker.topics.partition("orders", broker.incarnation(), 0)
    destination = broker.engine.broker.apply_target
    numbers = itertools.count(1)

    def slice_of(payload: bytes) -> Told:
        told: Told = []
        number = next(numbers)
        records = Batch(batch(1 << 30, number, [payload]), (), 1 << 30, number, 1)
        source = Source(SOURCE_TRANSACTION, 5, 100, number)
        effect = Append("orders", broker.incarnation(), 0, [records], source)
        destination.apply(effect, lambda mark, error: told.append(error))
        broker.engine.end_turn()
        return told

    destination.begin_exclusive(partition.log.log_id, (SOURCE_TRANSACTION, 5))
    return partition, slice_of


def unhold(broker: Broker, partition: Partition) -> None:
    broker.engine.broker.apply_target.end_exclusive(partition.log.log_id)
    broker.engine.end_turn()


def test_while_it_is_held_only_effects_are_appended_and_the_rest_follows_in_order() -> None:
    broker = Broker()
    broker.create()
    producer = broker.lease()
    broker.produce(producer, 0, [b"before"])
    partition, slice_of = held(broker)
    waiting = [broker.produce(producer, n, [b"plain %d" % n]) for n in (1, 2)]
    closing = broker.succeed(producer)
    assert slice_of(b"one") == [None] and slice_of(b"two") == [None]
    assert [answer.code for answer in (*waiting, closing)] == ["waiting"] * 3
    assert all(answer.released for answer in waiting)
    unhold(broker, partition)
    assert [answer.code for answer in (*waiting, closing)] == ["ok"] * 3
    assert closing.last_sequence == 2
    assert broker.payloads() == [b"before", b"one", b"two", b"plain 1", b"plain 2"]


def delayed(broker: Broker, number: int) -> Told:
    """An effect of another source than the one that holds."""
    told: Told = []
    records = Batch(batch(1 << 31, number, [b"delayed %d" % number]), (), 1 << 31, number, 1)
    effect = Append("orders", broker.incarnation(), 0, [records], Source(SOURCE_DELAY, 6, number, 0))
    broker.engine.broker.apply_target.apply(effect, lambda mark, error: told.append(error))
    broker.engine.end_turn()
    return told


def test_effects_of_other_sources_wait_for_the_end_of_a_hold_too() -> None:
    broker = Broker()
    broker.create()
    partition, slice_of = held(broker)
    slice_of(b"one")
    waiting = [delayed(broker, number) for number in (1, 2)]
    slice_of(b"two")
    assert waiting == [[], []]
    unhold(broker, partition)
    assert waiting == [[None], [None]]
    assert broker.payloads() == [b"one", b"two", b"delayed 1", b"delayed 2"]


def test_an_effect_that_is_refused_takes_its_followers_along_wherever_they_wait() -> None:
    broker = Broker(queued=True)
    broker.create()
    producer = broker.lease()
    broker.produce(producer, 0)
    broker.work()
    partition = broker.engine.broker.topics.partition("orders", broker.incarnation(), 0)
    partition.run_exclusively(lambda: None, lambda result, error: None)
    first = delayed(broker, 1)
    held(broker)
    second = delayed(broker, 2)
    waiting = broker.produce(producer, 1, acks=ACKS_WRITTEN)
    broker.disk.space_bytes = broker.disk.used_bytes()
    broker.work()
    assert [type(error) for error in first + second] == [DiskFull, DiskFull]
    assert waiting.code == "waiting", "the hold is another's, and goes on"
    broker.disk.space_bytes = None
    unhold(broker, partition)
    assert waiting.code == "ok"


def test_what_was_sent_before_the_hold_in_the_same_turn_comes_before_it() -> None:
    broker = Broker()
    broker.create()
    answer = broker.produce(broker.lease(), 0, [b"before"], turn=False)
    _, slice_of = held(broker)
    slice_of(b"one")
    assert answer.code == "ok" and broker.payloads() == [b"before", b"one"]


def test_an_effect_that_is_refused_ends_the_hold() -> None:
    broker = Broker()
    broker.create()
    producer = broker.lease()
    broker.produce(producer, 0)
    _, slice_of = held(broker)
    waiting = broker.produce(producer, 1)
    broker.disk.space_bytes = broker.disk.used_bytes()
    (refused,) = slice_of(bytes(1000))
    assert isinstance(refused, DiskFull) and waiting.code == "disk_full"
    broker.disk.space_bytes = None
    assert broker.produce(producer, 1).code == "ok"


def test_a_topic_that_goes_while_it_is_held_leaves_nobody_waiting() -> None:
    broker = Broker()
    broker.create()
    producer = broker.lease()
    broker.produce(producer, 0)
    partition, _ = held(broker)
    waiting = broker.produce(producer, 1)
    assert broker.delete().deleted
    assert waiting.code == "unknown_topic"
    unhold(broker, partition)


def test_a_hold_outlasts_a_roll_and_other_exclusive_work() -> None:
    broker = Broker(queued=True, log__segment_bytes=1 << 16)
    broker.create()
    producer = broker.lease()
    broker.produce(producer, 0, acks=ACKS_WRITTEN)
    broker.work()
    partition, slice_of = held(broker)
    waiting = broker.produce(producer, 1, [b"plain"], acks=ACKS_WRITTEN)
    told = [slice_of(bytes(25_000)) for _ in range(4)]
    partition.run_exclusively(lambda: None, lambda result, error: None)
    broker.work()
    assert told == [[None]] * 4 and waiting.code == "waiting"
    unhold(broker, partition)
    broker.work()
    assert waiting.code == "ok" and broker.payloads()[-1] == b"plain"
    assert broker.log().segment_count > 1


def test_a_partition_that_stops_while_it_is_held_answers_everybody() -> None:
    broker = Broker()
    broker.create()
    producer = broker.lease()
    broker.produce(producer, 0)
    _, slice_of = held(broker)
    waiting = broker.produce(producer, 1)
    broker.disk.faults.fail("write", path="orders-0")
    (refused,) = slice_of(b"one")
    assert isinstance(refused, StorageStopped) and refused.outcome == UNKNOWN
    assert waiting.code == "storage_stopped"


def test_effects_that_wait_while_it_is_resumed_are_refused_and_sends_go_on() -> None:
    """Recovery may cut away an earlier effect: a later place written first would bury it."""
    broker = Broker(queued=True)
    broker.create()
    producer = broker.lease()
    broker.produce(producer, 0)
    broker.work()
    partition, slice_of = held(broker)
    broker.disk.faults.fail("force", path="orders-0")
    assert slice_of(b"cut away") == [None]
    partition.request_fsync()
    broker.engine.end_turn()
    broker.work()
    assert partition.log.stopped is not None
    broker.disk.faults.clear()
    resumed: list[BaseException | None] = []
    partition.resume(lambda result, error: resumed.append(error))
    told = slice_of(b"too early")
    sent = broker.produce(producer, 1)
    assert (told, sent.code, resumed) == ([], "waiting", [])
    broker.work()
    assert isinstance(told[0], StorageStopped) and told[0].outcome == "not done"
    assert resumed == [None] and sent.code == "ok"
    assert slice_of(b"now") == [None]


def test_the_file_of_marks_says_all_that_is_forced_also_where_no_other_force_follows() -> None:
    broker = Broker()
    broker.create()
    log, producer = broker.log(), broker.lease()
    for sequence in range(5):
        broker.produce(producer, sequence)
    mark = LogCheckpointFile(broker.disk, log.folder, log.log_id)
    broker.advance(1.5)
    marks = mark.read()
    assert marks is not None and marks.durable == log.forced_offset == log.end_offset
    changes = broker.disk.read_file(mark.path)
    broker.advance(10)
    assert broker.disk.read_file(mark.path) == changes, "a partition at rest writes nothing"


def test_no_mark_is_written_for_a_topic_that_is_being_deleted() -> None:
    broker = Broker(queued=True)
    broker.create()
    broker.produce(broker.lease(), 0)
    broker.work()
    partition = broker.engine.broker.topics.partition("orders", broker.incarnation(), 0)
    before = broker.disk.read_file(join(partition.log.folder, log_checkpoint_name()))
    partition.close_for_deletion(lambda: None)
    broker.advance(3)
    broker.work()
    assert broker.disk.read_file(join(partition.log.folder, log_checkpoint_name())) == before
