"""The stream rule from the sender's side. Whatever breaks: what was acknowledged is stored once, in order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.client.fake_broker import CUT, HOLD, LOSE, FakeBroker
from tests.client.rig import SenderRig
from tfmq.client.send.batch import Delivery
from tfmq.errors import (
    Busy,
    ConnectionFailed,
    DiskFull,
    SequenceGap,
    StorageStopped,
    TfmqError,
    TimedOut,
    UnknownProducer,
    UnknownTopic,
)
from tfmq.ids import SEQUENCES
from tfmq.protocol.commands import ACKS_SYNCED, ACKS_WRITTEN, LeaseProducerIds, Metadata, Produce, SucceedProducer


@pytest.fixture
def rig() -> SenderRig:
    return SenderRig(batch_bytes=1)  # every message a batch


def produced(rig: SenderRig) -> list[Produce]:
    return [each for each in rig.broker.requests if isinstance(each, Produce)]


def test_batches_are_numbered_without_a_gap(rig: SenderRig) -> None:
    rig.settle(*[rig.send(b"%d" % n) for n in range(50)])
    assert [each.sequence for each in produced(rig)] == list(range(50))
    assert rig.broker.payloads("orders") == [b"%d" % n for n in range(50)]


def test_a_lost_answer_doubles_nothing(rig: SenderRig) -> None:
    rig.broker.plan(Produce, LOSE, LOSE, None, LOSE)
    deliveries = [rig.send(b"%d" % n) for n in range(10)]
    rig.settle(*deliveries)
    assert rig.broker.payloads("orders") == [b"%d" % n for n in range(10)]
    assert [d.result().offset for d in deliveries] == [batch.offset for batch in rig.broker.logs["orders", 0]]


def test_one_line_says_what_a_send_waits_for_once_it_waits_for_long(
    rig: SenderRig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tfmq.client")
    rig.broker.plan(Produce, *[Busy("Too much waits.")] * 4)  # for 0.75 s together
    rig.settle(rig.send(b"soon"))
    assert caplog.messages == []
    for _ in range(2):
        rig.broker.plan(Produce, *[Busy("Too much waits.")] * 12)
        rig.settle(rig.send(b"later"))
    said = [each for each in caplog.messages if "Too much waits" in each]
    assert len(said) == len(caplog.messages) == 2, "once for each time"
    assert said[0].startswith("Waiting up to ") and "for room for messages to orders/0" in said[0]


def test_what_is_sent_again_has_the_same_bytes(rig: SenderRig) -> None:
    rig.broker.plan(Produce, CUT)
    rig.settle(rig.send(b"same"))
    first, second = produced(rig)
    assert first == second


def test_a_busy_broker_is_asked_again_in_order(rig: SenderRig) -> None:
    rig.broker.plan(Produce, None, Busy(), None, None)
    deliveries = [rig.send(b"%d" % n) for n in range(6)]
    rig.settle(*deliveries)
    assert rig.broker.payloads("orders") == [b"%d" % n for n in range(6)]
    assert not [each for each in rig.broker.requests if isinstance(each, SucceedProducer)]


def test_a_send_waits_as_long_as_the_broker_asks_for_and_the_order_is_kept(rig: SenderRig) -> None:
    rig.settle(rig.send(b"first"))
    rig.broker.plan(Produce, Busy(wait_ms=3000), None, Busy(wait_ms=4000))
    deliveries = [rig.send(b"%d" % n) for n in range(6)]
    rig.exchange()
    count = len(produced(rig))
    rig.advance(3.9)
    assert len(produced(rig)) == count
    rig.advance(0.2)
    rig.settle(*deliveries)
    assert rig.broker.payloads("orders") == [b"first", *(b"%d" % n for n in range(6))]


def test_a_send_fails_in_its_time_if_the_broker_asks_for_more() -> None:
    rig = SenderRig(batch_bytes=1, timeout=2.0)
    rig.settle(rig.send(b"0"))
    rig.broker.plan(Produce, Busy("The quota is used up.", wait_ms=30_000))
    late = rig.send(b"1")
    rig.advance(2.1)
    error = late.error()
    assert isinstance(error, Busy) and "quota" in str(error) and error.outcome == "not done"
    rig.settle(rig.send(b"2"))
    assert rig.broker.payloads("orders") == [b"0", b"2"]


def test_a_broker_that_stays_busy_says_so_in_the_end_and_nothing_was_done() -> None:
    rig = SenderRig(batch_bytes=1, timeout=2.0)
    rig.settle(rig.send(b"0"))
    rig.broker.plan(Produce, *[Busy("Too much waits.")] * 50)
    late = [rig.send(b"1"), rig.send(b"2")]
    rig.advance(4)
    for each in late:
        error = each.error()
        assert isinstance(error, Busy) and "Too much waits" in str(error) and error.outcome == "not done"
    rig.broker.plans[Produce].clear()
    rig.settle(rig.send(b"3"))
    assert rig.broker.payloads("orders") == [b"0", b"3"] and not rig.broker.closed_ids


def test_a_busy_broker_that_may_have_an_earlier_sending_is_asked_until_it_reports() -> None:
    rig = SenderRig(batch_bytes=1, timeout=2.0)
    rig.settle(rig.send(b"0"))
    rig.broker.plan(Produce, LOSE, *[Busy()] * 50)
    stored = rig.send(b"1")
    rig.advance(1)
    rig.broker.plans[Produce].clear()
    rig.settle(stored)
    assert rig.broker.payloads("orders") == [b"0", b"1"]
    rig.broker.plan(Produce, LOSE, *[Busy()] * 50)
    unknown_outcome = rig.send(b"2")
    rig.advance(4)
    assert (error := unknown_outcome.error()) is not None and error.outcome == "unknown"
    rig.broker.plans[Produce].clear()
    rig.settle(rig.send(b"3"))
    assert rig.broker.payloads("orders") == [b"0", b"1", b"2", b"3"]


def test_a_refused_batch_fails_alone_and_the_rest_goes_on_under_a_successor(rig: SenderRig) -> None:
    rig.broker.plan(Produce, None, None, DiskFull())
    deliveries = [rig.send(b"%d" % n) for n in range(6)]
    rig.settle(*deliveries)
    assert rig.broker.payloads("orders") == [b"0", b"1", b"3", b"4", b"5"]
    with pytest.raises(DiskFull):
        deliveries[2].result()
    old, new = produced(rig)[0].producer_id, produced(rig)[-1].producer_id
    assert rig.broker.closed_ids == {old: new}
    assert deliveries[3].result().message_id == new << 24


def test_a_refusal_before_anything_was_stored_needs_no_successor(rig: SenderRig) -> None:
    rig.broker.plan(Produce, StorageStopped("stopped", outcome="not done"))
    deliveries = [rig.send(b"%d" % n) for n in range(3)]
    rig.settle(*deliveries)
    assert rig.broker.payloads("orders") == [b"1", b"2"]
    assert rig.broker.closed_ids == {}


def test_the_last_sequence_settles_an_unknown_outcome(rig: SenderRig) -> None:
    """The answer of the second is lost, and so is the broker's memory of first answers: only the sequence decides."""
    rig.settle(rig.send(b"0"))
    rig.broker.plan(Produce, LOSE, SequenceGap(), SequenceGap())
    known, unknown = rig.send(b"1"), rig.send(b"2")
    rig.settle(known, unknown)
    assert rig.broker.payloads("orders") == [b"0", b"1", b"2"]
    assert known.result().offset is None
    assert unknown.result().offset is not None


