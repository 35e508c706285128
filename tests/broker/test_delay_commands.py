"""Delayed delivery through the whole engine: from a command to the message in its partition, and every answer."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from journal.testing import SimulatedDisk
from tests.broker.helpers import Answer, Broker, Stream, after, at, handles
from tests.scale import scaled, seeded
from tfmq.protocol.commands import READ_FORCED, DelayedHistogram, ListDelayed, ResumePartition
from tfmq.protocol.delayed_handle import format_handle, parse_handle

HOUR = 3_600_000


@pytest.fixture
def broker() -> Broker:
    made = Broker()
    made.create()
    return made


def test_a_message_comes_when_it_is_due_and_not_before(broker: Broker) -> None:
    producer = broker.lease()
    broker.delay(producer, 0, [b"a", b"b", b"c"], due=after(3000) + after(1000) + after(2000))
    seen = []
    for _ in range(4):
        broker.advance(0.999)
        early = broker.payloads()
        broker.advance(0.001)
        broker.advance(0.02)
        seen.append((early, broker.payloads()))
        broker.clock.advance(-0.0)
    assert [late for _, late in seen] == [[b"b"], [b"b", b"c"], [b"b", b"c", b"a"], [b"b", b"c", b"a"]]
    assert seen[0][0] == []
    assert broker.payloads(read=READ_FORCED) == [b"b", b"c", b"a"]


def test_a_delivered_message_is_an_ordinary_one_with_its_own_id(broker: Broker) -> None:
    producer = broker.lease()
    broker.delay(producer, 0, [b"later"])
    broker.produce(broker.lease(), 0, [b"now"])
    broker.advance(2)
    fetched = broker.fetch(0)
    assert broker.payloads() == [b"now", b"later"]
    assert producer.to_bytes(5, "big") + bytes(3) in bytes(fetched.body)


def test_a_fetch_that_waits_is_answered_by_what_becomes_due(broker: Broker) -> None:
    broker.produce(broker.lease(), 0, [b"first"])
    waiting = broker.fetch(broker.log().end_offset, wait_ms=60_000)
    broker.delay(broker.lease(), 0, [b"later"])
    assert waiting.code == "waiting"
    broker.advance(2)
    assert waiting.code == "ok" and waiting.body


def test_a_delay_is_not_a_fraction_of_a_millisecond_short(broker: Broker) -> None:
    """Broker time counts whole ones; what is taken at a part of one counts from the next."""
    for part in (0.0001, 0.0005, 0.0009):
        seen = len(broker.payloads())
        broker.advance(part)
        broker.delay(broker.lease(), 0, due=after(5))
        broker.advance(0.0049)
        assert len(broker.payloads()) == seen, f"taken {part} s behind a whole one"
        broker.advance(0.1)
        assert len(broker.payloads()) == seen + 1


# Streams


def test_mixing_plain_delayed_and_transactional_sends_never_trips_the_sequence_rule(broker: Broker) -> None:
    """One producer's three streams, each with an id of its own, in any order, over a crash and repeats."""
    broker.create("bills", 2)
    for number in range(scaled(60)):
        generator = seeded("mixed streams", number)
        answers = mixed(broker, generator)
        assert [answer.code for answer in answers] == ["ok"] * len(answers), f"round {number}"
    broker.advance(5)
    delivered = len(broker.payloads()) + len(broker.payloads("bills")) + len(broker.payloads("bills", 1))
    before = delivered
    again = broker.restart()
    again.advance(5)
    after_restart = sum(len(again.payloads(*place)) for place in (("orders",), ("bills",), ("bills", 1)))
    assert after_restart == before


def mixed(broker: Broker, generator: random.Random) -> list[Answer]:
    """Some sends of one producer, a few of them repeated."""
    plain: dict[tuple[str, int], list[int]] = {}
    delayed, stream, answers = Stream(broker.lease()), broker.stream(), []
    for _ in range(30):
        topic, partition = generator.choice((("orders", 0), ("bills", 0), ("bills", 1)))
        payloads = [b"x"] * generator.randrange(1, 4)
        turn = generator.random() < 0.7
        kind = generator.randrange(4)
        if kind == 0:
            id, sequence = plain.setdefault((topic, partition), [broker.lease(), 0])
            plain[topic, partition][1] += len(payloads)
            send: Callable[..., Answer] = broker.produce
            fields: dict[str, Any] = {"topic": topic, "partition": partition, "turn": turn}
        elif kind == 1:
            id, sequence = delayed.id, delayed.take(len(payloads))
            send = broker.delay
            due = after(generator.randrange(3000))
            fields = {"topic": topic, "partition": partition, "due": due, "turn": turn}
        else:
            batches: list[Any] = [(topic, partition, payloads), ("orders", 0, payloads, after(50))]
            answers.append(broker.transact(stream, batches[: generator.randrange(1, 3)], turn=turn))
            continue
        answers.append(send(id, sequence, payloads, **fields))
        if generator.random() < 0.3:
            answers.append(send(id, sequence, payloads, **fields))
    broker.engine.broker.end_turn()
    broker.advance(generator.random())
    return answers


