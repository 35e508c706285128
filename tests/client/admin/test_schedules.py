"""What is asked about schedules: made with the topic, the same in the same words, listed in pages, ended by id."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from tests.client.fake_broker import CUT, LOSE
from tests.client.fake_schedules import NEXT_MS
from tests.client.rig import Rig
from tfmq.client.admin.admin import AdminCore
from tfmq.client.admin.delayed import ScheduleDescription, ScheduleRequest, datetime_at, schedule_description
from tfmq.errors import BadRequest, MessageTooLarge, UnknownPartition, UnknownSchedule, UnknownTopic
from tfmq.message import Attribute, Message, decode_attribute, encode_attribute
from tfmq.protocol import commands


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def admin(rig: Rig) -> AdminCore:
    return AdminCore(rig.link, 5.0)


WISH = ScheduleRequest("0 9 * * mon-fri", "reports", "go", "morning", "Europe/Berlin", key="k", tag="t")


def test_a_schedule_is_made_and_its_topic_with_it(rig: Rig, admin: AdminCore) -> None:
    found = rig.run(admin.schedule(**WISH._asdict()))
    assert (found.name, found.state, found.next_ms, found.size_bytes) == ("morning", "active", NEXT_MS, 2)
    assert "reports" in rig.broker.incarnations
    (_, sent) = rig.broker.schedules["morning"]
    assert sent[:5] == ("morning", "0 9 * * mon-fri", "Europe/Berlin", "reports", None)
    assert decode_attribute(sent.attribute) == Attribute(None, "k", "t", {})
    assert found.details == {"news": "of a later release"}


def test_a_wish_that_makes_no_sense_makes_no_topic(rig: Rig, admin: AdminCore) -> None:
    with pytest.raises(BadRequest, match="no cron"):
        rig.run(admin.schedule(**WISH._replace(cron="daily")._asdict()))
    assert rig.broker.incarnations == {}
    rig.run(admin.schedule(**WISH._asdict()))
    rig.broker.plan(commands.AddSchedule, UnknownPartition("There is no partition 9."))
    with pytest.raises(UnknownPartition):
        rig.run(admin.schedule(**WISH._replace(name="other", partition=9)._asdict()))


def test_a_time_zone_may_be_its_name_or_the_zone_itself(rig: Rig, admin: AdminCore) -> None:
    for name, zone in (("a", ZoneInfo("Europe/Berlin")), ("b", "Europe/Berlin"), ("c", UTC)):
        rig.run(admin.schedule(**WISH._replace(name=name, timezone=zone)._asdict()))
    assert [rig.broker.schedules[name][1].timezone for name in "abc"] == ["Europe/Berlin", "Europe/Berlin", "UTC"]
    for wrong in (timezone(timedelta(hours=1)), None, 1):
        with pytest.raises(TypeError, match="A time zone is its name"):
            rig.run(admin.schedule(**WISH._replace(timezone=wrong)._asdict()))


def test_what_no_broker_takes_does_not_travel(rig: Rig, admin: AdminCore) -> None:
    with pytest.raises(MessageTooLarge, match="schedule's payload has 1048577 bytes"):
        rig.run(admin.schedule(**WISH._replace(payload=bytes((1 << 20) + 1))._asdict()))
    with pytest.raises(BadRequest, match="field topic must be a name"):
        rig.run(admin.schedule(**WISH._replace(topic="../etc", name=None)._asdict()))
    assert not rig.broker.requests


def test_where_topics_are_not_made_by_themselves_that_is_said(rig: Rig, admin: AdminCore) -> None:
    rig.broker.auto_create = False
    with pytest.raises(UnknownTopic, match="tfmq topic create"):
        rig.run(admin.schedule(**WISH._asdict()))


@pytest.mark.parametrize("action", [LOSE, CUT])
def test_an_answer_that_was_lost_is_asked_for_again_and_makes_no_second_one(
    rig: Rig, admin: AdminCore, action: str
) -> None:
    rig.broker.plan(commands.AddSchedule, action)
    wish = WISH._replace(name=None)
    found = rig.run(admin.schedule(**wish._asdict()))
    assert list(rig.broker.schedules) == [found.name]
    assert rig.run(admin.schedule(**wish._asdict())) == found


def test_without_a_name_the_same_words_have_the_same_one_and_others_another() -> None:
    unnamed = WISH._replace(name=None)
    (first, _), (again, _) = unnamed.request(), unnamed.request()
    assert first.name == again.name and first.name.startswith("reports-")
    changes: list[dict[str, Any]] = [{"payload": "stop"}, {"cron": "0 8 * * *"}, {"key": "x"}, {"payload": None}]
    changes += [{"timezone": "UTC"}, {"misfire": "all"}, {"partition": 1}, {"properties": {"a": "b"}}]
    assert len({unnamed._replace(**each).request()[0].name for each in [{}, *changes]}) == len(changes) + 1
    long, _ = unnamed._replace(topic="t" * 249).request()
    assert len(long.name) == 209


def test_a_payload_is_bytes_text_or_none_for_a_tombstone() -> None:
    for payload, body, tombstone in (
        (b"x", b"x", False),
        ("ü", "ü".encode(), False),
        (None, b"", True),
        ("", b"", False),
    ):
        request, sent = WISH._replace(payload=payload).request()
        assert (sent, request.tombstone) == (body, tombstone)
    with pytest.raises(TypeError, match="codec"):
        WISH._replace(payload={"n": 1}).request()
    with pytest.raises(MessageTooLarge):
        WISH._replace(tag="t" * 300).request()


def test_all_are_listed_in_pages(rig: Rig, admin: AdminCore) -> None:
    assert rig.run(admin.schedules()) == []
    for name in "cabed":
        rig.run(admin.schedule(**WISH._replace(name=name)._asdict()))
    assert [each.name for each in rig.run(admin.schedules())] == list("abcde")


def test_one_is_described_paused_resumed_and_removed(rig: Rig, admin: AdminCore) -> None:
    rig.run(admin.schedule(**WISH._asdict()))
    found = rig.run(admin.describe_schedule("morning"))
    assert found.cron == WISH.cron and found.message == Message(b"go", "k", "t", {})
    assert rig.run(admin.pause_schedule("morning")).state == "paused"
    assert rig.run(admin.resume_schedule("morning")).state == "active"
    assert rig.run(admin.remove_schedule("morning")) is True
    for call in (admin.describe_schedule, admin.pause_schedule, admin.remove_schedule):
        with pytest.raises(UnknownSchedule):
            rig.run(call("morning"))


def test_a_repeated_removal_cannot_hit_one_that_was_made_anew(rig: Rig, admin: AdminCore) -> None:
    rig.run(admin.schedule(**WISH._asdict()))
    broker = rig.broker
    removed = broker.remove_schedule

    def made_anew(request: commands.RemoveSchedule) -> Any:
        removed(request)
        broker.remove_schedule = removed  # type: ignore[method-assign]
        broker.add_schedule(WISH.request()[0])
        return commands.RemoveScheduleReply(True)

    broker.remove_schedule = made_anew  # type: ignore[method-assign]
    broker.plan(commands.RemoveSchedule, LOSE)
    assert rig.run(admin.remove_schedule("morning")) is False
    assert list(broker.schedules) == ["morning"]


def test_a_name_that_is_none_is_refused(rig: Rig, admin: AdminCore) -> None:
    for name in ("", "../etc", "a b"):
        with pytest.raises(BadRequest):
            rig.run(admin.schedule(**WISH._replace(name=name)._asdict()))


def test_moments_are_reported_as_the_clocks_of_the_zone_show_them() -> None:
    found = ScheduleDescription("a", timezone="Europe/Berlin", next_ms=NEXT_MS)
    assert found.next_at == datetime(2026, 11, 23, 10, tzinfo=ZoneInfo("Europe/Berlin")) and found.last_at is None
    assert found.next_at is not None and found.next_at.isoformat() == "2026-11-23T10:00:00+01:00"
    assert datetime_at(NEXT_MS, "Mars/Olympus") == datetime_at(NEXT_MS, "UTC") == datetime(2026, 11, 23, 9, tzinfo=UTC)
    assert datetime_at(1 << 62, "UTC") is None


def test_what_a_broker_leaves_out_has_a_default() -> None:
    assert schedule_description({"name": "a"}) == ScheduleDescription("a")


def test_properties_are_those_that_were_given_and_never_their_number() -> None:
    packed = encode_attribute(None, None, None, {"n": "1"})
    assert schedule_description({"name": "a", "properties": 1}).properties is None, "as in lists"
    whole = schedule_description({"name": "a", "properties": 1, "attribute": packed, "payload": b"x"})
    assert whole.properties == {"n": "1"} and whole.details == {}
    bare = schedule_description({"name": "a", "properties": 0, "attribute": b"", "payload": b"x"})
    assert bare.properties == {}