@pytest.mark.parametrize(
    ("acks", "promised"),
    [
        (ACKS_SYNCED, "were acknowledged as synced, and the broker does not have them any more: ids from"),
        (ACKS_WRITTEN, "were acknowledged as written and lost in a crash of the broker: ids from"),
    ],
)
def test_acknowledged_messages_that_a_crash_cut_away_are_reported(
    caplog: pytest.LogCaptureFixture, acks: int, promised: str
) -> None:
    rig = SenderRig(batch_bytes=1, acks=acks)
    rig.settle(*[rig.send(b"%d" % n) for n in range(5)])
    del rig.broker.logs["orders", 0][3:]
    stream = next(iter(rig.broker.streams))
    rig.broker.streams[stream] = 3
    after = rig.send(b"5")
    rig.settle(after)
    assert rig.broker.payloads("orders") == [b"0", b"1", b"2", b"5"]
    assert rig.sender.lost_messages == 2
    assert f"2 messages to orders/0 {promised}" in caplog.text and caplog.text.count("ids from") == 1


def test_a_broker_that_forgot_the_id_leaves_the_outcome_open_only_where_it_is(rig: SenderRig) -> None:
    rig.settle(rig.send(b"0"))
    rig.broker.plan(Produce, LOSE, UnknownProducer(), UnknownProducer())
    rig.broker.plan(SucceedProducer, UnknownProducer())
    sent_twice = rig.send(b"1")
    rig.settle(sent_twice)
    assert isinstance(sent_twice.error(), UnknownProducer)
    after = rig.send(b"2")
    rig.settle(after)
    assert rig.broker.payloads("orders") == [b"0", b"1", b"2"]


def test_what_a_forgetful_broker_refused_at_once_goes_under_a_new_id(rig: SenderRig) -> None:
    rig.settle(rig.send(b"0"))
    rig.broker.plan(Produce, UnknownProducer())
    rig.broker.plan(SucceedProducer, UnknownProducer())
    refused = rig.send(b"1")
    rig.settle(refused)
    assert refused.result().offset is not None
    assert rig.broker.payloads("orders") == [b"0", b"1"]


