"""A send from request to answer: nothing is answered before the write and the force that the answer
promises.
"""

from typing import Any

import pytest

from journal.record.batch import split_blocks
from journal.record.format import make_id, make_record
from tests.broker.helpers import Broker, Session, batch, payloads_of
from tfmq.protocol.commands import ACKS_NONE, ACKS_REPLICATED, ACKS_SYNCED, ACKS_WRITTEN, Block, Produce


@pytest.fixture
def broker() -> Broker:
    made = Broker()
    made.create()
    return made


def queued(**values: Any) -> Broker:
    """A broker whose worker waits until the test runs it; the topic is there and its log has been opened for
    writes.
    """
    made = Broker(queued=True, **values)
    made.create()
    made.produce(made.lease(), 0, [b"first"])
    made.work()
    return made


def test_a_synced_send_is_answered_once_it_is_fsynced() -> None:
    broker = queued()
    producer = broker.lease()
    answer = broker.produce(producer, 0, [b"a", b"b"])
    assert answer.code == "waiting" and answer.released
    broker.step()
    assert answer.durability == ACKS_SYNCED and not answer.repeated
    assert broker.log().forced_offset == broker.log().end_offset


def test_a_written_send_is_answered_at_once_and_says_so() -> None:
    broker = queued()
    answer = broker.produce(broker.lease(), 0, acks=ACKS_WRITTEN)
    assert answer.durability == ACKS_WRITTEN
    assert broker.log().forced_offset < broker.log().end_offset


def test_what_arrives_in_one_turn_is_one_append(broker: Broker) -> None:
    producers = [broker.lease() for _ in range(5)]
    answers = [broker.produce(producer, 0, [b"x"], turn=False) for producer in producers]
    assert all(not answer.done for answer in answers)
    broker.engine.broker.end_turn()
    fetched = broker.fetch(0)
    assert len(payloads_of(fetched)) == 5
    assert len({answer.append_time for answer in answers}) == 1
    assert fetched.next == broker.log().end_offset == 5 * 21 + 100


def test_batches_of_one_producer_sequence_in_one_turn_follow_each_other(broker: Broker) -> None:
    producer = broker.lease()
    answers = [broker.produce(producer, n, [b"%d" % n], turn=False) for n in range(3)]
    broker.engine.broker.end_turn()
    assert [answer.first_ordinal for answer in answers] == [0, 1, 2]


def test_a_repeat_in_the_same_turn_gets_the_first_answer(broker: Broker) -> None:
    producer = broker.lease()
    first = broker.produce(producer, 0, turn=False)
    second = broker.produce(producer, 0, session=Session("another"), turn=False)
    broker.engine.broker.end_turn()
    assert (first.repeated, second.repeated) == (False, True)
    assert list(first.positions) == list(second.positions)
    assert broker.payloads() == [b"hello"]


def test_a_repeat_waits_for_the_durability_that_it_asks_for() -> None:
    broker = queued()
    producer = broker.lease()
    broker.produce(producer, 0, acks=ACKS_WRITTEN)
    repeat = broker.produce(producer, 0, acks=ACKS_SYNCED)
    assert repeat.code == "waiting"
    broker.work()
    assert repeat.repeated and repeat.durability == ACKS_SYNCED


def test_a_repeat_that_the_disk_does_not_show_may_have_happened(broker: Broker) -> None:
    producer = broker.lease()
    for number in range(3):
        broker.produce(producer, 2 * number, [b"x", b"y"], turn=False)
    broker.engine.broker.end_turn()
    again = Broker(broker.disk, broker.clock, start=False)
    broker.engine.broker.lock.release()
    again.engine.start()
    again.disk.faults.fail("read", path="orders-0/", times=None)
    repeat = again.produce(producer, 2, [b"x", b"y"])
    assert repeat.failure is not None and repeat.failure.outcome == "unknown"


def test_a_repeat_after_a_restart_is_found_inside_a_joined_block(broker: Broker) -> None:
    producer = broker.lease()
    answers = [broker.produce(producer, 2 * n, [b"x", b"y"], turn=False) for n in range(3)]
    broker.engine.broker.end_turn()
    again = Broker(broker.disk, broker.clock, start=False)
    broker.engine.broker.lock.release()
    again.engine.start()
    for number, answer in enumerate(answers):
        repeat = again.produce(producer, 2 * number, [b"x", b"y"])
        assert repeat.repeated
        assert [tuple(each) for each in repeat.positions] == [tuple(each) for each in answer.positions]


