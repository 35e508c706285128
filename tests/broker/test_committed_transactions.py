"""What was decided reaches its partitions exactly once, whatever becomes of them, of the disk, of the broker."""

from collections.abc import Callable
from typing import Any

import pytest

from journal.record.block_trailer import SOURCE_TRANSACTION
from journal.testing import Moment, SimulatedDisk
from tests.broker.helpers import Answer, Broker, Stream
from tfmq.errors import UNKNOWN
from tfmq.protocol import commands

TWO = [("orders", 0, [b"a", b"b"]), ("bills", 0, [b"c"])]


@pytest.fixture
def broker() -> Broker:
    return made()


def made(**values: Any) -> Broker:
    broker = Broker(**values)
    broker.create()
    broker.create("bills")
    return broker


def found(broker: Broker) -> tuple[list[bytes], list[bytes]]:
    return broker.payloads("orders"), broker.payloads("bills")


def prepared(broker: Broker, xid: str = "order-42", stream: Stream | None = None, **fields: Any) -> Answer:
    """A prepared transaction with a message for each topic."""
    stream = stream or broker.stream()
    began = broker.begin(stream, xid, **fields)
    broker.send(stream, began, [b"a", b"b"])
    broker.send(stream, began, [b"c"], topic="bills")
    assert broker.prepare(began).state == "prepared"
    return began


def moments(broker: Broker, do: Callable[[], Any], kind: str, path: str) -> list[Moment]:
    """The disk as it was right after each call of `kind` on a file of that path, while `do` ran."""
    kept: list[Moment] = []

    def after(called: str, where: str) -> None:
        if called == kind and path in where:
            kept.append(Moment(broker.disk))

    broker.disk.after = after
    do()
    broker.disk.after = None
    return kept


def three_starts(broker: Broker, disk: SimulatedDisk) -> Broker:
    """The broker after three starts, the second of which a power cut ends at once."""
    first = broker.crashed(disk)
    second = broker.crashed(first.disk.crash(keep="nothing"))
    return second.restart()


# Crashes


def test_item_35_a_crash_between_the_decision_and_the_appends(broker: Broker) -> None:
    stream = broker.stream()
    broker.transact(stream, TWO)
    forced = moments(broker, lambda: broker.transact(stream, TWO), "force", "/transactions/")
    assert forced
    for keep in ("nothing", "everything"):
        left = three_starts(broker, forced[0].crash(keep=keep))
        assert found(left) == ([b"a", b"b"] * 2, [b"c"] * 2)


def test_a_crash_between_the_appends_of_two_partitions_applies_the_rest_once(broker: Broker) -> None:
    stream = broker.stream()
    broker.transact(stream, TWO)
    for topic in ("orders", "bills"):
        for moment in moments(broker, lambda: broker.transact(stream, TWO), "write", f"/{topic}-0/"):
            for keep in ("nothing", "everything"):
                left = three_starts(broker, moment.crash(keep=keep))
                orders, bills = found(left)
                assert len(orders) == 2 * len(bills) >= 4, (topic, keep)


def test_a_crash_before_the_decision_is_fsynced_leaves_all_or_nothing(broker: Broker) -> None:
    stream = broker.stream()
    broker.transact(stream, TWO)
    for moment in moments(broker, lambda: broker.transact(stream, TWO), "write", "/transactions/"):
        for keep in ("nothing", "everything"):
            orders, bills = found(three_starts(broker, moment.crash(keep=keep)))
            assert (orders, bills) in (([b"a", b"b"], [b"c"]), ([b"a", b"b"] * 2, [b"c"] * 2))


def test_item_18_an_open_transaction_is_rolled_back_by_a_crash(broker: Broker) -> None:
    stream = broker.stream()
    began = broker.begin(stream, "order-42")
    broker.send(stream, began, [b"a"])
    left = broker.crashed(broker.disk.crash(keep="everything"))
    assert found(left) == ([], []) and left.listed(["open"]) == []
    assert left.decide(began, one_phase=True).code in ("unknown_transaction", "transaction_rolled_back")
    assert left.settled()


