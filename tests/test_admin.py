"""The blocking admin face against a real broker."""

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import tfmq
from tests.server.owner import Owner
from tfmq.errors import (
    BadRequest,
    ConnectionFailed,
    GroupIncomplete,
    HeuristicOutcome,
    NotAllowed,
    TopicExists,
    UnknownSchedule,
    UnknownTopic,
    UnknownTransaction,
)
from tfmq.message import Ordinal

SECONDS = 20.0


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with tfmq.local_server(tmp_path_factory.mktemp("data")) as address:
        yield address


@pytest.fixture
def admin(servers: str) -> Iterator[tfmq.Admin]:
    with tfmq.Admin(servers) as made:
        yield made


def test_a_topic_from_its_making_to_its_end(admin: tfmq.Admin) -> None:
    made = admin.create_topic("orders", partitions=2)
    assert [each.partition for each in made.partitions] == [0, 1]
    with pytest.raises(TopicExists):
        admin.create_topic("orders")
    assert "orders" in [topic.name for topic in admin.topics()]
    assert admin.grow_topic("orders", 3) == 3
    assert len(admin.topic("orders").partitions) == 3
    assert admin.delete_topic("orders") is True
    with pytest.raises(UnknownTopic):
        admin.topic("orders")


def test_a_running_producer_makes_a_deleted_topic_anew_without_a_failed_send(admin: tfmq.Admin, servers: str) -> None:
    with tfmq.Producer(servers) as producer:
        for number in range(3):
            assert producer.send("deleted", b"%d" % number, key="k").result(SECONDS).offset == 0
            later = producer.send("deleted", b"later", delay=3600).result(SECONDS)
            assert producer.cancel(later.delayed) == "cancelled"
            assert admin.topic("deleted").messages == 1
            admin.delete_topic("deleted")


def test_places_and_groups(admin: tfmq.Admin, servers: str) -> None:
    with tfmq.Producer(servers) as producer:
        results = [producer.send("places", b"%d" % n).result(SECONDS) for n in range(5)]
    offsets = [each.offset for each in results]
    assert admin.locate("places", 0, "earliest").offset == 0
    assert admin.locate("places", 0, Ordinal(3)).offset == offsets[3]
    assert admin.locate("places", 0, offsets[2]).offset == offsets[2]  # type: ignore[arg-type]
    latest = admin.locate("places", 0, "latest")
    assert latest.offset == latest.forced_offset and latest.end_ordinal == 5
    assert admin.reset_group("billing", "places", Ordinal(2), create=True) == {0: offsets[2]}
    assert admin.group("billing").lag == 3
    assert [each.group for each in admin.groups()] == ["billing"]
    assert admin.delete_group("nobody") is False
    assert admin.truncate_before("places", 0, 0) == 0


def test_what_is_refused_is_refused(admin: tfmq.Admin) -> None:
    admin.create_topic("fine")
    with pytest.raises((NotAllowed, tfmq.BadRequest)):
        admin.grow_topic("fine", 1000_000)
    with pytest.raises(UnknownTopic):
        admin.locate("nothing", 0, "earliest")
    assert admin.resume("fine", 0) == "open"


def test_how_the_broker_is(admin: tfmq.Admin) -> None:
    assert admin.ping() > 1_600_000_000_000
    assert admin.status()["partitions"] >= 0


@pytest.mark.usefixtures("impatient_clients")
def test_a_missing_broker_is_reported() -> None:
    with tfmq.Admin("127.0.0.1:1") as admin, pytest.raises(ConnectionFailed, match="start tfmq-server"):
        admin.ping()


