"""Effects in a partition: each once by its source's place, many in one append, none past one that was refused."""

from collections.abc import Callable

import pytest

from journal.record.batch import Batch, Source
from journal.record.block_trailer import SOURCE_DELAY, SOURCE_TRANSACTION, trailer_key
from journal.testing import SimulatedDisk
from tests.broker.helpers import Broker, batch
from tfmq.apply_target import Append, AppendResult
from tfmq.protocol.commands import ACKS_WRITTEN, ResumePartition

JOURNAL = 5
PRODUCER = 1 << 30

Told = list[tuple[AppendResult | None, BaseException | None]]


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


def apply(broker: Broker, *effects: Append, turn: bool = True) -> Told:
    told: Told = []
    for each in effects:
        broker.engine.broker.apply_target.apply(each, lambda mark, error: told.append((mark, error)))
    if turn:
        broker.engine.end_turn()
    return told


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


def test_each_of_a_joined_append_is_told_where_its_batches_lie(broker: Broker) -> None:
    told = apply(broker, effect(broker, 1, 1, b"a"), effect(broker, 2, 1, b"bb"), effect(broker, 3, 1, b"c"))
    assert [mark.offsets for mark, _ in told if mark] == [[0], [21], [43]]
    assert len({mark.end for mark, _ in told if mark}) == 1


def test_the_same_effect_twice_in_one_turn_is_there_once(broker: Broker) -> None:
    each = effect(broker, 7)
    told = apply(broker, each, each, effect(broker, 8, payload=b"next"))
    assert [error for _, error in told] == [None] * 3
    assert broker.payloads() == [b"later", b"next"]


def test_a_plain_send_keeps_its_place_between_effects_and_its_own_append(broker: Broker) -> None:
    producer = broker.lease()
    told = apply(broker, effect(broker, 1, 1, b"a"), turn=False)
    sent = broker.produce(producer, 0, [b"plain"], turn=False)
    told += apply(broker, effect(broker, 2, 1, b"b"))
    assert sent.code == "ok" and broker.payloads() == [b"a", b"plain", b"b"]
    broker.engine.broker.lock.release()
    again = broker.crashed(broker.disk)
    assert again.produce(producer, 0, [b"plain"]).repeated
    assert again.log().applied(SOURCE_TRANSACTION, JOURNAL) == (2, 1)


def test_producers_learn_nothing_from_effects(broker: Broker) -> None:
    producer = broker.lease()
    records = Batch(batch(producer, 0, [b"inside"]), (), producer, 0, 1)
    apply(
        broker,
        Append("orders", broker.incarnation(), 0, [records], Source(SOURCE_TRANSACTION, JOURNAL, 1, 1)),
    )
    for each in (broker, broker.restart()):
        assert len(each.engine.broker.topics.partition("orders", each.incarnation(), 0).producers) == 0
        assert each.log().applied(SOURCE_TRANSACTION, JOURNAL) == (1, 1)


def test_none_passes_one_that_was_refused(broker: Broker) -> None:
    apply(broker, effect(broker, 1))
    large = effect(broker, 2, 1, bytes(9 << 20))
    broker.disk.space_bytes = broker.disk.used_bytes() + (1 << 20)
    told = apply(broker, large, effect(broker, 3), effect(broker, 4, kind=SOURCE_DELAY))
    assert [getattr(error, "code", None) for _, error in told] == ["disk_full", "disk_full", None]
    assert broker.log().applied(SOURCE_TRANSACTION, JOURNAL) == (1, 1)
    broker.disk.space_bytes = None
    told = apply(broker, large, effect(broker, 3))
    assert [error for _, error in told] == [None, None]
    assert broker.log().applied(SOURCE_TRANSACTION, JOURNAL) == (3, 1)


def test_effects_too_large_for_one_append_follow_in_the_same_turn() -> None:
    broker = Broker(limits__append_bytes=100_000)
    broker.create()
    apply(broker, effect(broker, 1))
    effects = [effect(broker, 10 + n, 1, bytes(40_000)) for n in range(5)]
    assert writes_of(broker.disk, lambda: apply(broker, *effects)) == 3
    assert broker.log().applied(SOURCE_TRANSACTION, JOURNAL) == (14, 1)


def test_a_spurious_control_header_between_two_effects_keeps_them_apart(broker: Broker) -> None:
    """Two harmless batches, of which one ends and the other begins like a control record of this very log."""
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


def test_an_effect_that_waits_for_file_work_is_written_behind_what_came_before() -> None:
    broker = Broker(queued=True, log__segment_bytes=1 << 16)
    broker.create()
    producer = broker.lease()
    broker.produce(producer, 0, [bytes(25_000)], acks=ACKS_WRITTEN)
    broker.work()
    broker.produce(producer, 1, [bytes(25_000)], acks=ACKS_WRITTEN)
    rolling = broker.produce(producer, 2, [bytes(25_000)], acks=ACKS_WRITTEN)
    told = apply(broker, effect(broker, 1, 1, b"behind"))
    assert (rolling.code, told) == ("waiting", [])
    broker.work()
    assert rolling.code == "ok" and told[0][1] is None
    assert broker.payloads()[-1] == b"behind"


def test_what_a_stopped_partition_has_applied_is_not_called_done(broker: Broker) -> None:
    """It was written and not forced: nobody reads it there, and a resumption may cut it away."""
    each = effect(broker, 1)
    apply(broker, each)
    broker.log().stop("a test stops it")
    ((mark, error),) = apply(broker, each)
    assert mark is None and getattr(error, "outcome", "") == "unknown"
    assert broker.ask(ResumePartition("orders", 0)).state == "open"
    assert apply(broker, each)[0][1] is None and broker.payloads() == [b"later"]