def test_item_19_a_commit_survives_every_reopening_and_is_not_doubled(broker: Broker) -> None:
    began = prepared(broker)
    assert broker.decide(began).state == "committed"
    left = broker
    for keep in ("nothing", "everything", "nothing"):
        left = left.crashed(left.disk.crash(keep=keep))
        assert found(left) == ([b"a", b"b"], [b"c"])
        assert left.decide(began).state == "committed"
    for _ in range(3):
        left = left.restart()
        assert found(left) == ([b"a", b"b"], [b"c"])


def test_item_20_partitions_that_lost_it_get_it_again_from_the_journal_and_once(broker: Broker) -> None:
    """The power cut takes every unforced write of the partitions; the second start changes nothing."""
    broker.transact(broker.stream(), TWO)
    assert broker.log("orders").forced_offset < broker.log("orders").end_offset
    disk = broker.disk.crash(keep="nothing")
    first = broker.crashed(disk)
    assert found(first) == ([b"a", b"b"], [b"c"])
    end = first.log("orders").end_offset
    second = first.restart()
    assert found(second) == ([b"a", b"b"], [b"c"]) and second.log("orders").end_offset == end


def test_items_21_and_22_a_prepared_one_survives_with_its_messages_and_either_end_survives(broker: Broker) -> None:
    kept, dropped = prepared(broker, "kept"), prepared(broker, "dropped")
    left = broker.crashed(broker.disk.crash(keep="nothing"))
    assert [row["xid"] for row in left.listed()] == ["kept", "dropped"] and found(left) == ([], [])
    assert left.decide(kept).state == "committed" and left.rollback(dropped).state == "rolled_back"
    again = left.crashed(left.disk.crash(keep="nothing"))
    assert again.listed() == [] and found(again) == ([b"a", b"b"], [b"c"])
    assert again.decide(kept).state == "committed"
    assert again.decide(dropped).code == "transaction_rolled_back"


def test_item_33_one_in_doubt_is_committed_after_a_restart_among_other_sends(broker: Broker) -> None:
    producer = broker.lease()
    broker.produce(producer, 0, [b"before"])
    began = prepared(broker)
    broker.produce(producer, 1, [b"between"])
    left = broker.crashed(broker.disk.crash(keep="nothing"))
    left.produce(producer, 2, [b"after"])
    left.decide(began)
    left.produce(producer, 3, [b"last"])
    wanted = [b"before", b"between", b"after", b"a", b"b", b"last"]
    assert left.payloads() == wanted
    assert left.crashed(left.disk.crash(keep="nothing")).payloads() == wanted


def test_hazard_15_all_in_doubt_is_back_when_the_start_ends_and_nothing_is_taken_before(broker: Broker) -> None:
    began = prepared(broker)
    member = broker.join()
    offsets = prepared(broker, "with offsets", stream=broker.stream())
    broker.decide(offsets)
    stream = broker.stream()
    locked = broker.begin(stream, "locks")
    broker.prepare(locked, [broker.group_offsets(member, 100)])
    left = Broker(broker.disk.crash(keep="nothing"), broker.clock, start=False)
    assert left.ask(commands.LeaseProducerIds(1), turn=False).code == "busy"
    left.engine.start()
    assert [row["xid"] for row in left.listed()] == ["order-42", "locks"]
    assert left.ask(commands.ReadOffsets("billing", None)).code == "busy"
    assert found(left) == ([b"a", b"b"], [b"c"])
    assert left.decide(began).state == "committed"


def test_the_start_applies_what_was_decided_before_the_first_request_with_workers_that_never_run(
    broker: Broker,
) -> None:
    stream = broker.stream()
    broker.transact(stream, TWO)
    (moment, *_) = moments(broker, lambda: broker.transact(stream, TWO), "force", "/transactions/")
    left = Broker(moment.crash(keep="nothing"), broker.clock, queued=True)
    assert not left.jobs
    assert left.log("orders").applied(SOURCE_TRANSACTION, left.engine.broker.transaction_commands.store.journal_id)
    assert found(left) == ([b"a", b"b"] * 2, [b"c"] * 2)


# Topics that go, come and grow