def test_transactions_in_doubt_are_found_decided_and_forgotten(admin: tfmq.Admin, servers: str) -> None:
    owner = Owner(servers, "in-doubt")
    epochs = {xid: owner.prepare(xid, b"x", group="shop") for xid in ("one", "two", "three")}
    found = admin.transactions(group="shop")
    assert [(each.xid, each.epoch, each.state) for each in found] == [
        (xid, epoch, "prepared") for xid, epoch in epochs.items()
    ]
    assert found[0].topics == ("in-doubt",) and found[0].messages == 1 and found[0].age_seconds >= 0
    assert [each.xid for each in admin.transactions(group="shop", after=epochs["one"], limit=1)] == ["two"]
    assert admin.transaction("two").state == "prepared"
    assert admin.transaction("nobody's").state == "unknown"
    assert admin.commit_transaction("one") == ("one", epochs["one"], "committed", 0, 0)
    assert admin.rollback_transaction("two").state == "heuristic_rolled_back"
    with pytest.raises(HeuristicOutcome) as reported:
        admin.rollback_transaction("one", heuristic=False)
    assert reported.value.state == "heuristic_committed"
    assert admin.commit_transaction("three", heuristic=False).state == "committed"
    assert [each.state for each in admin.transactions(group="shop")] == ["heuristic_committed", "heuristic_rolled_back"]
    assert [admin.forget_transaction(xid) for xid in ("one", "two", "three")] == [True, True, False]
    with pytest.raises(UnknownTransaction):
        admin.commit_transaction("nobody's")
    assert admin.transactions(group="shop") == []
    assert messages_of(admin, "in-doubt") == 2


def test_a_commit_group_commits_its_members_together(admin: tfmq.Admin, servers: str) -> None:
    owner = Owner(servers, "rows")
    names = [(xid, owner.prepare(xid, b"x", member=("query", 3, "run-1"))) for xid in ("part-1", "part-2")]
    with pytest.raises(GroupIncomplete):
        admin.commit_group("query", 3, "run-1", [*names, ("part-3", 1 << 40)], 3)
    assert admin.commit_group("query", 3, "run-1", names, 2) == ("committed", False, 2, 0)
    assert admin.commit_group("query", 3, "run-1", names, 2).repeated is True
    assert [(each.group, each.sequence, each.rows) for each in admin.commit_groups()] == [("query", 3, 2)]
    assert admin.abort_commit_group("query", 4, "run-2") == "aborted"
    assert [admin.forget_commit_group("query") for _ in range(2)] == [True, False]
    assert messages_of(admin, "rows") == 2


def test_a_schedule_from_its_making_to_its_end(admin: tfmq.Admin) -> None:
    made = admin.schedule("0 9 * * mon-fri", "reports", "go", name="morning", timezone="Europe/Berlin", key="k")
    assert made.next_at is not None and (made.next_at.hour, made.next_at.minute, made.state) == (9, 0, "active")
    assert admin.schedule("0 9 * * mon-fri", "reports", "go", name="morning", timezone="Europe/Berlin", key="k") == made
    whole = admin.describe_schedule("morning")
    assert admin.schedules() == [made._replace(properties=None, message=None)] and whole == made
    assert whole.message is not None and whole.message.payload is not None
    with pytest.raises(NotAllowed, match="tfmq schedule remove morning"):
        admin.schedule("0 10 * * *", "reports", "go", name="morning")
    with pytest.raises(BadRequest, match="no hour"):
        admin.schedule("0 25 * * *", "reports", "go")
    with pytest.raises(BadRequest, match="Europe/Berlin"):
        admin.schedule("0 9 * * *", "reports", "go", timezone="Europe/Atlantis")
    assert admin.pause_schedule("morning").next_at is None
    assert admin.resume_schedule("morning").next_at == made.next_at
    assert admin.status()["schedules"] == {"schedules": 1, "paused": 0, "waiting": 0}
    assert admin.remove_schedule("morning") is True and admin.schedules() == []
    for call in (admin.describe_schedule, admin.pause_schedule, admin.resume_schedule, admin.remove_schedule):
        with pytest.raises(UnknownSchedule):
            call("morning")


def messages_of(admin: tfmq.Admin, topic: str) -> int:
    """What is in the partition, forced or not."""
    return admin.topic(topic).messages


