"""The broker as effects see it: what takes them, what is gone, what is on the disk, whose offsets are whose."""

from collections.abc import Callable
from typing import Any

import pytest

from journal.errors import BadBatch
from journal.record.batch import Batch, Source
from journal.record.block_trailer import SOURCE_TRANSACTION
from journal.record.format import make_log_id
from tests.broker.helpers import Answer, Broker, Session, batch
from tfmq.apply_target import OFFSETS_KEY, Append, AppendResult, ApplyTarget
from tfmq.broker.apply_target import TRANSACTION_APPEND_BYTES, BrokerApplyTarget
from tfmq.errors import Busy, DiskFull, Fenced, NotAllowed, StorageStopped, UnknownTopic
from tfmq.protocol.commands import (
    CommitOffsets,
    DeleteTopic,
    GroupOffset,
    PartitionName,
    ReadOffsets,
    ResetGroup,
    ResumePartition,
    TransactionOffsets,
)

JOURNAL = 5
SOURCE = (SOURCE_TRANSACTION, JOURNAL)


@pytest.fixture
def broker() -> Broker:
    made = Broker()
    made.create()
    return made


def apply_target(broker: Broker) -> BrokerApplyTarget:
    return broker.engine.broker.apply_target


def key(broker: Broker, partition: int = 0) -> int:
    return make_log_id(broker.incarnation(), partition)


def append(broker: Broker, high: int = 1, incarnation: int | None = None) -> Append:
    records = Batch(batch(1 << 30, high, [b"x"]), (), 1 << 30, high, 1)
    source = Source(SOURCE_TRANSACTION, JOURNAL, high, 1)
    return Append("orders", incarnation or broker.incarnation(), 0, [records], source)


def apply(broker: Broker, effect: Append) -> tuple[AppendResult | None, BaseException | None]:
    reported: list[tuple[AppendResult | None, BaseException | None]] = []
    apply_target(broker).apply(effect, lambda mark, error: reported.append((mark, error)))
    broker.engine.broker.end_turn()
    (one,) = reported
    return one


def written(broker: Broker, high: int = 1) -> AppendResult:
    mark, error = apply(broker, append(broker, high))
    assert error is None and mark is not None
    return mark


def forced(broker: Broker, mark: AppendResult) -> list[BaseException | None]:
    reported: list[BaseException | None] = []
    apply_target(broker).fsync_to(mark, reported.append)
    broker.engine.broker.end_turn()
    return reported