def test_a_gap_is_refused_and_acks_none_passes_it(broker: Broker) -> None:
    producer = broker.lease()
    broker.produce(producer, 0)
    gap = broker.produce(producer, 2)
    assert gap.code == "sequence_gap" and gap.failure is not None and gap.failure.outcome == "not done"
    assert broker.produce(producer, 2, acks=ACKS_NONE).code == "ok"


def test_a_gap_within_a_turn_is_refused(broker: Broker) -> None:
    producer = broker.lease()
    good, bad = broker.produce(producer, 0, turn=False), broker.produce(producer, 5, turn=False)
    broker.engine.broker.end_turn()
    assert (good.code, bad.code) == ("ok", "sequence_gap")


def test_an_id_that_was_never_leased_is_unknown(broker: Broker) -> None:
    answer = broker.produce(1 << 39, 0)
    assert answer.code == "unknown_producer" and answer.failure is not None and answer.failure.outcome == "unknown"


def test_a_bad_batch_is_an_error_to_its_sender_alone(broker: Broker) -> None:
    good, bad = broker.lease(2), 0
    bad = good + 1
    answer = broker.produce(good, 0, turn=False)
    request = Produce("orders", broker.incarnation(), 0, bad, 0, 1, ACKS_SYNCED, [])
    refused = broker.ask(request, batch(bad, 0, [b"x"])[:-1] + b"", turn=False)
    broker.engine.broker.end_turn()
    assert (answer.code, refused.code) == ("ok", "bad_request")
    assert broker.produce(bad, 0).code == "ok"


def test_a_failed_append_is_an_error_to_every_sender_in_it(broker: Broker) -> None:
    broker.produce(broker.lease(), 0)
    first, second = broker.lease(), broker.lease()
    broker.disk.faults.fail("write", path="orders-0")
    answers = [broker.produce(each, 0, turn=False) for each in (first, second)]
    broker.engine.broker.end_turn()
    assert [answer.code for answer in answers] == ["storage_stopped"] * 2
    assert all(answer.failure is not None and answer.failure.outcome == "unknown" for answer in answers)
    later = broker.produce(first, 0)
    assert later.code == "storage_stopped" and later.failure is not None and later.failure.outcome == "not done"


def test_an_item_15_append_failure_on_a_full_disk_goes_on_when_there_is_space(broker: Broker) -> None:
    producer = broker.lease()
    broker.produce(producer, 0, [b"before"])
    broker.disk.space_bytes = 1
    full = broker.produce(producer, 1, [b"lost"])
    assert full.code == "disk_full" and full.failure is not None and full.failure.retriable
    assert full.failure.outcome == "not done"
    broker.disk.space_bytes = None
    assert broker.produce(producer, 1, [b"after"]).code == "ok"
    assert broker.payloads() == [b"before", b"after"]


def test_a_failed_fsync_is_an_error_to_every_waiting_request_and_stops_the_partition() -> None:
    broker = queued()
    producer = broker.lease()
    answer = broker.produce(producer, 0)
    broker.disk.faults.fail("force", path="orders-0")
    broker.work()
    assert answer.code == "storage_stopped" and answer.failure is not None and answer.failure.outcome == "unknown"
    assert broker.produce(producer, 1).code == "storage_stopped"
    broker.work()


def test_no_more_waits_than_the_quota_and_then_it_goes_on() -> None:
    broker = queued(limits__pending_bytes=4000)
    producer = broker.lease()
    answers = [broker.produce(producer, n, [bytes(1000)]) for n in range(5)]
    assert [answer.code for answer in answers[-3:]] == ["busy"] * 3
    refused = answers[-1].failure
    assert refused is not None and refused.retriable and refused.outcome == "not done"
    broker.work()
    assert [answer.code for answer in answers[:2]] == ["ok", "ok"]
    assert broker.produce(producer, 2, [bytes(1000)]).code == "waiting"


def test_a_session_that_sends_more_than_the_disk_takes_is_paused() -> None:
    broker = queued(limits__pending_bytes_per_session=2000)
    producer, session = broker.lease(), Session()
    broker.produce(producer, 0, [bytes(1000)], session=session)
    broker.produce(producer, 1, [bytes(1000)], session=session)
    assert session.paused
    broker.work()
    assert not session.paused


def test_a_message_above_the_limit_is_refused_and_smaller_ones_in_a_large_batch_are_not() -> None:
    broker = Broker(limits__message_bytes=100_000, limits__fetch_bytes=1 << 20)
    broker.create()
    producer = broker.lease()
    large = broker.produce(producer, 0, [bytes(400_000)])
    assert large.code == "message_too_large" and large.failure is not None and large.failure.outcome == "not done"
    data = batch(producer, 0, [bytes(60_000)] * 8)
    request = Produce(
        "orders", broker.incarnation(), 0, producer, 0, 8, ACKS_SYNCED, [Block(*each) for each in split_blocks(data)]
    )
    assert broker.ask(request, data).code == "ok"