def test_a_topic_that_is_gone_at_the_commit_of_a_prepared_one_drops_its_messages_and_says_so(broker: Broker) -> None:
    began = prepared(broker)
    broker.delete("bills")
    ended = broker.decide(began)
    assert (ended.state, ended.dropped) == ("committed", 1)
    assert broker.payloads() == [b"a", b"b"]
    assert broker.decide(began).dropped in (0, 1)


def test_an_unprepared_one_is_refused_when_its_topic_is_gone(broker: Broker) -> None:
    stream = broker.stream()
    began = broker.begin(stream, "order-42")
    broker.send(stream, began, [b"a"])
    broker.send(stream, began, [b"c"], topic="bills")
    broker.delete("bills")
    refused = broker.decide(began, one_phase=True)
    assert refused.code == "unknown_topic" and refused.failure is not None
    assert refused.failure.outcome == "not done"
    assert broker.payloads() == [] and broker.rollback(began).state == "rolled_back"


def test_nothing_of_a_deleted_topic_reaches_a_new_one_of_the_same_name(broker: Broker) -> None:
    began = prepared(broker)
    broker.delete("bills")
    broker.create("bills")
    left = broker.crashed(broker.disk.crash(keep="nothing"))
    assert left.decide(began).dropped == 1
    assert found(left) == ([b"a", b"b"], [])
    assert found(left.restart()) == ([b"a", b"b"], [])


def test_item_37_replay_after_a_topic_went_keeps_all_the_others(broker: Broker) -> None:
    first, second = prepared(broker, "first"), prepared(broker, "second")
    broker.decide(first)
    broker.delete("bills")
    left = broker.crashed(broker.disk.crash(keep="nothing"))
    assert left.payloads() == [b"a", b"b"] and [row["xid"] for row in left.listed()] == ["second"]
    assert left.decide(second).state == "committed"
    assert left.restart().payloads() == [b"a", b"b"] * 2


def test_a_topic_that_grew_meanwhile_gets_its_messages_where_they_were_sent(broker: Broker) -> None:
    began = prepared(broker)
    broker.ask(commands.GrowTopic("orders", 3))
    stream = broker.stream()
    wider = broker.begin(stream, "wider")
    broker.send(stream, wider, [b"new"], partition=2)
    broker.prepare(wider)
    left = broker.crashed(broker.disk.crash(keep="nothing"))
    left.decide(began)
    left.decide(wider)
    assert left.payloads(partition=0) == [b"a", b"b"] and left.payloads(partition=2) == [b"new"]


def test_every_topic_gone_is_a_commit_of_nothing(broker: Broker) -> None:
    began = prepared(broker)
    broker.delete("orders")
    broker.delete("bills")
    ended = broker.decide(began)
    assert (ended.state, ended.dropped) == ("committed", 3) and broker.settled()


# Retention


def test_item_37_retention_of_what_was_applied_does_not_bring_it_back() -> None:
    broker = made(log__segment_bytes=1 << 16, log__state_bytes=1 << 16, retention__bytes=1 << 16, flush__messages=1)
    stream, producer = broker.stream(), broker.lease()
    broker.transact(stream, TWO)
    began = prepared(broker)
    broker.decide(began)
    for sequence in range(12):
        broker.produce(producer, sequence, [bytes(25_000)])
    broker.advance(130)
    assert broker.log().first_offset > 100
    journal_id = broker.engine.broker.transaction_commands.store.journal_id
    place = broker.log().applied(SOURCE_TRANSACTION, journal_id)
    assert place is not None
    for again in (broker.crashed(broker.disk.crash(keep="nothing")), broker.restart()):
        assert again.log().applied(SOURCE_TRANSACTION, journal_id) == place
        assert not {b"a", b"b"} & set(again.payloads())
        assert again.decide(began).state == "committed"
        assert not {b"a", b"b"} & set(again.payloads())
        again.engine.broker.lock.release()


def test_a_truncation_up_to_the_end_does_not_bring_it_back(broker: Broker) -> None:
    broker.transact(broker.stream(), TWO)
    end = broker.log().end_offset
    request = commands.Truncate("orders", broker.incarnation(), 0, end)
    assert broker.ask(request).first_offset == end
    for keep in ("nothing", "everything"):
        assert found(broker.crashed(broker.disk.crash(keep=keep)))[0] == []


