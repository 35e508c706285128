"""The queue of a partition: order kept, size bounded, workers waited for."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from journal.filenames import join, log_checkpoint_name
from journal.log.checkpoint import LogCheckpointFile
from journal.record.batch import PLAIN, Batch, Source
from journal.record.block_trailer import SOURCE_DELAY, SOURCE_TRANSACTION, trailer_key
from journal.testing import SimulatedDisk
from tests.broker.helpers import Broker, batch
from tfmq.apply_target import Append, AppendResult
from tfmq.broker.partition import EffectAppend, Partition, PendingAppend, StagedAppends, tail_of
from tfmq.errors import UNKNOWN, DiskFull, StorageStopped
from tfmq.protocol.commands import ACKS_WRITTEN, ResumePartition

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
    broker.engine.broker.end_turn()
    assert [answer.code for answer in answers] == ["ok"] * 5
    assert len({answer.positions[0][1] for answer in answers}) == 5


def test_appends_fit_small_segments_and_a_batch_that_cannot_gets_a_segment_of_its_own() -> None:
    broker = Broker(log__segment_bytes=1 << 16)
    broker.create()
    producer = broker.lease()
    answers = [broker.produce(producer, n, [bytes(30_000)], turn=False) for n in range(6)]
    broker.engine.broker.end_turn()
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


def fail_once(patched: pytest.MonkeyPatch, owner: object, name: str) -> None:
    """Makes the next call of a method fail with MemoryError."""
    usual = getattr(owner, name)

    def fails(*_: object) -> None:
        patched.setattr(owner, name, usual)
        raise MemoryError

    patched.setattr(owner, name, fails)


def test_an_error_while_one_append_is_completed_keeps_no_other_from_being_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = Broker(limits__append_bytes=100_000)
    broker.create(partitions=2)
    failing, same, later, other = (broker.lease() for _ in range(4))
    partition = broker.engine.broker.topics.partition("orders", broker.incarnation(), 0)
    fail_once(monkeypatch, partition.producers, "record_batch")
    payload = [bytes(40_000)]
    failed = broker.produce(failing, 0, payload, turn=False)
    in_the_same_append = broker.produce(same, 0, payload, turn=False)
    in_the_next_append = broker.produce(later, 0, payload, turn=False)
    elsewhere = broker.produce(other, 0, payload, partition=1, turn=False)
    with pytest.raises(MemoryError):
        broker.engine.broker.end_turn()
    broker.advance(0)
    assert failed.code == "waiting", "the error is logged; the client asks again after a time"
    assert [each.code for each in (in_the_same_append, in_the_next_append, elsewhere)] == ["ok"] * 3
    assert broker.produce(same, 1).code == broker.produce(other, 1, partition=1).code == "ok"


@pytest.mark.parametrize("method", ["record_batch", "copy_bytes"])
def test_an_error_around_file_work_keeps_no_other_append_from_being_written(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = Broker(queued=True, log__segment_bytes=1 << 16)
    broker.create()
    producer, other = broker.lease(), broker.lease()
    for sequence in range(2):
        broker.produce(producer, sequence, [bytes(25_000)])
        broker.work()
    partition = broker.engine.broker.topics.partition("orders", broker.incarnation(), 0)
    copies = method == "copy_bytes"
    fail_once(monkeypatch, StagedAppends if copies else partition.producers, method)
    failed = broker.produce(producer, 2, [bytes(25_000)])
    waiting = broker.produce(other, 0, [bytes(25_000)])
    if copies:
        broker.work()
    else:
        with pytest.raises(MemoryError):
            broker.work()
    broker.advance(0)
    broker.work()
    assert (failed.code, waiting.code) == ("internal_error" if copies else "waiting", "ok")


# Holds


def held(broker: Broker) -> tuple[Partition, Callable[..., Told]]:
    """A partition that a large transaction holds, and how to apply its next slice."""
    partition = broker.engine.broker.topics.partition("orders", broker.incarnation(), 0)
    apply_target = broker.engine.broker.apply_target
    numbers = itertools.count(1)

    def slice_of(payload: bytes) -> Told:
        reported: Told = []
        number = next(numbers)
        records = Batch(batch(1 << 30, number, [payload]), (), 1 << 30, number, 1)
        source = Source(SOURCE_TRANSACTION, 5, 100, number)
        effect = Append("orders", broker.incarnation(), 0, [records], source)
        apply_target.apply(effect, lambda mark, error: reported.append(error))
        broker.engine.broker.end_turn()
        return reported

    apply_target.begin_exclusive(partition.log.log_id, (SOURCE_TRANSACTION, 5))
    return partition, slice_of


def unhold(broker: Broker, partition: Partition) -> None:
    broker.engine.broker.apply_target.end_exclusive(partition.log.log_id)
    broker.engine.broker.end_turn()


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
    reported: Told = []
    records = Batch(batch(1 << 31, number, [b"delayed %d" % number]), (), 1 << 31, number, 1)
    effect = Append("orders", broker.incarnation(), 0, [records], Source(SOURCE_DELAY, 6, number, 0))
    broker.engine.broker.apply_target.apply(effect, lambda mark, error: reported.append(error))
    broker.engine.broker.end_turn()
    return reported


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


def test_a_topic_that_is_deleted_while_it_is_held_leaves_no_request_waiting() -> None:
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
    reported = [slice_of(bytes(25_000)) for _ in range(4)]
    partition.run_exclusively(lambda: None, lambda result, error: None)
    broker.work()
    assert reported == [[None]] * 4 and waiting.code == "waiting"
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
    broker.engine.broker.end_turn()
    broker.work()
    assert partition.log.stopped is not None
    broker.disk.faults.clear()
    resumed: list[BaseException | None] = []
    partition.resume(lambda result, error: resumed.append(error))
    reported = slice_of(b"too early")
    sent = broker.produce(producer, 1)
    assert (reported, sent.code, resumed) == ([], "waiting", [])
    broker.work()
    assert isinstance(reported[0], StorageStopped) and reported[0].outcome == "not done"
    assert resumed == [None] and sent.code == "ok"
    assert slice_of(b"now") == [None]


def test_the_file_of_marks_says_all_that_is_fsynced_also_where_no_other_fsync_follows() -> None:
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


# Effects in a partition: each once by its source's place, many in one append, none past one that was refused.

JOURNAL = 5
PRODUCER = 1 << 30

ToldEffectWork = list[tuple[AppendResult | None, BaseException | None]]


@pytest.fixture
def broker() -> Broker:
    made = Broker()
    made.create()
    return made


def effect(
    broker: Broker, high: int, low: int = 1, payload: bytes = b"later", kind: int = SOURCE_TRANSACTION
) -> Append:
    records = Batch(batch(PRODUCER, high, [payload]), (), PRODUCER, high, 1)
    return Append("orders", broker.incarnation(), 0, [records], Source(kind, JOURNAL, high, low))


def apply(broker: Broker, *effects: Append, turn: bool = True) -> ToldEffectWork:
    reported: ToldEffectWork = []
    for each in effects:
        broker.engine.broker.apply_target.apply(each, lambda mark, error: reported.append((mark, error)))
    if turn:
        broker.engine.broker.end_turn()
    return reported


def writes_of(disk: SimulatedDisk, do: Callable[[], object]) -> int:
    """How many write calls `do` costs in the partition."""
    count = 0

    def after(kind: str, path: str) -> None:
        nonlocal count
        count += kind == "write" and "orders-0" in path

    disk.after = after
    do()
    disk.after = None
    return count


def test_an_effect_is_applied_once_by_its_source_s_position(broker: Broker) -> None:
    for kind in (SOURCE_DELAY, SOURCE_TRANSACTION):
        each = effect(broker, 100, kind=kind)
        (first,), (second,) = apply(broker, each), apply(broker, each)
        assert first[0] is not None and second[0] is not None
        assert (first[0].end, second[0].end) == (broker.log().end_offset,) * 2
        assert len(first[0].offsets) == 1 and second[0].offsets == ()
    assert broker.payloads() == [b"later"] * 2


def test_sixteen_small_transactions_of_a_turn_are_one_write(broker: Broker) -> None:
    apply(broker, effect(broker, 1))
    effects = [effect(broker, 10 + n, 3, b"%d" % n) for n in range(16)]
    before = broker.log().end_offset
    assert writes_of(broker.disk, lambda: apply(broker, *effects)) == 1
    assert broker.payloads() == [b"later", *(b"%d" % n for n in range(16))]
    assert broker.log().applied(SOURCE_TRANSACTION, JOURNAL) == (25, 3)
    assert broker.log().end_offset - before == sum(21 + (n > 9) for n in range(16)) + 100


def test_each_of_a_joined_append_gets_the_offsets_of_its_batches(broker: Broker) -> None:
    reported = apply(broker, effect(broker, 1, 1, b"a"), effect(broker, 2, 1, b"bb"), effect(broker, 3, 1, b"c"))
    assert [mark.offsets for mark, _ in reported if mark] == [[0], [21], [43]]
    assert len({mark.end for mark, _ in reported if mark}) == 1


def test_the_same_effect_twice_in_one_turn_is_there_once(broker: Broker) -> None:
    each = effect(broker, 7)
    reported = apply(broker, each, each, effect(broker, 8, payload=b"next"))
    assert [error for _, error in reported] == [None] * 3
    assert broker.payloads() == [b"later", b"next"]


def test_a_plain_send_keeps_its_place_between_effects_and_its_own_append(broker: Broker) -> None:
    producer = broker.lease()
    reported = apply(broker, effect(broker, 1, 1, b"a"), turn=False)
    sent = broker.produce(producer, 0, [b"plain"], turn=False)
    reported += apply(broker, effect(broker, 2, 1, b"b"))
    assert sent.code == "ok" and broker.payloads() == [b"a", b"plain", b"b"]
    broker.engine.broker.lock.release()
    again = broker.crashed(broker.disk)
    assert again.produce(producer, 0, [b"plain"]).repeated
    assert again.log().applied(SOURCE_TRANSACTION, JOURNAL) == (2, 1)


def test_producers_learn_nothing_from_effects(broker: Broker) -> None:
    producer = broker.lease()
    records = Batch(batch(producer, 0, [b"inside"]), (), producer, 0, 1)
    apply(broker, Append("orders", broker.incarnation(), 0, [records], Source(SOURCE_TRANSACTION, JOURNAL, 1, 1)))
    for each in (broker, broker.restart()):
        assert len(each.engine.broker.topics.partition("orders", each.incarnation(), 0).producers) == 0
        assert each.log().applied(SOURCE_TRANSACTION, JOURNAL) == (1, 1)


def test_none_passes_one_that_was_refused(broker: Broker) -> None:
    apply(broker, effect(broker, 1))
    large = effect(broker, 2, 1, bytes(9 << 20))
    broker.disk.space_bytes = broker.disk.used_bytes() + (1 << 20)
    reported = apply(broker, large, effect(broker, 3), effect(broker, 4, kind=SOURCE_DELAY))
    assert [getattr(error, "code", None) for _, error in reported] == ["disk_full", "disk_full", None]
    assert broker.log().applied(SOURCE_TRANSACTION, JOURNAL) == (1, 1)
    broker.disk.space_bytes = None
    reported = apply(broker, large, effect(broker, 3))
    assert [error for _, error in reported] == [None, None]
    assert broker.log().applied(SOURCE_TRANSACTION, JOURNAL) == (3, 1)


def test_effects_too_large_for_one_append_follow_in_the_same_turn() -> None:
    broker = Broker(limits__append_bytes=100_000)
    broker.create()
    apply(broker, effect(broker, 1))
    effects = [effect(broker, 10 + n, 1, bytes(40_000)) for n in range(5)]
    assert writes_of(broker.disk, lambda: apply(broker, *effects)) == 3
    assert broker.log().applied(SOURCE_TRANSACTION, JOURNAL) == (14, 1)


def test_a_spurious_trailer_header_between_two_effects_keeps_them_apart(broker: Broker) -> None:
    """Two harmless batches, of which one ends and the other begins like a block trailer of this very log."""
    apply(broker, effect(broker, 1))
    log = broker.log()
    mark = trailer_key(log.log_id)
    header = (80).to_bytes(4, "big") + b"????" + mark[:8]
    second = Batch(batch(PRODUCER, 3, [bytes(64)]), (), PRODUCER, 3, 1)
    assert second.data[:4] == mark[8:]
    effects = [
        effect(broker, 2, 1, header),
        Append("orders", broker.incarnation(), 0, [second], Source(SOURCE_TRANSACTION, JOURNAL, 3, 1)),
    ]
    assert writes_of(broker.disk, lambda: apply(broker, *effects)) == 2
    assert broker.payloads()[1:] == [header, bytes(64)]


def test_an_effect_that_waits_for_file_work_is_written_after_what_came_before() -> None:
    broker = Broker(queued=True, log__segment_bytes=1 << 16)
    broker.create()
    producer = broker.lease()
    broker.produce(producer, 0, [bytes(25_000)], acks=ACKS_WRITTEN)
    broker.work()
    broker.produce(producer, 1, [bytes(25_000)], acks=ACKS_WRITTEN)
    rolling = broker.produce(producer, 2, [bytes(25_000)], acks=ACKS_WRITTEN)
    reported = apply(broker, effect(broker, 1, 1, b"behind"))
    assert (rolling.code, reported) == ("waiting", [])
    broker.work()
    assert rolling.code == "ok" and reported[0][1] is None
    assert broker.payloads()[-1] == b"behind"


def test_what_a_stopped_partition_has_applied_is_not_called_done(broker: Broker) -> None:
    """It was written and not forced: no reader gets it, and a resumption may cut it away."""
    each = effect(broker, 1)
    apply(broker, each)
    broker.log().stop("a test stops it")
    ((mark, error),) = apply(broker, each)
    assert mark is None and getattr(error, "outcome", "") == "unknown"
    assert broker.ask(ResumePartition("orders", 0)).state == "open"
    assert apply(broker, each)[0][1] is None and broker.payloads() == [b"later"]


# What may share an append: the source decides, and the room.


def work(kind: int, id: int, high: int, payload: bytes = b"x") -> PendingAppend:
    records = Batch(batch(7, high, [payload]), (), 7, high, 1)
    return EffectAppend(Append("orders", 16, 0, [records], Source(kind, id, high, 1)), lambda mark, error: None)


def staged(*works: PendingAppend) -> StagedAppends:
    made = StagedAppends()
    for each in works:
        made.add(each, list(each._batches))  # type: ignore[attr-defined]
    return made


def test_only_effects_of_one_source_share_an_append() -> None:
    one = staged(work(SOURCE_TRANSACTION, 5, 1))
    assert one.accepts(work(SOURCE_TRANSACTION, 5, 2), 1000)
    assert not one.accepts(work(SOURCE_TRANSACTION, 6, 2), 1000)
    assert not one.accepts(work(SOURCE_DELAY, 5, 2), 1000)


def test_an_append_is_bounded() -> None:
    one = staged(work(SOURCE_TRANSACTION, 5, 1, bytes(50)))
    assert one.accepts(work(SOURCE_TRANSACTION, 5, 2, bytes(50)), 140)
    assert not one.accepts(work(SOURCE_TRANSACTION, 5, 2, bytes(50)), 139)


def test_the_last_one_s_place_stands_for_all() -> None:
    both = staged(work(SOURCE_TRANSACTION, 5, 1), work(SOURCE_TRANSACTION, 5, 9))
    assert both.source == Source(SOURCE_TRANSACTION, 5, 9, 1) != PLAIN


def test_the_end_of_a_batch_is_kept_for_the_seam() -> None:
    records = Batch(batch(7, 0, [b"0123456789" * 4]), (), 7, 0, 1)
    assert tail_of(records) == b"0123456789" * 2
    last = staged(work(SOURCE_TRANSACTION, 5, 1, b"x" * 40), work(SOURCE_TRANSACTION, 5, 2, b"y" * 40)).last_batch
    assert last is not None and tail_of(last) == b"y" * 20