# Successors


def test_a_successor_closes_its_id_for_good_and_reports_the_last_sequence(broker: Broker) -> None:
    producer = broker.lease()
    broker.produce(producer, 0, [b"a", b"b"])
    answer = broker.succeed(producer)
    assert answer.last_sequence == 1 and answer.durability == ACKS_SYNCED
    stale = broker.produce(producer, 2)
    assert stale.code == "stale_producer"
    assert stale.failure is not None and stale.failure.details["successor"] == answer.successor_id
    assert broker.produce(answer.successor_id, 0).code == "ok"


def test_what_is_durable_is_reported_as_the_session_is_told_and_nothing_else_is(broker: Broker) -> None:
    """A broker that replicates synchronously says "replicated", to clients that know the word."""
    producer, session = broker.lease(), Session()
    session.synced_durability = ACKS_REPLICATED
    synced = broker.produce(producer, 0, [b"a"], session=session)
    assert synced.durability == ACKS_REPLICATED
    assert broker.produce(producer, 0, [b"a"], session=session).durability == ACKS_REPLICATED, "a repeat"
    assert broker.produce(producer, 1, [b"b"], acks=ACKS_WRITTEN, session=session).durability == ACKS_WRITTEN
    broker.session = session
    assert broker.succeed(producer).durability == ACKS_REPLICATED


def test_a_successor_s_answer_is_repeatable_also_after_a_crash(broker: Broker) -> None:
    producer = broker.lease()
    broker.produce(producer, 0, [b"a", b"b"])
    first = broker.succeed(producer)
    broker.produce(broker.lease(), 0)
    broker.engine.broker.lock.release()
    again = broker.crashed(broker.disk)
    assert again.succeed(producer).fields == first.fields


def test_a_successor_waits_for_the_fsync() -> None:
    broker = queued()
    answer = broker.succeed(broker.lease())
    assert answer.code == "waiting"
    broker.work()
    assert answer.last_sequence == -1


def test_an_id_that_never_sent_here_is_closed_too(broker: Broker) -> None:
    producer = broker.lease()
    assert broker.succeed(producer).last_sequence == -1
    assert broker.produce(producer, 0).code == "stale_producer"


def test_an_id_that_was_never_leased_has_no_successor(broker: Broker) -> None:
    assert broker.succeed(1 << 39).code == "unknown_producer"


def test_a_succession_is_decided_after_what_was_sent_before_it(broker: Broker) -> None:
    producer = broker.lease()
    sent = broker.produce(producer, 0, turn=False)
    answer = broker.succeed(producer)
    assert sent.code == "ok" and answer.last_sequence == 0


@pytest.mark.parametrize("kind", ["write", "force", "create", "force_folder", "rename"])
def test_every_request_gets_one_answer_whatever_the_disk_does(kind: str) -> None:
    for nth in range(1, 8):
        broker = queued(flush__messages=1, log__segment_bytes=1 << 16)
        producer = broker.lease()
        broker.disk.faults.fail(kind, nth=nth)
        answers = [broker.produce(producer, sequence, [bytes(20_000)], acks=sequence % 3) for sequence in range(8)]
        answers.append(broker.succeed(producer))
        broker.work()
        assert all(answer.done for answer in answers), f"{kind} failed at call {nth}"
        assert broker.engine.broker.backpressure.pending_bytes == 0


def test_a_message_above_the_limit_is_refused_and_one_at_the_limit_with_attributes_is_not() -> None:
    broker = Broker(limits__message_bytes=50_000)
    broker.create()
    producer = broker.lease()
    for payloads in ([bytes(50_001)], [bytes(90_000)], [b"small", bytes(50_001), b"small"]):
        refused = broker.produce(producer, 0, payloads)
        assert refused.code == "message_too_large" and "limits.message_bytes" in str(refused.failure)
        assert refused.failure.details["max_bytes"] == 50_000
    assert broker.produce(producer, 0, [bytes(50_000)]).code == "ok"
    assert broker.produce(producer, 1, [b"small"] * 5000).code == "ok"
    for payload, code in ((bytes(50_000), "ok"), (bytes(50_001), "message_too_large")):
        id = make_id(broker.lease(), 0)
        data = make_record(payload, id, attribute=bytes(10_000))
        asked = Produce("orders", broker.incarnation(), 0, id >> 24, 0, 1, ACKS_WRITTEN, [])
        assert broker.ask(asked, data).code == code