# Disks that are full, partitions that stop


def test_a_full_disk_refuses_what_is_not_prepared_and_leaves_it_as_it_was(broker: Broker) -> None:
    stream = broker.stream()
    began = broker.begin(stream, "order-42")
    broker.send(stream, began, [b"a"])
    broker.disk.space_bytes = broker.disk.used_bytes()
    for refused in (broker.decide(began, one_phase=True), broker.prepare(began)):
        assert refused.code == "disk_full" and refused.failure is not None
        assert refused.failure.outcome == "not done" and refused.failure.retriable
    assert broker.state(began) == "open" and found(broker) == ([], [])
    broker.disk.space_bytes = None
    assert broker.decide(began, one_phase=True).state == "committed" and found(broker)[0] == [b"a"]


def test_a_stopped_partition_refuses_what_is_not_prepared(broker: Broker) -> None:
    stream = broker.stream()
    began = broker.begin(stream, "order-42")
    broker.send(stream, began, [b"a"])
    broker.send(stream, began, [b"c"], topic="bills")
    broker.log("bills").stop("a test stops it")
    for refused in (broker.decide(began, one_phase=True), broker.prepare(began)):
        assert refused.code == "storage_stopped" and refused.failure is not None
        assert refused.failure.outcome == "not done"
    assert broker.state(began) == "open" and broker.payloads("orders") == []
    assert broker.ask(commands.ResumePartition("bills", 0)).state == "open"
    assert broker.decide(began, one_phase=True).state == "committed"
    assert found(broker) == ([b"a"], [b"c"])


def test_what_is_prepared_commits_although_a_partition_is_stopped(broker: Broker) -> None:
    """Its owner may have committed elsewhere on the strength of the prepare: there is no way back."""
    began = prepared(broker)
    broker.log("bills").stop("a test stops it")
    answer = broker.decide(began)
    broker.advance(11)
    assert answer.state == "applying" and broker.payloads("orders") == [b"a", b"b"]
    assert broker.ask(commands.ResumePartition("bills", 0)).state == "open"
    broker.advance(1)
    assert found(broker) == ([b"a", b"b"], [b"c"])
    assert broker.decide(began).state == "committed"


def full_after_the_decision(broker: Broker, began: Answer) -> Answer:
    """Commits; the partition of bills finds no room from the moment on when the decision is forced."""
    broker.disk.faults.fail("write", error=28, path="/bills-0/", times=None)
    return broker.decide(began)


def test_a_disk_that_fills_after_the_decision_is_reported_as_applying_and_finished_later(broker: Broker) -> None:
    began = prepared(broker)
    answer = full_after_the_decision(broker, began)
    broker.advance(11)
    assert answer.state == "applying" and found(broker) == ([b"a", b"b"], [])
    other = broker.transact(broker.stream(), [("orders", 0, [b"goes on"])])
    assert other.state == "committed"
    assert [row["state"] for row in broker.listed()] == ["applying"]
    broker.disk.faults.clear()
    broker.advance(30)
    assert found(broker) == ([b"a", b"b", b"goes on"], [b"c"])
    assert broker.listed() == [] and broker.decide(began).state == "committed"


def test_a_partition_that_stops_after_the_decision_gets_the_rest_when_it_is_resumed(broker: Broker) -> None:
    stream = broker.stream()
    broker.transact(stream, TWO)
    broker.disk.faults.fail("write", path="/bills-0/")
    answers = [broker.transact(each, TWO) for each in (stream, broker.stream(), broker.stream())]
    broker.advance(11)
    assert answers[0].state == "applying"
    later = [answer.code for answer in answers[1:]]
    assert later == ["storage_stopped"] * 2 and all(
        answer.failure is not None and answer.failure.outcome == "not done" for answer in answers[1:]
    )
    assert broker.payloads("orders") == [b"a", b"b"] * 2
    plain = broker.produce(broker.lease(), 0, [b"plain"])
    assert plain.code == "ok"
    assert broker.ask(commands.ResumePartition("bills", 0)).state == "open"
    assert broker.payloads("bills") == [b"c"] * 2
    assert broker.transact(broker.stream(), TWO).state == "committed"
    assert found(broker.restart()) == ([b"a", b"b", b"a", b"b", b"plain", b"a", b"b"], [b"c"] * 3)


