"""The stream of delayed messages: its own ids, all topics and partitions in one sequence, whatever breaks."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.client.fake_broker import CUT, HOLD, LOSE, FakeBroker
from tests.client.fake_delays import NOW_MS
from tests.client.rig import SenderRig
from tfmq.client.send.batch import Delivery
from tfmq.client.send.delivery_time import StampedDueTime
from tfmq.errors import (
    Busy,
    DiskFull,
    NotSupported,
    SequenceGap,
    StorageStopped,
    TfmqError,
    TimedOut,
    UnknownProducer,
    UnknownTopic,
)
from tfmq.ids import SEQUENCES
from tfmq.protocol.commands import DUE_RELATIVE, DelayedBatch, LeaseProducerIds, Produce, SucceedProducer
from tfmq.protocol.delayed_handle import decode_due_times, parse_handle


@pytest.fixture
def rig() -> SenderRig:
    return SenderRig(batch_bytes=1)  # every message a batch


def produced(rig: SenderRig, delayed: bool = True) -> list[Produce]:
    requests = [each for each in rig.broker.requests if isinstance(each, Produce)]
    return [each for each in requests if (each.due is not None) == delayed]


def successions(rig: SenderRig) -> list[SucceedProducer]:
    return [each for each in rig.broker.requests if isinstance(each, SucceedProducer)]


def later(rig: SenderRig, payload: bytes, delay: float = 30, **fields: Any) -> Delivery:
    return rig.send(payload, delay=delay, **fields)


def test_a_delayed_message_waits_at_the_broker_and_has_a_handle(rig: SenderRig) -> None:
    delivery = later(rig, b"x")
    rig.settle(delivery)
    result = delivery.result()
    assert (result.topic, result.partition, result.offset, result.durability) == ("orders", 0, None, "synced")
    (waiting,) = rig.broker.waiting
    assert result.delayed == waiting.handle and parse_handle(result.delayed).due == NOW_MS + 30_000
    assert rig.broker.delayed_payloads() == [b"x"] and rig.broker.payloads("orders") == []


def test_a_moment_is_reported_as_it_is(rig: SenderRig) -> None:
    rig.settle(rig.send(b"x", deliver_at=1_800_000_000))
    assert list(decode_due_times(produced(rig)[0].due or b"")) == [1_800_000_000_000]


def test_plain_and_delayed_sends_have_ids_of_their_own(rig: SenderRig) -> None:
    rig.settle(*[later(rig, b"%d" % n) if n % 2 else rig.send(b"%d" % n) for n in range(10)])
    plain, delayed = produced(rig, False), produced(rig)
    assert {each.producer_id for each in plain}.isdisjoint(each.producer_id for each in delayed)
    assert [each.sequence for each in plain] == [each.sequence for each in delayed] == [0, 1, 2, 3, 4]
    assert rig.broker.payloads("orders") == [b"0", b"2", b"4", b"6", b"8"]
    assert rig.broker.delayed_payloads() == [b"1", b"3", b"5", b"7", b"9"]


def test_one_sequence_goes_over_all_topics_and_partitions() -> None:
    rig = SenderRig(FakeBroker(3), batch_bytes=1)
    deliveries = [later(rig, b"%d" % n, topic=("orders", "bills")[n % 2], partition=n % 3) for n in range(12)]
    rig.settle(*deliveries)
    assert [each.sequence for each in produced(rig)] == list(range(12))
    assert len({each.producer_id for each in produced(rig)}) == 1
    assert [d.result().partition for d in deliveries] == [n % 3 for n in range(12)]
    assert rig.broker.delayed_payloads("bills", 1) == [b"1", b"7"]


def test_messages_for_one_partition_share_a_batch_whatever_their_times() -> None:
    rig = SenderRig()
    deliveries = [later(rig, b"%d" % n, delay=n) for n in range(5)]
    plain = rig.send(b"plain")
    rig.settle(*deliveries, plain)
    (batch,) = produced(rig)
    assert batch.count == 5
    assert [parse_handle(d.result().delayed).due - NOW_MS for d in deliveries] == [1, 1000, 2000, 3000, 4000]
    assert [parse_handle(d.result().delayed).number for d in deliveries] == [0, 1, 2, 3, 4]


def test_messages_for_other_partitions_and_topics_never_share_a_batch() -> None:
    rig = SenderRig(FakeBroker(3), linger_ms=50)
    rig.settle(*[rig.send(b"known", topic=topic) for topic in ("orders", "bills")])
    targets = [(topic, partition) for topic in ("orders", "bills") for partition in range(3)] * 2
    deliveries = [
        later(rig, b"%d" % number, topic=topic, partition=partition)
        for number, (topic, partition) in enumerate(targets)
    ]
    rig.settle(*deliveries)
    for number, (topic, partition) in enumerate(targets[:6]):
        assert rig.broker.delayed_payloads(topic, partition) == [b"%d" % number, b"%d" % (number + 6)]
    assert [(d.result().topic, d.result().partition) for d in deliveries] == targets
    assert len(produced(rig)) == 6


def test_what_a_message_waited_in_the_client_is_taken_off_its_delay() -> None:
    rig = SenderRig(linger_ms=2000)
    rig.settle(rig.send(b"first"))
    later(rig, b"a")
    rig.advance(1.5)
    later(rig, b"b")
    rig.advance(1.0)
    (batch,) = produced(rig)
    delays = [due - DUE_RELATIVE for due in decode_due_times(batch.due or b"")]
    assert delays[0] == pytest.approx(28_000, abs=30) and delays[1] == pytest.approx(29_500, abs=30)


def test_what_it_waited_for_a_connection_is_taken_off_each_time_it_goes_out(rig: SenderRig) -> None:
    rig.settle(later(rig, b"first"))
    rig.broker.plan(Produce, CUT)
    rig.reachable = False
    delivery = later(rig, b"x")
    rig.advance(0.5)
    rig.reachable = True
    rig.advance(10)
    assert delivery.done()
    _, sent, again = produced(rig)
    assert decode_due_times(sent.due or b"")[0] == DUE_RELATIVE + 30_000
    assert DUE_RELATIVE + 20_000 < decode_due_times(again.due or b"")[0] < DUE_RELATIVE + 30_000
    assert sent._replace(due=b"") == again._replace(due=b"")


def test_a_lost_answer_doubles_nothing_and_the_first_handles_stay(rig: SenderRig) -> None:
    rig.broker.plan(Produce, LOSE, LOSE, None, LOSE)
    deliveries = [later(rig, b"%d" % n) for n in range(10)]
    rig.settle(*deliveries)
    assert rig.broker.delayed_payloads() == [b"%d" % n for n in range(10)]
    assert [d.result().delayed for d in deliveries] == [each.handle for each in rig.broker.waiting]


def test_a_repeat_that_is_too_old_to_have_handles_is_delivered_all_the_same(rig: SenderRig) -> None:
    rig.broker.remembers_answers = False
    rig.broker.plan(Produce, LOSE)
    delivery = later(rig, b"x")
    rig.settle(delivery)
    assert (delivery.result().delayed, delivery.result().durability) == (None, "synced")
    assert rig.broker.delayed_payloads() == [b"x"]


def test_an_answer_that_does_not_fit_the_batch_gives_no_handles(rig: SenderRig) -> None:
    real = rig.broker._answer

    def too_many(request: Produce, reported: DelayedBatch, repeated: bool) -> Any:
        return real(request, reported._replace(dues=bytes(16)), repeated)

    rig.broker._answer = too_many  # type: ignore[assignment, method-assign]
    delivery = later(rig, b"x")
    rig.settle(delivery)
    assert delivery.result().delayed is None


def test_a_refused_batch_fails_alone_and_the_rest_goes_on_under_a_successor(rig: SenderRig) -> None:
    rig.broker.plan(Produce, None, None, DiskFull())
    deliveries = [later(rig, b"%d" % n) for n in range(6)]
    rig.settle(*deliveries)
    assert rig.broker.delayed_payloads() == [b"0", b"1", b"3", b"4", b"5"]
    with pytest.raises(DiskFull):
        deliveries[2].result()
    assert [(each.topic, each.incarnation, each.partition) for each in successions(rig)] == [("", 0, 0)]
    assert deliveries[3].result().message_id == produced(rig)[-1].producer_id << 24


def test_a_busy_broker_is_asked_again_in_order(rig: SenderRig) -> None:
    rig.broker.plan(Produce, None, Busy(), None, None)
    rig.settle(*[later(rig, b"%d" % n) for n in range(6)])
    assert rig.broker.delayed_payloads() == [b"%d" % n for n in range(6)] and not successions(rig)


def test_the_last_sequence_settles_an_unknown_outcome(rig: SenderRig) -> None:
    rig.settle(later(rig, b"0"))
    rig.broker.plan(Produce, LOSE, SequenceGap(), SequenceGap())
    known, unknown = later(rig, b"1"), later(rig, b"2")
    rig.settle(known, unknown)
    assert rig.broker.delayed_payloads() == [b"0", b"1", b"2"]
    assert known.result().delayed is None and unknown.result().delayed is not None


def test_acknowledged_messages_that_a_crash_cut_away_are_reported(
    rig: SenderRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.settle(*[later(rig, b"%d" % n) for n in range(5)])
    (stream,) = rig.broker.delayed_streams
    del rig.broker.arrived[3:], rig.broker.waiting[3:]
    rig.broker.delayed_streams[stream] = 3
    rig.settle(later(rig, b"5"))
    assert rig.broker.delayed_payloads() == [b"0", b"1", b"2", b"5"] and rig.sender.lost_messages == 2
    assert "2 delayed messages were acknowledged as synced, and the broker does not have them" in caplog.text


def test_a_broker_that_forgot_the_id_leaves_the_outcome_open_only_where_it_is(rig: SenderRig) -> None:
    rig.settle(later(rig, b"0"))
    rig.broker.plan(Produce, LOSE, UnknownProducer(), UnknownProducer())
    rig.broker.plan(SucceedProducer, UnknownProducer())
    sent_twice = later(rig, b"1")
    rig.settle(sent_twice)
    assert isinstance(sent_twice.error(), UnknownProducer)
    rig.settle(later(rig, b"2"))
    assert rig.broker.delayed_payloads() == [b"0", b"1", b"2"]


def test_a_batch_never_straddles_the_last_sequence(rig: SenderRig) -> None:
    rig.settle(later(rig, b"0"))
    (key,) = rig.broker.delayed_streams
    rig.sender.delayed_sender.sequence = rig.broker.delayed_streams[key] = SEQUENCES - 2
    rig.settle(*[later(rig, b"%d" % n) for n in range(1, 6)])
    assert rig.broker.delayed_payloads() == [b"%d" % n for n in range(6)]
    assert [each.sequence for each in produced(rig)][-5:] == [SEQUENCES - 2, SEQUENCES - 1, 0, 1, 2]


def test_a_topic_that_is_gone_is_made_anew_for_what_was_for_it_and_nothing_else_waits(rig: SenderRig) -> None:
    rig.settle(later(rig, b"0"), later(rig, b"a", topic="bills"))
    rig.broker.delete("orders")
    moved = [later(rig, b"1"), later(rig, b"2"), later(rig, b"3")]
    others = [later(rig, b"%c" % letter, topic="bills") for letter in b"bcd"]
    plain = rig.send(b"p", topic="bills")
    rig.settle(*moved, *others, plain)
    assert all(each.result().delayed for each in moved)
    assert rig.broker.delayed_payloads("bills") == [b"a", b"b", b"c", b"d"]
    assert len(successions(rig)) == 1, "one hole, however many batches were for it"
    rig.settle(later(rig, b"4"))
    assert rig.broker.delayed_payloads("orders")[1:] == [b"1", b"2", b"3", b"4"]


@pytest.mark.long
def test_batches_for_a_gone_topic_make_one_hole_even_where_the_broker_sees_the_gap_first(rig: SenderRig) -> None:
    rig.settle(later(rig, b"0"), later(rig, b"a", topic="bills"))
    rig.broker.delete("orders")
    rig.broker.plan(Produce, UnknownTopic(), SequenceGap(), SequenceGap(), SequenceGap())
    moved = [later(rig, b"%d" % number) for number in range(1, 4)]
    other = later(rig, b"b", topic="bills")
    rig.settle(*moved, other)
    assert all(each.result().delayed for each in moved)
    assert rig.broker.delayed_payloads("bills") == [b"a", b"b"] and len(successions(rig)) == 1
    assert len([each for each in produced(rig) if each.topic == "orders"]) == 7, "each of them once again"


def test_what_gathers_for_a_topic_that_is_gone_goes_to_the_new_one() -> None:
    rig = SenderRig()
    rig.settle(later(rig, b"0"))
    rig.broker.delete("orders")
    lost = later(rig, b"1")
    rig.sender.expedite([lost[0]])
    gathering = later(rig, b"2")
    assert gathering[0] is not lost[0]
    rig.settle(lost, gathering)
    assert lost.result().delayed and gathering.result().delayed
    assert rig.broker.delayed_payloads() == [b"0", b"1", b"2"]


def test_what_was_sent_to_a_gone_topic_goes_before_what_is_queued_for_the_new_one(rig: SenderRig) -> None:
    rig.settle(later(rig, b"0"), rig.send(b"known"))
    rig.broker.delete("orders")
    rig.broker.plan(Produce, HOLD)
    refused = later(rig, b"1")
    rig.exchange()
    rig.settle(rig.send(b"a plain send is told first that the topic is gone"))
    queued = later(rig, b"2")
    rig.exchange()
    rig.broker.release()
    rig.settle(refused, queued)
    assert rig.broker.delayed_payloads() == [b"0", b"1", b"2"]


def test_what_waits_for_a_topic_to_be_known_is_delayed_too() -> None:
    rig = SenderRig(FakeBroker(4))
    deliveries = [later(rig, b"free"), later(rig, b"keyed", key="k"), later(rig, b"to 2", partition=2)]
    rig.settle(*deliveries, rig.send(b"plain"))
    assert sorted(rig.broker.delayed_payloads()) == [b"free", b"keyed", b"to 2"]
    assert rig.broker.delayed_payloads(partition=2)[-1] == b"to 2"
    assert all(each.result().delayed for each in deliveries)


def test_a_missing_topic_refuses_open_batches_of_both_kinds() -> None:
    rig = SenderRig()
    rig.broker.auto_create = False
    both = [later(rig, b"later"), rig.send(b"now")]
    rig.settle(*both)
    assert all(isinstance(each.error(), UnknownTopic) for each in both) and not rig.sender.outstanding


def test_who_waits_is_not_kept_waiting_by_other_partitions() -> None:
    rig = SenderRig(FakeBroker(3), linger_ms=60_000)
    rig.settle(later(rig, b"first", partition=0))
    rig.broker.plan(Produce, HOLD)
    held = later(rig, b"held", partition=0)
    rig.sender.expedite([held[0]])
    rig.exchange()
    waited = [later(rig, b"%d" % n, partition=n) for n in (1, 2)]
    rig.sender.expedite([each[0] for each in waited])
    rig.exchange()
    assert not any(each.done() for each in waited)
    rig.broker.release()
    rig.exchange()
    assert all(each.done() for each in waited), "both went with the answer, not one after the other"


def test_many_at_once_are_batches_of_one_due_each() -> None:
    rig = SenderRig(batch_bytes=1000)
    rig.settle(rig.send(b"known"))
    batch = rig.sender.append_many("orders", [b"x"] * 10, 10, StampedDueTime(DUE_RELATIVE | 5000, rig.time))
    rig.settle(Delivery((batch, 0)))
    (request,) = produced(rig)
    assert request.count == 10 and set(decode_due_times(request.due or b"")) == {DUE_RELATIVE + 5000}
    handles = batch.result_of(2, 3).delayed
    assert [parse_handle(each).number for each in handles] == [2, 3, 4]
    assert batch.result_of(0, 1).delayed == [batch.result_of(0).delayed], "a sequence even of one"


def test_without_acknowledgements_there_is_no_handle() -> None:
    rig = SenderRig(acks=0)
    delivery = later(rig, b"x")
    rig.settle(delivery)
    assert (delivery.result().durability, delivery.result().delayed) == ("none", None)
    assert rig.broker.delayed_payloads() == [b"x"]


def test_an_older_broker_says_that_it_cannot(rig: SenderRig) -> None:
    rig.broker.plan(Produce, NotSupported("This release of the broker has no delayed delivery yet."))
    delivery = later(rig, b"x")
    rig.settle(delivery)
    with pytest.raises(NotSupported):
        delivery.result()


def test_ids_that_cannot_be_leased_fail_what_waits_for_them(rig: SenderRig) -> None:
    rig.broker.plan(LeaseProducerIds, StorageStopped("no", outcome="not done"))
    delivery = later(rig, b"x")
    rig.settle(delivery)
    assert isinstance(delivery.error(), StorageStopped)
    rig.settle(later(rig, b"y"))
    assert rig.broker.delayed_payloads() == [b"y"]


def test_a_batch_in_flight_too_long_times_out_and_the_next_ones_go_on() -> None:
    rig = SenderRig(batch_bytes=1, timeout=2.0)
    rig.settle(later(rig, b"0"))
    rig.broker.plan(Produce, HOLD)
    late = later(rig, b"1")
    rig.advance(3)
    with pytest.raises(TimedOut) as caught:
        late.result()
    assert caught.value.outcome == "unknown"
    rig.broker.held.clear()
    rig.settle(later(rig, b"2"))
    assert rig.broker.delayed_payloads() == [b"0", b"1", b"2"]


ACTIONS = st.lists(st.sampled_from([None, None, LOSE, CUT, "busy", "full", "gone"]), max_size=25)
KINDS = st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.booleans()), min_size=1, max_size=40)


_DELAYED_AFTER_DELETION = [(True, 0, True), (False, 1, True), (True, 0, True)]
"""The plain send finds the topic deleted while the first delayed message is in an open batch."""


@given(actions=ACTIONS, sends=KINDS, burst=st.integers(1, 8), deleted=st.none() | st.integers(0, 39))
@example(
    actions=[None, None, LOSE, "gone"],
    sends=[(False, 0, True), *[(False, 1, True)] * 4, *_DELAYED_AFTER_DELETION],
    burst=1,
    deleted=1,
)
def test_plain_and_delayed_sends_of_one_producer_never_trip_the_sequence_rule_whatever_breaks(
    actions: list[str | None], sends: list[tuple[bool, int, bool]], burst: int, deleted: int | None
) -> None:
    rig = SenderRig(FakeBroker(3), batch_bytes=150)
    errors: dict[str, type[TfmqError]] = {"busy": Busy, "full": DiskFull, "gone": UnknownTopic}
    rig.broker.plan(Produce, *[errors[a]() if a in errors else a for a in actions])
    sent: dict[bytes, tuple[str, Delivery]] = {}
    for index, (delayed, partition, other) in enumerate(sends):
        payload, topic = b"%06d" % index, "bills" if other else "orders"
        fields = {"delay": float(partition * index)} if delayed else {}
        sent[payload] = (topic, rig.send(payload, topic, partition=partition, **fields))
        if index == deleted and "bills" in rig.broker.incarnations:
            rig.broker.delete("bills")
        if index % burst == 0:
            rig.exchange()
    rig.flush()
    rig.exchange()
    assert not rig.sender.outstanding and not rig.sender.used_bytes
    for topic in ("orders", "bills"):
        for number in range(3):
            waits = rig.broker.delayed_payloads(topic, number)
            for each in (waits, rig.broker.payloads(topic, number)):
                assert each == sorted(set(each)), "once, and in order"
            here = {
                payload: delivery for payload, (name, delivery) in sent.items()
                if name == topic and delivery[0].partition == number
            }  # fmt: skip
            there = set(waits) | set(rig.broker.payloads(topic, number))
            for payload, delivery in here.items():
                error = delivery[0].error
                if error is None:
                    plain_and_deleted = topic == "bills" and deleted is not None and delivery[0].due_times is None
                    assert payload in there or plain_and_deleted
                elif error.outcome == "not done":
                    assert payload not in there
    reported = {d.result().delayed for _, d in sent.values() if not d[0].error and d.result().delayed is not None}
    assert reported <= {each.handle for each in rig.broker.waiting}
