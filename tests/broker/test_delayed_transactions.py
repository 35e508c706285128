"""Delayed messages inside of transactions: nothing waits before the commit, and delays count from it."""

import pytest

from tests.broker.helpers import Answer, Broker, Session, Stream, after, at
from tfmq.apply_target import ARRIVALS_KEY
from tfmq.broker.delay_commands import TRANSACTION_TOPIC
from tfmq.protocol.commands import LeaseProducerIds, ResumePartition
from tfmq.protocol.delayed_handle import Handles, decode_due_times
from tfmq.transaction import apply_progress

HOUR = 3_600_000


@pytest.fixture
def broker() -> Broker:
    made = Broker()
    made.create()
    return made


def waiting(broker: Broker) -> list[int]:
    """The dues of those that wait, ms from now."""
    now = broker.clock.wall_ms()
    return [row["due_ms"] - now for row in broker.delayed()]


def test_a_whole_transaction_brings_its_message_now_and_its_check_later(broker: Broker) -> None:
    stream = broker.stream()
    answer = broker.transact(stream, [("orders", 0, [b"order"]), ("orders", 0, [b"check"], after(1_800_000))])
    assert answer.state == "committed"
    assert len(answer.offsets) == 2 and answer.offsets[1] == -1, "a delayed batch lies nowhere yet"
    assert broker.payloads() == [b"order"] and waiting(broker) == [1_800_000]
    broker.advance(1801)
    assert broker.payloads() == [b"order", b"check"]
    assert broker.settled()


def test_a_delay_counts_from_the_commit_and_a_time_is_a_time(broker: Broker) -> None:
    stream, now = broker.stream(), broker.clock.wall_ms()
    began = broker.begin(stream, "x")
    assert broker.send(stream, began, [b"delay"], due=after(5000)).code == "ok"
    assert broker.send(stream, began, [b"time", b"over"], due=at(now + 20_000) + at(now - 1)).code == "ok"
    broker.advance(10)
    assert broker.delayed() == [] and broker.payloads() == []
    broker.prepare(began)
    broker.advance(2)
    assert broker.delayed() == []
    assert broker.decide(began).state == "committed"
    assert waiting(broker) == [1, 5000, 8000]
    broker.advance(5.1)
    assert broker.payloads() == [b"over", b"delay"]
    broker.advance(3)
    assert broker.payloads() == [b"over", b"delay", b"time"]


def test_rolled_back_nothing_ever_waits(broker: Broker) -> None:
    stream = broker.stream()
    for prepared in (False, True):
        began = broker.begin(stream, f"x{prepared}")
        broker.send(stream, began, [b"never"], due=after(1000))
        if prepared:
            broker.prepare(began)
        assert broker.rollback(began).state == "rolled_back"
    broker.advance(5)
    assert broker.delayed() == [] and broker.payloads() == [] and broker.arrivals.end_offset == 0


def test_a_lost_session_takes_its_delayed_messages_along(broker: Broker) -> None:
    stream, session = broker.stream(), Session()
    began = broker.begin(stream, session=session)
    broker.send(stream, began, [b"never"], due=after(1000))
    session.close()
    broker.engine.broker.end_turn()
    broker.advance(5)
    assert broker.delayed() == [] and broker.payloads() == []


@pytest.mark.parametrize("keep", ["nothing", "everything"])
def test_prepared_it_survives_a_power_cut_and_waits_from_its_late_commit_on(keep: str) -> None:
    broker = Broker()
    broker.create()
    stream = broker.stream()
    began = broker.begin(stream, "x")
    broker.send(stream, began, [b"plain"])
    broker.send(stream, began, [b"later"], due=after(5000))
    broker.prepare(began)
    left = broker.crashed(broker.disk.crash(keep=keep))
    left.advance(60)
    assert left.delayed() == [] and left.payloads() == []
    assert left.decide(began).state == "committed"
    assert left.payloads() == [b"plain"] and waiting(left) == [5000]
    left.advance(6)
    assert left.payloads() == [b"plain", b"later"]