def test_a_failed_fsync_of_a_partition_loses_nothing_that_was_committed(broker: Broker) -> None:
    """Applied, answered, not forced yet; the force fails and the resumption cuts it away: it is applied again."""
    stream = broker.stream()
    broker.transact(stream, [("orders", 0, [b"first"])])
    broker.disk.faults.fail("force", path="/orders-0/")
    answer = broker.transact(stream, [("orders", 0, [b"second"])])
    failed = broker.produce(broker.lease(), 0, [b"plain"])
    assert answer.state in ("committed", "applying")
    assert failed.failure is not None and failed.failure.outcome == UNKNOWN
    broker.disk.faults.clear()
    assert broker.ask(commands.ResumePartition("orders", 0)).state == "open"
    there = broker.payloads()
    assert there.count(b"first") == there.count(b"second") == 1
    left = three_starts(broker, broker.disk.crash(keep="nothing"))
    there = left.payloads()
    assert there.count(b"first") == there.count(b"second") == 1


def test_a_decision_that_waits_is_finished_by_the_next_start(broker: Broker) -> None:
    began = prepared(broker)
    answer = full_after_the_decision(broker, began)
    broker.advance(11)
    assert answer.state == "applying"
    left = three_starts(broker, broker.disk.crash(keep="nothing"))
    assert found(left) == ([b"a", b"b"], [b"c"]) and left.decide(began).state == "committed"


def test_a_start_with_a_full_disk_waits_with_the_rest_and_serves_the_others(broker: Broker) -> None:
    began = prepared(broker)
    answer = full_after_the_decision(broker, began)
    broker.advance(11)
    assert answer.state == "applying"
    disk = broker.disk.crash(keep="nothing")
    disk.faults.fail("write", error=28, path="/bills-0/", times=None)
    left = Broker(disk, broker.clock)
    assert left.payloads() == [b"a", b"b"]
    assert left.transact(left.stream(), [("orders", 0, [b"goes on"])]).state == "committed"
    disk.faults.clear()
    left.advance(30)
    assert left.payloads("bills") == [b"c"]


def test_a_partition_that_cannot_be_opened_gets_its_messages_when_it_is_resumed(broker: Broker) -> None:
    began = prepared(broker)
    full_after_the_decision(broker, began)
    broker.advance(11)
    disk = broker.disk.crash(keep="nothing")
    disk.faults.fail("open", path="/bills-0/", times=None)
    left = Broker(disk, broker.clock)
    disk.faults.clear()
    assert isinstance(left.engine.broker.topics.topic("bills").partitions[0], str)
    assert left.ask(commands.ResumePartition("bills", 0)).state == "open"
    assert found(left) == ([b"a", b"b"], [b"c"])


def test_a_full_journal_refuses_and_goes_on_when_there_is_space(broker: Broker) -> None:
    stream = broker.stream()
    broker.transact(stream, TWO)
    request, body = broker.transaction(stream, TWO)
    broker.disk.faults.fail("write", error=28, path="/transactions/", times=None)
    refused = broker.ask(request, body)
    assert refused.code == "disk_full" and refused.failure is not None
    assert refused.failure.outcome == "not done" and broker.engine.broker.backpressure.pending_bytes == 0
    broker.disk.faults.clear()
    again = broker.ask(request, body)
    assert again.state == "committed" and not again.repeated
    assert found(broker) == ([b"a", b"b"] * 2, [b"c"] * 2)


def test_a_stopped_journal_answers_and_plain_sends_go_on(broker: Broker) -> None:
    stream = broker.stream()
    broker.transact(stream, TWO)
    broker.disk.faults.fail("force", path="/transactions/")
    unknown = broker.transact(stream, TWO)
    assert unknown.code == "storage_stopped" and unknown.failure is not None
    assert unknown.failure.outcome == UNKNOWN
    broker.disk.faults.clear()
    refused = broker.transact(broker.stream(), TWO)
    assert refused.code == "storage_stopped" and broker.produce(broker.lease(), 0).code == "ok"
    assert broker.engine.broker.status()["transactions"]["journal"] != "open"
    left = broker.crashed(broker.disk.crash(keep="nothing"))
    assert left.transact(left.stream(), TWO).state == "committed"
    orders, bills = found(left)
    assert orders.count(b"a") == len(bills) in (2, 3)