# Cancel, reschedule, look


def test_a_cancelled_message_never_comes_and_the_answer_stays(broker: Broker) -> None:
    producer = broker.lease()
    answer = broker.delay(producer, 0, [b"gone", b"stays"])
    gone, stays = handles(answer)
    assert broker.cancel_delayed(gone).state == "cancelled"
    assert broker.cancel_delayed(gone).state == "cancelled"
    broker.advance(2)
    assert broker.payloads() == [b"stays"]
    assert broker.cancel_delayed(stays).state == "delivered"
    again = broker.restart()
    assert again.cancel_delayed(gone).state == "cancelled"
    assert again.cancel_delayed(stays).state == "delivered"


def test_a_handle_that_was_not_given_out_is_unknown_and_a_typo_is_refused(broker: Broker) -> None:
    (handle,) = handles(broker.delay(broker.lease(), 0))
    own = parse_handle(handle)
    other = format_handle(own._replace(store_id=own.store_id + 1))
    never = format_handle(own._replace(number=own.number + 1000))
    assert broker.cancel_delayed(other).state == "unknown"
    assert broker.cancel_delayed(never).state == "unknown"
    assert broker.describe_delayed(other)["state"] == "unknown"
    assert broker.reschedule(other, after(5)).state == "unknown"
    typo = handle[:20] + ("a" if handle[20] != "a" else "b") + handle[21:]
    refused = broker.cancel_delayed(typo)
    assert refused.code == "bad_request" and "no handle" in str(refused.failure)
    assert broker.ask(ListDelayed("", after=other)).code == "bad_request"
    broker.advance(2)
    assert broker.payloads() == [b"later"]


def test_a_rescheduled_message_comes_once_at_its_new_time_and_a_repeat_has_the_same_handle(broker: Broker) -> None:
    (handle,) = handles(broker.delay(broker.lease(), 0))
    moved = broker.reschedule(handle, after(5000))
    assert moved.state == "rescheduled" and parse_handle(moved.handle).due == broker.clock.wall_ms() + 5000
    assert broker.reschedule(handle, after(5000)).handle == moved.handle
    broker.advance(2)
    assert broker.payloads() == []
    assert broker.describe_delayed(moved.handle)["state"] == "pending"
    old = broker.describe_delayed(handle)
    assert (old["handle"], old["handle_now"], old["state"]) == (handle, moved.handle, "pending")
    broker.advance(4)
    assert broker.payloads() == [b"later"]
    assert broker.reschedule(moved.handle, after(1)).state == "delivered"


def test_those_that_wait_are_listed_in_the_order_of_their_turns_page_by_page(broker: Broker) -> None:
    broker.create("bills", 2)
    producer, now = broker.lease(), broker.clock.wall_ms()
    answer = broker.delay(producer, 0, [b"c", b"a", b"b"], due=after(3000) + after(1000) + at(now + 2000))
    broker.delay(producer, 3, [b"bill"], due=after(1500), topic="bills", partition=1)
    rows = broker.delayed()
    assert [row["due_ms"] - now for row in rows] == [1000, 1500, 2000, 3000]
    assert [row["topic"] for row in rows] == ["orders", "bills", "orders", "orders"]
    assert {row["state"] for row in rows} == {"pending"}
    assert rows[0]["handle"] == handles(answer)[1] and rows[0]["size"] == 21
    assert [row["due_ms"] - now for row in broker.delayed("bills")] == [1500]
    assert broker.delayed("bills", partition=0) == []
    assert len(broker.delayed("bills", partition=1)) == 1
    assert [row["due_ms"] - now for row in broker.delayed(first_due=now + 1001, end_due=now + 3000)] == [1500, 2000]
    found, after_handle = [], ""
    while True:
        page = broker.ask(ListDelayed("", limit=1, after=after_handle))
        found += [row["handle"] for row in page.delayed]
        after_handle = page.after
        if not page.more:
            break
    assert found == [row["handle"] for row in rows]
    assert broker.ask(ListDelayed("nobody")).code == "unknown_topic"
    assert broker.ask(ListDelayed("bills", 9)).code == "unknown_partition"


def test_they_are_counted_by_the_time_at_which_they_are_due(broker: Broker) -> None:
    producer, now = broker.lease(), broker.clock.wall_ms()
    broker.delay(producer, 0, [b"x"] * 3, due=after(1000) + after(1999) + after(HOUR))
    counted = broker.ask(DelayedHistogram("", [now, now + 1500, now + 2000, now + 2001]))
    assert counted.counts == [1, 1, 0] and counted.pending == 3
    broker.create("bills")
    assert broker.ask(DelayedHistogram("bills", [now, now + 2 * HOUR])).counts == [0]
    assert broker.ask(DelayedHistogram("nobody", [1, 2])).code == "unknown_topic"