def test_delayed_messages_are_listed_counted_moved_and_taken_back(admin: tfmq.Admin, servers: str) -> None:
    begin = datetime.now(UTC)
    with tfmq.Producer(servers) as producer:
        first = producer.send("reminders", "a", key="42", tag="new", delay=timedelta(hours=1)).result(SECONDS)
        second = producer.send("reminders", "b", deliver_at=begin + timedelta(hours=3)).result(SECONDS)
        many = producer.send_many("others", ["x", "y"], delay=7200).result(SECONDS)
        with producer.transaction() as tx:
            tx.send("reminders", "c", delay=10_800 * 2)
            tx.send("reminders", "now")
        rows = admin.delayed("reminders")
        assert [each.handle for each in rows[:2]] == [first.delayed, second.delayed] and len(rows) == 3
        one = rows[0]
        assert (one.state, one.topic, one.partition, one.key, one.tag) == ("pending", "reminders", 0, "42", "new")
        assert one.due_at is not None and abs(one.due_at - begin - timedelta(hours=1)) < timedelta(minutes=1)
        assert one == admin.describe_delayed(first.delayed)._replace(details=one.details)
        assert [each.handle for each in admin.delayed("others")] == list(many[0].delayed)
        assert len(admin.delayed()) == 5 and len(admin.delayed(limit=2)) == 2
        assert [each.handle for each in admin.delayed(after=first.delayed, limit=1)] == [many[0].delayed[0]]
        assert [each.handle for each in admin.delayed(key="42")] == [first.delayed]
        hours = [begin + timedelta(hours=each) for each in (0, 2, 4)]
        counted = admin.delayed_histogram(hours, "reminders")
        assert (counted.counts, counted.pending) == ((1, 1), 3)
        moved = admin.reschedule(second.delayed, 0)
        assert moved.state == "rescheduled" and moved.handle
        with tfmq.Consumer(servers, topics="reminders", group="reminded") as consumer:
            assert [consumer.__next__().text for _ in range(2)] == ["now", "b"]
        assert admin.cancel(moved) == "delivered"
        assert admin.cancel(first.delayed) == "cancelled" == producer.cancel(first.delayed)
        assert admin.describe_delayed(first.delayed).state == "cancelled"
        with pytest.raises(BadRequest, match="no handle"):
            admin.cancel(first.delayed[:-1])
    assert [each.topic for each in admin.delayed()] == ["others", "others", "reminders"]


def test_delayed_messages_of_the_asyncio_variant_come_when_they_are_due(servers: str) -> None:
    async def story() -> dict[str, float]:
        async with tfmq.aio.Producer(servers) as producer:
            begin = time.monotonic()
            sent = [await producer.send("due", str(delay), delay=delay) for delay in (0.3, 0.1)]
            sent.append(await producer.send("due", "over", deliver_at=1.0))
            assert all(each.delayed and each.offset is None for each in sent)
            async with tfmq.aio.Consumer(servers, topics="due", group="due") as consumer:
                came = dict[str, float]()
                async for message in consumer:
                    came[message.text] = time.monotonic() - begin
                    if len(came) == 3:
                        return came
        raise AssertionError("the consumer ended")

    came = asyncio.run(asyncio.wait_for(story(), SECONDS))
    assert came.keys() == {"over", "0.1", "0.3"}
    assert came["0.1"] > 0.099 and came["0.3"] > 0.299, "never early"


@pytest.mark.long
def test_the_handle_of_one_broker_is_unknown_to_another(servers: str, tmp_path: Path) -> None:
    """Although both count alike: also when it is of a time at which everything was delivered."""
    with tfmq.local_server(tmp_path / "other") as other, tfmq.Producer(other) as there, tfmq.Producer(servers) as here:
        for due in (time.time() + 60, 1.0):
            strange, own = (each.send("alike", "x", deliver_at=due).result(SECONDS).delayed for each in (there, here))
            assert here.cancel(strange) == here.reschedule(strange, 5).state == there.cancel(own) == "unknown"
            assert {here.cancel(own), there.cancel(strange)} <= {"cancelled", "delivered"}