def error_of(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def test_it_is_a_destination(broker: Broker) -> None:
    promised: ApplyTarget = apply_target(broker)
    assert promised.display_name(key(broker)) == "orders-0"


# Room and targets


def test_a_target_that_takes_writes_is_checked_without_a_word(broker: Broker) -> None:
    apply_target(broker).check_space(key(broker), 1000)
    apply_target(broker).check_space(OFFSETS_KEY, 1000)


def test_a_stopped_partition_is_refused_as_not_done(broker: Broker) -> None:
    broker.log().stop("a test stops it")
    error = error_of(lambda: apply_target(broker).check_space(key(broker), 1))
    assert isinstance(error, StorageStopped) and error.outcome == "not done"
    mark, failure = apply(broker, append(broker))
    assert mark is None and isinstance(failure, StorageStopped) and failure.outcome == "not done"


def test_what_is_reserved_is_not_given_to_others(broker: Broker) -> None:
    broker.disk.space_bytes = broker.disk.used_bytes() + 1000
    apply_target(broker).check_space(key(broker), 1000)
    apply_target(broker).reserve_bytes(400)
    assert isinstance(error_of(lambda: apply_target(broker).check_space(key(broker), 601)), DiskFull)
    apply_target(broker).check_space(key(broker), 600)
    apply_target(broker).release_bytes(400)
    apply_target(broker).check_space(key(broker), 1000)


def test_hazard_13_a_deleted_topic_stays_deleted_also_when_its_name_is_used_again(broker: Broker) -> None:
    old, mark = key(broker), written(broker)
    effect = append(broker, 2)
    broker.delete()
    broker.create()
    for restarted in (False, True):
        each = broker.restart() if restarted else broker
        to = apply_target(each)
        assert to.display_name(old) is None and to.last_applied(old, SOURCE) is None
        assert isinstance(error_of(lambda to=to: to.check_space(old, 1)), UnknownTopic)  # type: ignore[misc]
        assert isinstance(apply(each, effect)[1], UnknownTopic)
        assert to.is_durable(mark) and forced(each, mark) == [None]
        to.begin_exclusive(old, SOURCE)
        to.end_exclusive(old)
        assert each.payloads() == []


def test_an_effect_that_waits_in_a_deleted_topic_gets_the_error() -> None:
    broker = Broker(queued=True)
    broker.create()
    reported: list[Any] = []
    partition = broker.engine.broker.topics.partition("orders", broker.incarnation(), 0)
    partition.run_exclusively(lambda: None, lambda result, error: None)
    apply_target(broker).apply(append(broker), lambda mark, error: reported.append(error))
    broker.ask(DeleteTopic("orders"))
    broker.step(1)
    assert broker.engine.broker.topics.get("orders") is None
    broker.work()
    assert [type(each) for each in reported] == [UnknownTopic]


def test_a_partition_that_could_not_be_opened_is_stopped_and_not_gone() -> None:
    broker = Broker()
    broker.create()
    written(broker)
    broker.stop()
    broker.disk.faults.fail("open", path="orders-0", times=None)
    again = Broker(broker.disk, broker.clock)
    broker.disk.faults.clear()
    assert isinstance(again.engine.broker.topics.topic("orders").partitions[0], str)
    assert apply_target(again).display_name(key(again)) == "orders-0"
    assert isinstance(error_of(lambda: apply_target(again).check_space(key(again), 1)), StorageStopped)
    assert isinstance(apply(again, append(again, 2))[1], StorageStopped)
    assert not apply_target(again).is_durable(AppendResult(key(again), 0, ()))
    (closed,) = forced(again, AppendResult(key(again), 0, ()))
    assert isinstance(closed, StorageStopped) and closed.outcome == "not done"


def test_a_slice_is_half_a_segment_at_most_and_a_batch_that_fits_none_is_accepted() -> None:
    broker = Broker(log__segment_bytes=1 << 16)
    broker.create()
    broker.create("large", log__segment_bytes=1 << 30)
    to = apply_target(broker)
    assert to.append_bytes_max(key(broker)) == 1 << 15
    assert to.append_bytes_max(make_log_id(broker.incarnation("large"), 0)) == TRANSACTION_APPEND_BYTES
    partition = broker.engine.broker.topics.partition("orders", broker.incarnation(), 0)
    fits = Batch(batch(7, 0, [bytes(60_000)]), (), 7, 0, 1)
    to.check_batch(partition, fits)
    large = Batch(batch(7, 0, [bytes(70_000)]), (), 7, 0, 1)
    to.check_batch(partition, large)
    torn = fits._replace(data=fits.data[:-1])
    assert isinstance(error_of(lambda: to.check_batch(partition, torn)), BadBatch)


# What is on the disk


def test_a_mark_is_fsynced_when_its_append_is() -> None:
    broker = Broker(queued=True)
    broker.create()
    reported: list[Any] = []
    apply_target(broker).apply(append(broker), lambda mark, error: reported.append(mark))
    broker.engine.broker.end_turn()
    broker.work()
    (mark,) = reported
    assert not apply_target(broker).is_durable(mark)
    waiting = forced(broker, mark)
    assert waiting == []
    broker.work()
    assert waiting == [None] and apply_target(broker).is_durable(mark)


def test_a_failed_fsync_is_reported_and_leaves_the_mark_non_durable(broker: Broker) -> None:
    mark = written(broker)
    broker.disk.faults.fail("force", path="orders-0")
    (error,) = forced(broker, mark)
    assert isinstance(error, StorageStopped) and error.outcome == "unknown"
    assert not apply_target(broker).is_durable(mark)


def test_what_a_resumption_cut_away_is_reported_by_the_applied_place() -> None:
    broker = Broker()
    broker.create()
    forced(broker, written(broker, 1))
    mark = written(broker, 2)
    broker.disk.faults.fail("force", path="orders-0")
    forced(broker, mark)
    broker.disk.faults.clear()
    left = Broker(broker.disk.crash(keep="nothing"), broker.clock)
    assert apply_target(left).last_applied(key(left), SOURCE) == (1, 1)
    (lost,) = forced(left, mark)
    assert isinstance(lost, StorageStopped) and lost.outcome == "unknown"


def test_what_recovery_could_not_make_durable_on_a_full_disk_is_not_called_fsynced() -> None:
    """Recovery knows of an append that it had no room to write again: `applied` includes it, the disk may not."""
    broker = Broker()
    broker.create()
    forced(broker, written(broker, 1))
    written(broker, 2)
    disk = broker.disk.crash(keep="everything")
    disk.space_bytes = disk.used_bytes()
    again = Broker(disk, broker.clock)
    to = apply_target(again)
    assert again.log().waits_for_space
    mark, error = apply(again, append(again, 2))
    assert error is None and mark is not None
    assert not to.is_durable(mark) and isinstance(forced(again, mark)[0], DiskFull)
    assert to.last_applied(key(again), SOURCE) == (2, 1)
    # It was written again and forced all the same: what had no room is the mark.
    assert to.last_durable(key(again), SOURCE) == (2, 1)
    left = Broker(disk.crash(keep="nothing"), broker.clock)
    assert apply_target(left).last_applied(key(left), SOURCE) == (2, 1)


def test_of_what_a_stopped_partition_has_only_that_is_settled_which_is_on_the_disk(broker: Broker) -> None:
    forced(broker, written(broker, 1))
    to = apply_target(broker)
    assert (
        to.last_durable(key(broker), SOURCE) == (1, 1)
        and to.last_durable(key(broker), (SOURCE_TRANSACTION, 99)) is None
    )
    written(broker, 2)
    broker.log().stop("a test stops it")
    assert to.last_applied(key(broker), SOURCE) == (2, 1) and to.last_durable(key(broker), SOURCE) == (1, 1)
    broker.ask(ResumePartition("orders", 0))
    assert to.last_durable(key(broker), SOURCE) == (2, 1)
    assert to.last_durable(OFFSETS_KEY, SOURCE) is None
    broker.delete()
    assert to.last_durable(key_gone := make_log_id(999, 0), SOURCE) is None and to.display_name(key_gone) is None


# Offsets


def rows(broker: Broker, member: Answer, offset: int = 100, **changed: Any) -> list[TransactionOffsets]:
    offsets = [GroupOffset("orders", broker.incarnation(), 0, offset)]
    fields = {"group": "billing", "member": member.member, "generation": member.generation} | changed
    return [TransactionOffsets(offsets=offsets, **fields)]


def test_offsets_are_checked_against_the_generation_of_their_group(broker: Broker) -> None:
    member, to = broker.join(), apply_target(broker)
    (found,) = to.check_offsets(rows(broker, member), broker.session)
    assert (found.group, found.generation) == ("billing", member.generation)
    assert found.positions == [(broker.incarnation(), 0, 100, 0, -1)]
    old = rows(broker, member, generation=member.generation - 1)
    assert isinstance(error_of(lambda: to.check_offsets(old, broker.session)), Fenced)
    ignore_result = rows(broker, member, group="nobody")
    assert isinstance(error_of(lambda: to.check_offsets(ignore_result, broker.session)), Fenced)


def test_a_member_that_is_being_replaced_is_fenced_before_its_successor_is_answered() -> None:
    broker = Broker(queued=True)
    broker.create()
    session = Session()
    member = broker.join(session=session)
    broker.work()
    session.close()
    broker.advance(4)
    joining = broker.join()
    assert joining.code == "waiting"
    offered = rows(broker, member)
    assert isinstance(error_of(lambda: apply_target(broker).check_offsets(offered, session)), Fenced)


def test_offsets_of_topics_that_are_gone_are_left_out_and_too_many_refused() -> None:
    broker = Broker(limits__group_offsets=1)
    broker.create(partitions=2)
    member, to = broker.join(), apply_target(broker)
    offsets = [GroupOffset("orders", 999, 0, 5)]
    gone = [TransactionOffsets("billing", member.member, member.generation, offsets)]
    assert to.check_offsets(gone, broker.session) == []
    many = [GroupOffset("orders", broker.incarnation(), n, 5) for n in range(2)]
    request = [TransactionOffsets("billing", member.member, member.generation, many)]
    assert isinstance(error_of(lambda: to.check_offsets(request, broker.session)), NotAllowed)


def test_locked_offsets_are_busy_for_everybody_until_the_end(broker: Broker) -> None:
    broker.create("bills")
    member, to = broker.join(topics="orders bills"), apply_target(broker)
    broker.commit(member, 50)
    to.lock_offsets(7, "order-42", to.check_offsets(rows(broker, member), broker.session))
    read = broker.ask(ReadOffsets("billing", None))
    assert read.code == "busy" and "order-42" in str(read.failure)
    assert broker.commit(member, 200).code == "busy"
    here = [GroupOffset("orders", 0, 0, 0)]
    broker.session.close()
    broker.clock.advance(60)
    assert broker.ask(ResetGroup("billing", here)).code == "busy"
    assert isinstance(error_of(lambda: to.check_offsets(rows(broker, member), Session())), Busy)
    bills = [GroupOffset("bills", broker.incarnation("bills"), 0, 1)]
    elsewhere = CommitOffsets("billing", member.member, member.generation, bills)
    assert broker.ask(elsewhere, session=Session()).code == "ok"
    assert [row[0] for row in broker.ask(ReadOffsets("billing", [PartitionName("bills", 0)])).offsets] == ["bills"]
    to.unlock_offsets(7)
    assert broker.saved() == {("orders", 0): 50, ("bills", 0): 1}
    assert broker.ask(ResetGroup("billing", here)).code in ("ok", "not_allowed")
