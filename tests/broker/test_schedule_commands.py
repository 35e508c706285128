"""Schedules as they are made, listed, paused, resumed and removed; and their topic, which comes and goes."""

import random
from typing import Any

import pytest

from journal.record.format import make_record
from journal.testing import Moment, crash_states
from tests.broker.helpers import Answer, Broker
from tests.broker.schedule_helpers import Scheduling, ms
from tests.scale import SEED, scaled
from tfmq.message import decode_attribute, encode_attribute
from tfmq.protocol import commands


@pytest.fixture
def broker() -> Scheduling:
    return Scheduling.with_topic()


# Adding


def test_a_new_schedule_reports_when_it_runs_next_and_is_there_after_a_restart(broker: Scheduling) -> None:
    answer = broker.add("0 9 * * *", "daily", timezone="Europe/Berlin", tag="new", properties={"n": "1"})
    found = answer.fields.schedule
    assert answer.fields.made
    assert found["next_ms"] == ms("2026-11-24T09:00+01:00") and found["last_ms"] == 0
    assert {key: found[key] for key in ("name", "state", "trouble", "topic", "partition", "tag", "misfire")} == {
        "name": "daily",
        "state": "active",
        "trouble": "",
        "topic": "orders",
        "partition": 0,
        "tag": "new",
        "misfire": "one",
    }
    again = broker.restart()
    assert again.whole("daily") == found, "a reply about one alone has what it sends"
    again.until("2026-11-24T08:00:01")
    assert again.times() == ["2026-11-24T09:00:00+01:00"]