# Large ones


def test_a_large_transaction_lies_together_and_others_wait_after_it() -> None:
    broker = made(queued=True, log__segment_bytes=1 << 26)
    stream, producer = broker.stream(), broker.lease()
    broker.produce(producer, 0, [b"before"])
    broker.work()
    began = broker.begin(stream, "large")
    for n in range(48):
        broker.send(stream, began, [b"%d." % n + bytes(100_000)])
        broker.work()
    broker.prepare(began)
    broker.work()
    ended = broker.decide(began)
    sent: list[Answer] = []
    while not ended.done:
        broker.step()
        if len(sent) < 20:
            sent.append(broker.produce(producer, 1 + len(sent), [b"plain"]))
    broker.work()
    assert ended.state == "committed" and {answer.code for answer in sent} == {"ok"}
    there = broker.payloads()
    large = [n for n, payload in enumerate(there) if len(payload) > 100_000]
    assert large == list(range(large[0], large[0] + 48))
    assert [payload.partition(b".")[0] for payload in there[large[0] : large[0] + 48]] == [b"%d" % n for n in range(48)]


@pytest.mark.long
def test_a_crash_between_slices_resumes_in_the_middle() -> None:
    broker = made(log__segment_bytes=1 << 26)
    stream = broker.stream()
    began = broker.begin(stream, "large")
    wanted = [b"%d." % n + bytes(300_000) for n in range(12)]
    for payload in wanted:
        broker.send(stream, began, [payload])
    broker.prepare(began)
    written = moments(broker, lambda: broker.decide(began), "write", "/orders-0/")
    assert len(written) >= 3
    for moment in written:
        for keep in ("nothing", "everything"):
            assert three_starts(broker, moment.crash(keep=keep)).payloads() == wanted


# Stopping in the middle


def test_a_stop_does_not_wait_for_a_partition_that_takes_nothing(broker: Broker) -> None:
    began = prepared(broker)
    full_after_the_decision(broker, began)
    broker.stop()
    broker.disk.faults.clear()
    again = Broker(broker.disk, broker.clock)
    assert found(again) == ([b"a", b"b"], [b"c"]) and again.decide(began).state == "committed"


@pytest.mark.long
def test_a_stop_in_the_middle_of_a_large_one_leaves_it_to_be_finished_once() -> None:
    for steps in range(1, 12):
        broker = made(queued=True, log__segment_bytes=1 << 26)
        stream = broker.stream()
        began = broker.begin(stream, "large")
        wanted = [b"%d." % n + bytes(300_000) for n in range(12)]
        for payload in wanted:
            broker.send(stream, began, [payload])
            broker.work()
        broker.prepare(began)
        broker.work()
        answer = broker.decide(began)
        for _ in range(steps):
            if broker.jobs:
                broker.step()
        stopped: list[bool] = []
        broker.engine.broker.stop(lambda stopped=stopped: stopped.append(True))  # type: ignore[misc]
        broker.work()
        assert stopped and answer.done, f"after {steps} jobs"
        left = three_starts(broker, broker.disk.crash(keep="nothing"))
        assert left.payloads() == wanted, f"after {steps} jobs"


def test_hazard_11_what_was_recovered_is_committed_to_the_partitions_that_there_are_now(broker: Broker) -> None:
    """The log of a partition is opened anew by a resumption after the start: a later commit goes to that one."""
    began = prepared(broker)
    left = broker.crashed(broker.disk.crash(keep="nothing"))
    left.log("bills").stop("a test stops it")
    left.ask(commands.ResumePartition("bills", 0))
    plain = left.produce(left.lease(), 0, [b"newer"], topic="bills")
    assert plain.code == "ok" and left.decide(began).state == "committed"
    assert left.payloads("bills") == [b"newer", b"c"]
    assert left.restart().payloads("bills") == [b"newer", b"c"]