def test_a_batch_in_flight_too_long_times_out_and_the_next_ones_go_on(rig: SenderRig) -> None:
    rig = SenderRig(batch_bytes=1, timeout=2.0)
    rig.settle(rig.send(b"0"))
    rig.broker.plan(Produce, HOLD)
    late = rig.send(b"1")
    rig.advance(3)
    with pytest.raises(TimedOut) as caught:
        late.result()
    assert caught.value.outcome == "unknown"
    rig.broker.held.clear()
    after = rig.send(b"2")
    rig.settle(after)
    assert rig.broker.payloads("orders") == [b"0", b"1", b"2"]
    assert len(rig.broker.closed_ids) == 1


def test_what_could_not_be_sent_in_time_was_not_done(rig: SenderRig) -> None:
    rig = SenderRig(batch_bytes=1, timeout=2.0)
    rig.settle(rig.send(b"0"))
    rig.reachable = False
    rig.cut()
    late = rig.send(b"1")
    rig.advance(3)
    assert isinstance(late.error(), ConnectionFailed)
    rig.reachable = True
    after = rig.send(b"2")
    rig.settle(after)
    assert rig.broker.payloads("orders")[0] == b"0" and rig.broker.payloads("orders")[-1] == b"2"


def test_a_deleted_topic_is_made_anew_for_what_was_on_its_way_in_order(rig: SenderRig) -> None:
    rig.settle(rig.send(b"0"))
    rig.broker.delete("orders")
    sent = []
    for number in range(1, 6):
        sent.append(rig.send(b"%d" % number))
        rig.sender.expedite([sent[-1][0]])
    gathering = rig.send(b"6")
    rig.settle(*sent, gathering)
    assert [each.result().offset is not None for each in sent] == [True] * 5
    assert rig.broker.payloads("orders") == [b"%d" % number for number in range(1, 7)]
    assert not rig.sender.outstanding and rig.sender.used_bytes == 0


def test_a_batch_that_may_be_stored_in_the_deleted_topic_is_not_sent_to_the_new_one(rig: SenderRig) -> None:
    rig.settle(rig.send(b"0"))
    rig.broker.plan(Produce, LOSE, UnknownTopic())
    doubtful = rig.send(b"1")
    rig.settle(doubtful)
    error = doubtful.error()
    assert isinstance(error, UnknownTopic) and error.outcome == "unknown"
    assert rig.broker.payloads("orders") == [b"0", b"1"], "it was stored once, and is not sent again"


@pytest.mark.parametrize(("acks", "promised"), [(ACKS_SYNCED, "synced"), (ACKS_WRITTEN, "written")])
def test_acknowledged_messages_that_are_gone_with_their_topic_are_logged_with_the_next_send(
    caplog: pytest.LogCaptureFixture, acks: int, promised: str
) -> None:
    """The broker may have started an older copy of its folder, from before the topic."""
    rig = SenderRig(acks=acks)
    rig.settle(rig.send(b"0"), rig.send(b"1"))
    rig.broker.delete("orders")
    after = rig.send(b"2")
    rig.settle(after)
    assert after.error() is None and rig.broker.payloads("orders") == [b"2"]
    (line,) = [each.getMessage() for each in caplog.records if "gone with it" in each.getMessage()]
    assert "orders was deleted, or an older copy" in line
    assert f"2 messages that were acknowledged as {promised} in partition 0" in line


def test_a_topic_that_is_not_made_anew_fails_what_was_on_its_way(rig: SenderRig) -> None:
    rig.settle(rig.send(b"0"))
    rig.broker.delete("orders")
    rig.broker.auto_create = False
    lost = rig.send(b"1")
    rig.settle(lost)
    error = lost.error()
    assert isinstance(error, UnknownTopic) and error.outcome == "not done"


def test_a_topic_that_is_made_anew_with_other_partitions_takes_none_of_it(rig: SenderRig) -> None:
    """Its keys would be in other partitions than those of what comes."""
    rig.settle(rig.send(b"0", key=b"k"))
    rig.broker.delete("orders")
    rig.broker.partitions += 1
    lost = rig.send(b"1", key=b"k")
    rig.settle(lost)
    error = lost.error()
    assert isinstance(error, UnknownTopic) and error.outcome == "not done" and "another number" in str(error)


def test_a_topic_that_is_deleted_again_and_again_is_given_up(rig: SenderRig) -> None:
    rig.settle(rig.send(b"0"))
    rig.broker.plan(Produce, UnknownTopic(), UnknownTopic(), UnknownTopic())
    lost = rig.send(b"1")
    rig.settle(lost)
    assert isinstance(lost.error(), UnknownTopic)
    assert len([each for each in rig.broker.requests if isinstance(each, Produce)]) == 3