@pytest.mark.parametrize("keep", ["nothing", "everything", "some"])
def test_decided_before_a_power_cut_it_counts_from_that_decision(keep: str) -> None:
    """The decision is forced, and nothing of it is in the arrivals for sure: the start brings it there, once."""
    broker = Broker(queued=True)
    broker.create()
    broker.work()
    stream = broker.stream()
    broker.work()
    answer = broker.transact(stream, [("orders", 0, [b"order"]), ("orders", 0, [b"check"], after(HOUR))])
    decided = broker.clock.wall_ms()
    while not answer.done and broker.jobs:
        broker.step()
        disk = broker.disk.crash(keep="nothing" if keep == "some" else keep)
    left = broker.crashed(disk)
    left.work()
    left.clock.advance(600)
    left = left.crashed(left.disk.crash(keep="everything"))
    left.work()
    if answer.done and answer.state == "committed":
        (row,) = left.delayed()
        assert row["due_ms"] == decided + HOUR
    left.advance(2 * 3600)
    left.work()
    assert left.payloads() in ([], [b"order", b"check"])


def test_an_application_that_waits_for_the_disk_still_counts_from_the_decision() -> None:
    broker = Broker()
    broker.create()
    stream = broker.stream()
    began = broker.begin(stream, "x")
    broker.send(stream, began, [b"check"], due=after(60_000))
    broker.prepare(began)
    decided = broker.clock.wall_ms()
    partition = broker.engine.broker.delay_commands.partition
    partition.log.stop("a test stops it")
    assert broker.decide(began).state == "applying"
    broker.advance(20)
    again = broker.restart()
    (row,) = again.delayed()
    assert row["due_ms"] == decided + 60_000
    again.advance(41)
    assert again.payloads() == [b"check"] and again.settled()


def test_what_was_due_while_it_could_not_be_written_comes_at_once(broker: Broker) -> None:
    stream = broker.stream()
    began = broker.begin(stream, "x")
    broker.send(stream, began, [b"check"], due=after(1000))
    broker.prepare(began)
    broker.engine.broker.delay_commands.partition.log.stop("a test stops it")
    broker.decide(began)
    broker.advance(20)
    again = broker.restart()
    again.advance(0.1)
    assert again.payloads() == [b"check"]


def test_a_delay_counts_in_broker_time_whatever_the_wall_clock_does(broker: Broker) -> None:
    stream = broker.stream()
    for hours in (1, -1):
        broker.clock.jump_wall(hours * 3600)
        began = broker.begin(stream, f"x{hours}")
        broker.send(stream, began, [b"%d" % hours], due=after(60_000))
        broker.prepare(began)
        assert broker.decide(began).state == "committed"
        seen = len(broker.payloads())
        broker.advance(59.9)
        assert len(broker.payloads()) == seen
        broker.advance(0.2)
        assert len(broker.payloads()) == seen + 1


def test_the_sequence_of_a_transaction_goes_on_over_plain_and_delayed_ones(broker: Broker) -> None:
    stream = broker.stream()
    began = broker.begin(stream, "x")
    assert broker.send(stream, began, [b"a"]).code == "ok"
    assert broker.send(stream, began, [b"b", b"c"], due=after(10)).code == "ok"
    assert broker.send(stream, began, [b"d"]).code == "ok"
    assert broker.send(stream, began, [b"gap"], sequence=9, due=after(10)).code == "sequence_gap"
    assert broker.send(stream, began, [b"b", b"c"], sequence=1, due=after(10)).code == "ok", "a repeat"
    broker.decide(began, one_phase=True)
    broker.advance(1)
    assert broker.payloads() == [b"a", b"d", b"b", b"c"]


def test_many_small_transactions_of_one_turn_share_an_append_of_their_delayed_messages(broker: Broker) -> None:
    streams = [broker.stream() for _ in range(8)]
    before = broker.arrivals.end_ordinal
    answers = [
        broker.transact(stream, [("orders", 0, [b"%d" % number], after(1000))], turn=False)
        for number, stream in enumerate(streams)
    ]
    broker.engine.broker.end_turn()
    assert {answer.state for answer in answers} == {"committed"}
    assert broker.arrivals.end_ordinal == before + 16
    broker.advance(2)
    assert broker.payloads() == [b"%d" % number for number in range(8)]