def test_added_again_in_the_same_words_it_is_the_same_and_in_others_refused(broker: Scheduling) -> None:
    first = broker.add()
    again = broker.add()
    assert not again.fields.made and again.fields.schedule == first.fields.schedule
    other = broker.add("0 10 * * *")
    assert other.code == "not_allowed" and "tfmq schedule remove daily" in str(other.failure)
    assert broker.names() == ["daily"]


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        ({"cron": "0 25 * * *"}, "bad_request", "no hour"),
        ({"timezone": "Europe/Atlantis"}, "bad_request", "no time zone"),
        ({"misfire": "maybe"}, "bad_request", "one, all, skip"),
        ({"topic": "nowhere"}, "unknown_topic", "no topic nowhere"),
        (
            {"topic": "nowhere", "partition": 9},
            "unknown_partition",
            "gets 1 partition (topics.partitions), no number 9",
        ),
        ({"partition": 3}, "unknown_partition", "1 partition, no number 3"),
        ({"properties": {"schedule": "x"}}, "bad_request", "schedule's own"),
        ({"payload": bytes(70_000)}, "message_too_large", "limits.schedule_payload_bytes"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence_and_leaves_nothing(
    broker: Scheduling, given: dict[str, Any], code: str, words: str
) -> None:
    answer = broker.add(**given)
    assert answer.code == code and words in str(answer.failure) and answer.failure is not None
    assert answer.failure.outcome == "not done"
    assert broker.names() == []
    again = broker.restart()
    assert again.names() == [] and again.add().code == "ok"


def test_an_attribute_that_is_none_is_refused(broker: Scheduling) -> None:
    answer = broker.ask(commands.AddSchedule("a", "0 9 * * *", "UTC", "orders", None, "one", b"\xc1"), b"x")
    assert answer.code == "decode_failed"


def test_what_it_sends_is_shown_of_one_and_not_in_lists(broker: Scheduling) -> None:
    broker.add("0 9 * * *", "daily", key="k", tag="new", properties={"n": "1"}, payload=b"\xff")
    broker.add("0 9 * * *", "gone", payload=None)
    one = broker.whole("daily")
    assert one["payload"] == b"\xff" and decode_attribute(one["attribute"])[1:4] == ("k", "new", {"n": "1"})
    assert broker.whole("gone")["payload"] is None and broker.whole("gone")["attribute"] == b""
    for row in broker.ask(commands.ListSchedules()).schedules:
        assert "payload" not in row and "attribute" not in row


def test_a_payload_that_imitates_the_partitions_own_records_is_refused(broker: Scheduling) -> None:
    """Recovery could not distinguish it from a true block trailer."""
    log_id = broker.log().log_id
    imitation = make_record(bytes(80), log_id, 0x40)
    answer = broker.add(payload=b"xx" + imitation)
    assert answer.code == "bad_request" and broker.names() == []


def test_there_are_limits_for_their_number_and_their_bytes() -> None:
    broker = Scheduling.with_topic(limits__schedules=2)
    assert [broker.add(name=name).code for name in "abc"] == ["ok", "ok", "not_allowed"]
    broker = Scheduling.with_topic(limits__schedules_bytes=3000)
    codes = [broker.add(name=name, payload=bytes(1000)).code for name in "abc"]
    assert codes == ["ok", "not_allowed", "not_allowed"]
    assert broker.remove("a").fields.removed and broker.add(name="b", payload=bytes(1000)).code == "ok"


def test_several_that_come_in_one_turn_are_all_counted_against_the_limit() -> None:
    broker = Scheduling.with_topic(limits__schedules=2, queued=True)
    requests = [commands.AddSchedule(name, "0 9 * * *", "UTC", "orders") for name in "abc"]
    answers = [broker.ask(request, b"x", turn=False) for request in requests]
    broker.engine.broker.end_turn()
    broker.work()
    assert [answer.code for answer in answers] == ["ok", "ok", "not_allowed"]


def test_the_partition_is_that_of_the_key_or_the_one_that_was_named(broker: Scheduling) -> None:
    broker.create("wide", 4)
    keyed = {key: broker.add(name=f"k-{key}", topic="wide", key=key).fields.schedule for key in "abcdef"}
    from tfmq.client.send.partitioner import KeyHash
    from tfmq.message import Message, Partition

    partitions = [Partition("wide", number) for number in range(4)]
    for key, found in keyed.items():
        assert found["partition"] == KeyHash().get_partition("wide", partitions, Message(b"", key=key)).number
    assert broker.add(name="third", topic="wide", partition=3).fields.schedule["partition"] == 3
    spread = {broker.add(name=f"n{n}", topic="wide").fields.schedule["partition"] for n in range(20)}
    assert spread == {0, 1, 2, 3}


def test_a_catalog_that_takes_no_writes_is_reported_and_nothing_runs(broker: Scheduling) -> None:
    broker.disk.faults.fail("force", path="meta", times=None)
    broker.engine.broker.id_allocator._next = broker.engine.broker.id_allocator._end
    assert broker.add().code == "storage_stopped" and broker.names() == []
    broker.disk.faults.clear()
    broker.until("2026-11-23T09:00:30")
    assert broker.times() == []


# Looking


def test_the_list_is_in_the_order_of_names_and_comes_in_pages(broker: Scheduling) -> None:
    for name in ("b", "a", "d", "c"):
        broker.add(name=name)
    assert broker.names() == ["a", "b", "c", "d"]
    page = broker.ask(commands.ListSchedules("", "", 3))
    assert [each["name"] for each in page.schedules] == ["a", "b", "c"] and page.more
    rest = broker.ask(commands.ListSchedules("", "c", 3))
    assert [each["name"] for each in rest.schedules] == ["d"] and not rest.more
    assert [each["name"] for each in broker.ask(commands.ListSchedules("b")).schedules] == ["b"]
    assert broker.ask(commands.ListSchedules("nobody")).schedules == []


def test_the_status_counts_them(broker: Scheduling) -> None:
    broker.add(name="a")
    broker.add(name="b")
    broker.pause("b")
    broker.create("gone")
    broker.add(name="c", topic="gone")
    broker.delete("gone")
    assert broker.engine.broker.status()["schedules"] == {"schedules": 3, "paused": 1, "waiting": 1}


# Pausing, resuming, removing


def test_a_paused_schedule_sends_nothing_also_after_a_restart(broker: Scheduling) -> None:
    broker.add()
    found = broker.pause().fields.schedule
    assert (found["state"], found["next_ms"]) == ("paused", 0)
    assert broker.pause().fields.schedule == found
    broker.until("2026-11-23T12:00")
    broker = broker.down_until("2026-11-24T12:00")
    assert broker.times() == [] and broker.schedule()["state"] == "paused"


@pytest.mark.parametrize("rule", ["one", "all", "skip"])
def test_what_passed_while_it_was_paused_is_not_missed(rule: str) -> None:
    broker = Scheduling.with_topic()
    broker.add(misfire=rule)
    broker.pause()
    broker.until("2026-11-25T12:00")
    found = broker.resume().fields.schedule
    assert (found["state"], found["next_ms"]) == ("active", ms("2026-11-26T09:00"))
    broker = broker.down_until("2026-11-26T09:00:01")
    assert broker.times() == ["2026-11-26T09:00:00+00:00"]


def test_resuming_one_that_runs_changes_nothing(broker: Scheduling) -> None:
    found = broker.add().fields.schedule
    assert broker.resume().fields.schedule == found


def test_a_pause_and_a_resumption_in_one_turn_are_done_one_after_the_other() -> None:
    broker = Scheduling.with_topic(queued=True)
    broker.add()
    requests = [commands.PauseSchedule("daily"), commands.ResumeSchedule("daily"), commands.PauseSchedule("daily")]
    answers = [broker.ask(request, turn=False) for request in requests]
    assert [answer.done for answer in answers] == [False] * 3
    broker.engine.broker.end_turn()
    broker.work()
    assert [answer.fields.schedule["state"] for answer in answers] == ["paused", "active", "paused"]


def test_nothing_is_sent_between_the_wish_to_pause_and_its_answer() -> None:
    broker = Scheduling.with_topic(queued=True)
    broker.add("* * * * *", "busy")
    answer = broker.ask(commands.PauseSchedule("busy"))
    broker.advance(120)
    broker.advance(1)
    assert not answer.done and broker.times() == []
    broker.work()
    assert answer.fields.schedule["state"] == "paused" and broker.times() == []


def test_a_removed_schedule_is_gone_and_its_name_free(broker: Scheduling) -> None:
    first = broker.add().fields.schedule
    assert broker.remove(id=first["id"] + 1).fields.removed is False
    assert broker.remove(id=first["id"]).fields.removed is True
    assert broker.remove().fields.removed is False
    broker.until("2026-11-23T09:30")
    assert broker.times() == [] and broker.restart().names() == []


def test_a_schedule_that_was_made_anew_under_its_name_begins_anew(broker: Scheduling) -> None:
    old = broker.add().fields.schedule
    broker.until("2026-11-23T09:30")
    broker.remove()
    new = broker.add("0 10 * * *").fields.schedule
    assert new["id"] > old["id"] and new["last_ms"] == 0
    broker.until("2026-11-23T10:00:01")
    assert [each[11:16] for each in broker.times()] == ["09:00", "10:00"]


@pytest.mark.parametrize("request_type", [commands.PauseSchedule, commands.ResumeSchedule])
def test_a_missing_schedule_name_is_answered_with_where_the_list_is(broker: Scheduling, request_type: Any) -> None:
    answer = broker.ask(request_type("nobody"))
    assert answer.code == "unknown_schedule" and "tfmq schedule list" in str(answer.failure)


def test_a_change_that_could_not_be_written_leaves_it_as_it_was(broker: Scheduling) -> None:
    broker.add()
    broker.disk.faults.fail("force", path="meta", times=None)
    assert broker.pause().code == "storage_stopped"
    broker.disk.faults.clear()
    broker.until("2026-11-23T09:00:30")
    assert broker.schedule()["state"] == "active" and len(broker.times()) == 1
    assert broker.remove().code == "storage_stopped" and broker.names() == ["daily"]


# The topic


def test_without_its_topic_it_waits_says_so_and_goes_on_with_the_next_time(broker: Scheduling) -> None:
    broker.add("0 * * * *", "hourly")
    broker.delete()
    found = broker.schedule("hourly")
    assert found["state"] == "waiting" and "tfmq topic create orders" in found["trouble"]
    broker.until("2026-11-23T10:30")
    broker.create()
    assert broker.schedule("hourly")["state"] == "active"
    broker.until("2026-11-23T11:00:01")
    assert [each[11:16] for each in broker.times()] == ["11:00"]


@pytest.mark.parametrize("rule", ["one", "all"])
def test_what_the_deleted_topic_got_or_missed_is_not_sent_to_the_new_one(rule: str) -> None:
    broker = Scheduling.with_topic()
    broker.add("* * * * *", "busy", misfire=rule)
    broker.until("2026-11-23T08:05:01")
    assert len(broker.times()) == 5
    broker.delete()
    broker.until("2026-11-23T08:10:01")
    broker.create()
    assert broker.times() == []
    broker = broker.restart()
    broker.look()
    assert broker.times() == []
    broker.until("2026-11-23T08:11:01")
    assert [each[11:16] for each in broker.times()] == ["08:11"]


def test_a_topic_that_was_made_again_while_the_broker_was_about_to_stop_is_found_at_the_start() -> None:
    """The entry that binds it to the new topic is lost in a crash: the start binds it."""
    broker = Scheduling.with_topic()
    broker.add("* * * * *", "busy")
    broker.until("2026-11-23T08:01:01")
    broker.delete()
    broker.engine.broker.schedule_commands.topic_created = lambda topic: None  # type: ignore[method-assign]
    broker.create()
    again = broker.crashed(broker.disk.crash(keep="nothing"))
    again.look()
    assert again.schedule("busy")["state"] == "active" and again.times() == []
    again.until("2026-11-23T08:02:01")
    assert [each[11:16] for each in again.times()] == ["08:02"]


def test_a_topic_that_came_back_too_small_is_waited_for_until_it_grows() -> None:
    broker = Scheduling.with_topic(3)
    broker.add("* * * * *", "busy", partition=2)
    broker.delete()
    broker.create(partitions=1)
    found = broker.schedule("busy")
    assert found["state"] == "waiting" and "no number 2" in found["trouble"]
    broker.until("2026-11-23T08:05:01")
    broker.ask(commands.GrowTopic("orders", 3))
    broker.work()
    assert broker.schedule("busy")["state"] == "active"
    broker.until("2026-11-23T08:06:01")
    assert [each[11:16] for each in broker.times(partition=2)] == ["08:06"]


def test_a_topic_that_grows_does_not_move_it(broker: Scheduling) -> None:
    broker.add("* * * * *", "busy", key="k")
    broker.ask(commands.GrowTopic("orders", 8))
    broker.until("2026-11-23T08:02:01")
    assert broker.schedule("busy")["partition"] == 0 and len(broker.times()) == 2


def test_a_paused_one_stays_paused_when_its_topic_is_made_again(broker: Scheduling) -> None:
    broker.add("* * * * *", "busy")
    broker.pause("busy")
    broker.delete()
    broker.create()
    broker.until("2026-11-23T08:05")
    assert broker.times() == [] and broker.schedule("busy")["state"] == "paused"
    broker.resume("busy")
    broker.until("2026-11-23T08:06:01")
    assert [each[11:16] for each in broker.times()] == ["08:06"]


def test_a_schedule_that_cannot_be_read_any_more_is_listed_with_its_trouble_and_can_be_removed(
    broker: Scheduling,
) -> None:
    """Its zone may be missing on another machine: the broker starts all the same."""
    house = broker.engine.broker
    row = (12, 900, "old", "0 9 * * *", "Mars/Olympus", "orders", None, b"", b"x", "one", 1, broker.incarnation(), 0, 1)
    house.catalog.append_now(row)
    again = broker.restart()
    again.until("2026-11-23T09:01")
    found = again.schedule("old")
    assert found["state"] == "waiting" and "Mars/Olympus" in found["trouble"] and found["next_ms"] == 0
    assert again.remove("old").fields.removed and again.names() == []


def answered(broker: Broker, answer: Answer) -> str:
    broker.work()
    return answer.code


def test_add_and_remove_of_one_name_race_to_one_of_both_orders() -> None:
    broker = Scheduling.with_topic(queued=True)
    request = commands.AddSchedule("a", "0 9 * * *", "UTC", "orders", attribute=encode_attribute(None, "k"))
    adding = broker.ask(request, b"x", turn=False)
    removing = broker.ask(commands.RemoveSchedule("a"), turn=False)
    broker.engine.broker.end_turn()
    assert answered(broker, adding) == answered(broker, removing) == "ok"
    assert removing.fields.removed and broker.names() == [] and broker.restart().names() == []


def test_whatever_was_answered_holds_after_any_crash() -> None:
    """A power cut at every change of the disk: what was asked last and not answered may have happened or not. Seeded by
    TFMQ_TEST_SEED.
    """
    broker = Scheduling.with_topic()
    moments: list[tuple[Moment, set[str]]] = []
    known = {"none"}
    broker.disk.after = lambda kind, path: moments.append((Moment(broker.disk), set(known)))
    steps = [
        (broker.add, "active"), (broker.pause, "paused"), (broker.pause, "paused"), (broker.resume, "active"),
        (broker.remove, "none"), (broker.add, "active"), (broker.pause, "paused"), (broker.remove, "none"),
    ]  # fmt: skip
    for step, state in steps:
        known.add(state)
        assert step().code == "ok"
        known = {state}
    chance = random.Random(SEED)
    for moment, allowed in moments:
        for disk in crash_states(moment, scaled(60), chance):
            again = Scheduling(disk, broker.clock)
            found = again.schedule()["state"] if again.names() else "none"
            assert found in allowed
    assert len(moments) > 10