def test_a_message_is_described_as_far_as_it_is_known(broker: Broker) -> None:
    (handle,) = handles(broker.delay(broker.lease(), 0))
    described = broker.describe_delayed(handle)
    assert described["state"] == "pending" and described["topic"] == "orders"
    assert described["due_ms"] == broker.clock.wall_ms() + 1000 and described["size"] == 25
    broker.advance(2)
    described = broker.describe_delayed(handle)
    assert (described["state"], described["topic"], described["partition"]) == ("delivered", "orders", 0)


def test_the_status_says_what_waits(broker: Broker) -> None:
    broker.delay(broker.lease(), 0, [b"x"] * 3, due=after(1000) + after(HOUR) * 2)
    status = broker.engine.broker.status()["delay"]
    assert status["pending"] == 3 and status["arrivals"] == "open" and status["levels"] == []
    broker.advance(2)
    assert broker.engine.broker.status()["delay"]["pending"] == 2


# Targets


def test_a_topic_deleted_before_its_messages_are_due_drops_them(broker: Broker) -> None:
    producer = broker.lease()
    answer = broker.delay(producer, 0, [b"a", b"b"])
    broker.delete()
    broker.advance(2)
    assert broker.engine.broker.status()["delay"]["dropped"] == 2
    assert broker.delayed() == []
    assert broker.cancel_delayed(handles(answer)[0]).state in ("unknown", "cancelled")


def test_a_topic_deleted_and_made_again_before_they_are_due_never_gets_the_old_ones(broker: Broker) -> None:
    producer = broker.lease()
    broker.delay(producer, 0, [b"old"])
    broker.delete()
    broker.create()
    assert broker.delay(producer, 1, [b"new"]).code == "ok", "the stream goes on over all topics"
    broker.advance(3)
    assert broker.payloads() == [b"new"]
    again = broker.restart()
    again.advance(3)
    assert again.payloads() == [b"new"]


def test_a_stopped_partition_holds_only_its_own_timers(broker: Broker) -> None:
    broker.create("bills")
    producer = broker.lease()
    broker.produce(broker.lease(), 0, [b"before"])
    broker.delay(producer, 0, [b"held 1", b"held 2"])
    broker.delay(producer, 2, [b"bill"], topic="bills")
    broker.log().stop("a test stops it")
    broker.advance(5)
    assert broker.payloads("bills") == [b"bill"] and broker.payloads() == [b"before"]
    status = broker.engine.broker.status()["delay"]
    assert status["pending"] == 2 and status["waits_for"]
    broker.delay(producer, 3, [b"bill 2"], topic="bills")
    broker.advance(2)
    assert broker.payloads("bills") == [b"bill", b"bill 2"]
    assert broker.ask(ResumePartition("orders", 0)).state == "open"
    broker.advance(1)
    assert broker.payloads() == [b"before", b"held 1", b"held 2"]


def test_a_partition_that_stops_while_it_gets_them_has_each_once_after_its_resumption(broker: Broker) -> None:
    producer = broker.lease()
    broker.produce(broker.lease(), 0, [b"before"])
    broker.delay(producer, 0, [b"1", b"2", b"3"], due=after(1000) + after(2000) + after(3000))
    broker.disk.faults.fail("force", path="orders-0")
    broker.advance(2.5)
    broker.disk.faults.clear()
    assert broker.log().stopped is not None
    assert broker.ask(ResumePartition("orders", 0)).state == "open"
    broker.advance(5)
    assert broker.payloads() == [b"before", b"1", b"2", b"3"]


@pytest.mark.parametrize("full", [False, True], ids=["stopped", "full"])
def test_what_a_partition_may_lose_yet_is_not_counted_on_after_a_restart(full: bool) -> None:
    """It has a message that is not forced, and says so; what waits must not be given up because of that."""
    broker = Broker()
    broker.create()
    producer = broker.lease()
    broker.produce(broker.lease(), 0, [b"before"])
    broker.delay(producer, 0, [b"1", b"2", b"3"], due=after(1000) + after(1500) + after(3000))
    if full:
        moments: list[SimulatedDisk] = []

        def written(kind: str, path: str) -> None:
            if kind == "write" and "orders-0" in path:
                moments.append(broker.disk.crash(keep="everything"))

        broker.disk.after = written
        broker.advance(1.2)
        disk = moments[0]
        disk.space_bytes = disk.used_bytes()
        broker = broker.crashed(disk)
        assert broker.log().waits_for_space
    else:
        broker.disk.faults.fail("force", path="orders-0")
        broker.advance(1.2)
        broker.disk.faults.clear()
        broker = broker.restart()
        assert broker.log().stopped is not None
    broker.advance(80)
    broker.ask(ListDelayed(""))  # which brings to the buckets what waits
    disk = broker.disk.crash(keep="nothing")
    disk.space_bytes = None
    again = broker.crashed(disk)
    again.ask(ResumePartition("orders", 0))
    again.advance(60)
    assert again.payloads() == [b"before", b"1", b"2", b"3"]