def test_a_large_transaction_brings_its_delayed_batches_uncut(broker: Broker) -> None:
    stream = broker.stream()
    began = broker.begin(stream, "x")
    payloads = [bytes([n]) * 50_000 for n in range(40)]
    for start in range(0, 40, 10):
        assert broker.send(stream, began, payloads[start : start + 10], due=after(1000)).code == "ok"
    broker.prepare(began)
    assert broker.decide(began).state in ("committed", "applying")
    broker.advance(30)
    assert broker.payloads() == payloads
    assert broker.settled()


def test_what_is_asked_for_twice_is_done_once(broker: Broker) -> None:
    stream = broker.stream()
    request, body = broker.transaction(stream, [("orders", 0, [b"check"], after(1000))])
    first, second = broker.ask(request, body), broker.ask(request, body)
    assert (first.repeated, second.repeated) == (False, True)
    broker.advance(2)
    assert broker.payloads() == [b"check"]


def test_a_topic_that_goes_before_the_commit_drops_what_was_for_it_when_that_is_due(broker: Broker) -> None:
    broker.create("bills")
    stream = broker.stream()
    began = broker.begin(stream, "x")
    broker.send(stream, began, [b"old"], topic="bills", due=after(1000))
    broker.prepare(began)
    broker.delete("bills")
    broker.create("bills")
    assert broker.decide(began).state == "committed"
    broker.advance(3)
    assert broker.payloads("bills") == []
    assert broker.engine.broker.status()["delay"]["dropped"] == 1


def test_what_its_partition_would_refuse_is_refused_before_the_commit(broker: Broker) -> None:
    stream = broker.stream()
    began = broker.begin(stream, "x")
    assert broker.send(stream, began, [b"a", b"b"], sequence=0, due=after(1) * 3).code == "bad_request"
    assert broker.send(stream, began, [bytes(9 << 20)], sequence=0, due=after(1)).code == "message_too_large"
    assert broker.send(stream, began, [b"a"], sequence=0, partition=5, due=after(1)).code == "unknown_partition"
    assert broker.send(stream, began, [b"fine"], sequence=0, due=after(1)).code == "ok"
    assert broker.decide(began, one_phase=True).state == "committed"
    broker.advance(1)
    assert broker.payloads() == [b"fine"]


def test_people_see_that_a_transaction_has_delayed_messages(broker: Broker) -> None:
    stream = broker.stream()
    began = broker.begin(stream, "x")
    broker.send(stream, began, [b"a"], due=after(HOUR))
    broker.prepare(began)
    (row,) = broker.listed()
    assert row["topics"] == [TRANSACTION_TOPIC] and row["messages"] == 1


def test_an_unprepared_one_is_refused_while_nothing_can_arrive(broker: Broker) -> None:
    stream = broker.stream()
    began = broker.begin(stream, "x")
    broker.send(stream, began, [b"a"], due=after(1000))
    broker.engine.broker.delay_commands.partition.log.stop("a test stops it")
    refused = broker.decide(began, one_phase=True)
    assert refused.code == "storage_stopped" and refused.failure is not None
    assert refused.failure.outcome == "not done" and "start the broker again" in str(refused.failure)
    assert broker.engine.broker.apply_target.display_name(ARRIVALS_KEY) == "the delayed messages"
    assert broker.ask(ResumePartition("orders", 0)).state == "open"


def reported(answer: Answer) -> dict[int, list[str]]:
    """The handles that a commit returned, by batch."""
    found = {}
    for each in answer.delayed:
        dues = decode_due_times(each.dues)
        found[each.batch] = list(Handles(each.store_id, each.log_id, each.first_number, dues))
    return found