def test_a_batch_never_straddles_the_last_sequence(rig: SenderRig) -> None:
    rig.settle(rig.send(b"0"))
    stream = rig.sender.partition_senders["orders", 0]
    key = next(iter(rig.broker.streams))
    stream.sequence = rig.broker.streams[key] = SEQUENCES - 2
    deliveries = [rig.send(b"%d" % n) for n in range(1, 6)]
    rig.settle(*deliveries)
    assert rig.broker.payloads("orders") == [b"%d" % n for n in range(6)]
    assert [each.sequence for each in produced(rig)][-5:] == [SEQUENCES - 2, SEQUENCES - 1, 0, 1, 2]


def test_no_more_is_in_flight_than_the_broker_remembers() -> None:
    rig = SenderRig(FakeBroker(limits={"batches_remembered": 8}), batch_bytes=1)
    rig.settle(rig.send(b"first"))
    rig.broker.plan(Produce, *[HOLD] * 100)
    for number in range(20):
        rig.send(b"%d" % number)
    rig.exchange()
    assert len(rig.broker.held) == 4


def test_without_acknowledgements_the_write_is_the_end_of_it() -> None:
    rig = SenderRig(acks=0)
    delivery = rig.send(b"x")
    rig.settle(delivery)
    result = delivery.result()
    assert (result.durability, result.offset) == ("none", None)
    assert rig.broker.payloads("orders") == [b"x"]


def test_ids_that_cannot_be_leased_fail_what_waits_for_them(rig: SenderRig) -> None:
    rig.broker.plan(LeaseProducerIds, StorageStopped("no", outcome="not done"))
    delivery = rig.send(b"x")
    rig.settle(delivery)
    assert isinstance(delivery.error(), StorageStopped)
    rig.settle(rig.send(b"y"))
    assert rig.broker.payloads("orders") == [b"y"]


ACTIONS = st.lists(st.sampled_from([None, None, LOSE, CUT, "busy", "full"]), max_size=25)


@given(actions=ACTIONS, counts=st.lists(st.integers(1, 5), min_size=1, max_size=12), partitions=st.integers(1, 3))
def test_whatever_breaks_acknowledged_messages_are_there_once_and_in_order(
    actions: list[str | None], counts: list[int], partitions: int
) -> None:
    rig = SenderRig(FakeBroker(partitions), batch_bytes=150)
    errors: dict[str, type[TfmqError]] = {"busy": Busy, "full": DiskFull}
    rig.broker.plan(Produce, *[errors[a]() if a in errors else a for a in actions])
    sent: dict[bytes, Delivery] = {}
    for burst in counts:
        for _ in range(burst):
            payload = b"%06d" % len(sent)
            sent[payload] = rig.send(payload, partition=len(sent) % partitions)
        rig.exchange()
    rig.flush()
    for number in range(partitions):
        stored = rig.broker.payloads("orders", number)
        assert stored == sorted(set(stored))
        acknowledged = [p for p, d in sent.items() if not d[0].error and d[0].partition == number]
        assert set(acknowledged) <= set(stored)
        refused = {p for p, d in sent.items() if d[0].error and d[0].error.outcome == "not done"}
        assert not refused & set(stored)


def test_what_a_busy_broker_put_off_goes_to_the_topic_made_anew_before_what_is_sent_later(rig: SenderRig) -> None:
    """Another partition may be notified first that the topic is gone."""
    rig.broker.partitions = 2
    rig.settle(rig.send(b"0", partition=0), rig.send(b"0", partition=1))
    rig.broker.plan(Produce, Busy("Too much waits."))
    put_off = [rig.send(b"1", partition=0), rig.send(b"2", partition=0)]
    rig.advance(0.02)
    rig.broker.delete("orders")
    rig.settle(rig.send(b"1", partition=1))
    assert not put_off[0].done(), "the pause is not over"
    later = rig.send(b"3", partition=0)
    rig.settle(*put_off, later)
    assert rig.broker.payloads("orders", 0) == [b"1", b"2", b"3"]


def test_what_was_sent_to_a_gone_topic_waits_for_the_new_one_before_what_is_sent_later(rig: SenderRig) -> None:
    rig.broker.partitions = 2
    rig.settle(rig.send(b"0", partition=0), rig.send(b"0", partition=1))
    rig.broker.delete("orders")
    rig.broker.plan(Produce, HOLD)
    rig.broker.plan(Metadata, HOLD)
    refused = rig.send(b"1", partition=0)
    rig.exchange()
    other = rig.send(b"1", partition=1)
    rig.exchange()
    assert not rig.sender.is_known("orders"), "the other partition's sender was told that it is gone"
    later = rig.send(b"2", partition=0)
    rig.broker.release()
    rig.settle(refused, other, later)
    assert rig.broker.payloads("orders", 0) == [b"1", b"2"]