def test_a_disk_full_when_they_are_due_delays_them_and_loses_none(broker: Broker) -> None:
    producer = broker.lease()
    payloads = [bytes([n]) * 40_000 for n in range(10)]
    broker.delay(producer, 0, payloads)
    broker.disk.space_bytes = broker.disk.used_bytes() + 50_000
    broker.advance(5)
    assert len(broker.payloads()) < 10
    broker.disk.space_bytes = None
    broker.advance(60)
    assert broker.payloads() == payloads
    assert broker.restart().payloads() == payloads


def test_small_segments_get_small_appends(broker: Broker) -> None:
    broker.create("small", log__segment_bytes=1 << 16)
    payloads = [bytes([n]) * 20_000 for n in range(12)]
    producer = broker.lease()
    for sequence, payload in enumerate(payloads):
        assert broker.delay(producer, sequence, [payload], topic="small").code == "ok"
    broker.advance(3)
    assert broker.payloads("small") == payloads


# The house


@pytest.mark.parametrize("keep", ["nothing", "everything"])
def test_what_was_acknowledged_survives_a_power_cut_and_comes_once(keep: str) -> None:
    broker = Broker()
    broker.create()
    producer = broker.lease()
    for number in range(8):
        assert broker.delay(producer, number, [b"%d" % number], due=after(500 * (number + 1))).code == "ok"
        if number == 3:
            broker.advance(1.2)
    left = broker.crashed(broker.disk.crash(keep=keep))
    left.advance(10)
    found = left.payloads()
    assert sorted(found) == [b"%d" % number for number in range(8)]
    assert left.restart().payloads() == found


def test_a_stop_writes_what_was_taken_and_fires_nothing_more() -> None:
    broker = Broker(queued=True)
    broker.create()
    producer = broker.lease()
    broker.work()
    answer = broker.delay(producer, 0, turn=False)
    broker.stop()
    assert answer.code == "ok"
    again = Broker(broker.disk, broker.clock)
    assert again.payloads() == []
    again.advance(2)
    assert again.payloads() == [b"later"]


def test_a_stop_ends_on_a_full_disk_and_beside_a_stopped_partition(broker: Broker) -> None:
    producer = broker.lease()
    broker.produce(broker.lease(), 0, [b"before"])
    broker.delay(producer, 0, [b"held", b"far"], due=after(1000) + after(HOUR))
    broker.log().stop("a test stops it")
    broker.advance(3)
    broker.disk.space_bytes = broker.disk.used_bytes()
    broker.stop()
    broker.disk.space_bytes = None
    again = Broker(broker.disk, broker.clock)
    assert again.ask(ResumePartition("orders", 0)).state == "open"
    again.advance(2)
    assert again.payloads() == [b"before", b"held"]
    again.advance(4000)
    assert again.payloads() == [b"before", b"held", b"far"]


@pytest.mark.parametrize("what", ["arrivals", "bucket", "checkpoint"])
def test_a_disk_that_fails_under_the_store_delivers_what_it_has_and_a_start_goes_on(what: str) -> None:
    broker = Broker()
    broker.create()
    producer = broker.lease()
    broker.delay(producer, 0, [b"soon", b"far"], due=after(5000) + after(HOUR))
    broker.disk.faults.fail("force", path=what, times=None)
    broker.delay(producer, 2, [b"unsure"], due=after(6000))
    broker.advance(200)
    assert b"soon" in broker.payloads()
    broker.disk.faults.clear()
    again = Broker(broker.disk.crash(keep="everything"), broker.clock)
    again.advance(4000)
    found = again.payloads()
    assert sorted(set(found)) == sorted(found) and {b"soon", b"far"} <= set(found)


def test_many_repeats_and_cancels_leave_no_quota(broker: Broker) -> None:
    producer = broker.lease()
    for sequence in range(5):
        answer = broker.delay(producer, sequence)
        broker.delay(producer, sequence)
        broker.cancel_delayed(handles(answer)[0])
        broker.describe_delayed(handles(answer)[0])
    assert broker.engine.broker.backpressure.pending_bytes == 0


def test_named_levels_are_sent_to_clients() -> None:
    broker = Broker(delay__levels=["1s", "5min"], delay__tick_ms=50)
    assert broker.engine.broker.status()["delay"]["levels"] == [1, 300]