@pytest.mark.parametrize("way", ["whole", "one phase", "prepared"])
def test_a_commit_returns_the_handles_of_waiting_messages(broker: Broker, way: str) -> None:
    stream, batches = broker.stream(), [("orders", 0, [b"order"]), ("orders", 0, [b"check"], after(HOUR))]
    if way == "whole":
        answer = broker.transact(stream, batches)
    else:
        began = broker.begin(stream, "order-42")
        broker.send(stream, began, [b"order"])
        broker.send(stream, began, [b"check"], due=after(HOUR))
        if way == "prepared":
            broker.prepare(began)
        answer = broker.decide(began, one_phase=way != "prepared")
    assert answer.state == "committed"
    (handle,) = reported(answer)[1]
    assert reported(answer).keys() == {1}
    assert [row["handle"] for row in broker.delayed()] == [handle]
    again = broker.crashed(broker.disk.crash(keep="nothing"))
    assert again.describe_delayed(handle)["state"] == "pending"
    moved = again.reschedule(handle, after(2 * HOUR))
    assert (moved.state, again.cancel_delayed(handle).state) == ("rescheduled", "cancelled")
    again.advance(4 * 3600)
    assert again.payloads() == [b"order"]


def test_messages_with_dues_of_their_own_have_handles_each(broker: Broker) -> None:
    stream = broker.stream()
    began = broker.begin(stream, "x")
    broker.send(stream, began, [b"a", b"b"], due=after(HOUR))
    broker.send(stream, began, [b"c", b"d"], due=after(1000) + after(2000))
    answer = broker.decide(began, one_phase=True)
    same, own = answer.delayed
    assert [len(decode_due_times(each.dues)) for each in (same, own)] == [1, 2], "one due time of all is told once"
    states = [broker.cancel_delayed(handle).state for handle in reported(answer)[1]]
    assert states == ["cancelled"] * 2
    broker.advance(2 * 3600)
    assert broker.payloads() == [b"a", b"b"]


def test_transactions_that_are_written_together_have_their_own_handles_each(broker: Broker) -> None:
    asked = [broker.transaction(broker.stream(), [("orders", 0, [text], after(HOUR))]) for text in (b"a", b"b")]
    first, second = [broker.ask(*each, turn=False) for each in asked]
    broker.engine.broker.end_turn()
    assert broker.cancel_delayed(reported(second)[0][0]).state == "cancelled"
    broker.advance(2 * 3600)
    assert broker.payloads() == [b"a"] and broker.cancel_delayed(reported(first)[0][0]).state == "delivered"


def test_handles_are_reported_once_their_numbers_are_on_the_disk() -> None:
    """A number that a power cut could give to another message would cancel that one."""
    broker = Broker(queued=True)
    broker.create()
    broker.work()
    answers = [broker.ask(LeaseProducerIds(1))]
    broker.work()
    stream = Stream(answers[0].first)
    answer = broker.transact(stream, [("orders", 0, [b"check"], after(HOUR))])
    while not answer.done:
        assert broker.arrivals.forced_offset == 0
        broker.step()
    assert broker.arrivals.forced_offset == broker.arrivals.end_offset > 0
    assert reported(answer).keys() == {0}


def test_a_repeat_after_a_restart_returns_no_handles(broker: Broker) -> None:
    request, body = broker.transaction(broker.stream(), [("orders", 0, [b"check"], after(HOUR))])
    assert reported(broker.ask(request, body))
    left = broker.crashed(broker.disk.crash(keep="nothing"))
    again = left.ask(request, body)
    assert (again.state, again.repeated, again.delayed) == ("committed", True, [])
    assert len(left.delayed()) == 1


def test_a_reply_has_no_more_handles_than_it_has_room_for(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply_progress, "DUE_WORDS_MAX", 3)
    stream = broker.stream()
    began = broker.begin(stream, "x")
    for dues in (after(1000) + after(2000), after(1000) + after(2000), after(5000)):
        broker.send(stream, began, [b"d", b"e"][: len(dues) // 8], due=dues)
    answer = broker.decide(began, one_phase=True)
    assert sorted(reported(answer)) == [0, 2] and len(broker.delayed()) == 5


def test_a_large_transaction_returns_its_handles_too(broker: Broker) -> None:
    stream = broker.stream()
    began = broker.begin(stream, "x")
    for _ in range(20):
        broker.send(stream, began, [bytes(40_000)], due=after(HOUR))
    answer = broker.decide(began, one_phase=True)
    broker.advance(1)
    assert sorted(reported(answer)) == list(range(20))
    assert sorted(each for (each,) in reported(answer).values()) == sorted(row["handle"] for row in broker.delayed())
