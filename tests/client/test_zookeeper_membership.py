"""A place in a group that ZooKeeper coordinates, with a coordination by hand; `tests/zookeeper` has the real one."""

from typing import Any

import pytest

from tests.client.scripted import Broker, ScriptedLink
from tfmq.client.consumer.membership import (
    ZOOKEEPER_CHECK_SECONDS,
    Membership,
    ZooKeeperMembership,
    create_membership,
)
from tfmq.client.consumer.options import consumer_options
from tfmq.client.operation import BackgroundTasks, Event
from tfmq.errors import NotAllowed
from tfmq.offsets.storage import PartitionName
from tfmq.zookeeper.group_coordinator import RangeAssignment

FIRST, SECOND = PartitionName("orders", 0), PartitionName("orders", 1)
FAR = 1e9


class Coordination:
    def __init__(
        self, address: str, group: str, member: str, *, session_seconds: float, on_change: Any
    ) -> None:
        self.member, self.changed = member, on_change
        self.granted: dict[PartitionName, int] = {}
        self.revoked: set[PartitionName] = set()
        self.until, self.now = FAR, 0.0
        self.asked: list[Any] = []
        self.failure: Exception | None = None
        self.idle_reason, self.generation, self.closed = "", 0, False

    def set_topics(self, partitions: Any) -> None:
        self.asked.append(partitions)

    def assignment(self) -> RangeAssignment:
        return RangeAssignment(dict(self.granted), frozenset(self.revoked), self.until)

    def may_deliver(self) -> bool:
        return self.now < self.until

    def release(self, names: Any) -> None:
        for name in names:
            del self.granted[name]
            self.revoked.discard(name)

    def restart_as(self, member: str) -> None:
        self.member = member

    def close(self, seconds: float) -> None:
        self.closed = True


class Desk:
    def __init__(self) -> None:
        self.link = ScriptedLink(Broker())
        options = consumer_options(
            topics="orders", group="g", coordinator="zookeeper://127.0.0.1:1/meta", offsets="file:/x"
        )
        made = create_membership(options, self.link, self._changed, Event.complete)
        assert isinstance(made, ZooKeeperMembership)
        self.membership = made
        self.changes = 0
        self.failures: list[Exception] = []
        self.tasks = BackgroundTasks(self.link.now)
        self.tasks.start(made.run(), self.failures.append)

    def _changed(self) -> None:
        self.changes += 1

    @property
    def coordination(self) -> Any:
        return self.membership._coordination

    def pass_time(self, seconds: float) -> None:
        self.link.time += seconds
        self.tasks.tick()


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr("tfmq.zookeeper.group_coordinator.GroupMembership", Coordination)
    made = Desk()
    made.membership.subscribe(["orders"], None, {FIRST: 7, SECOND: 7})
    return made


def test_the_broker_coordinates_unless_a_zookeeper_is_named() -> None:
    link = ScriptedLink(Broker())
    made = create_membership(consumer_options(topics="orders", group="g"), link, lambda: None, Event.complete)
    assert type(made) is Membership


def test_it_asks_for_all_partitions_that_there_are(desk: Desk) -> None:
    assert desk.coordination.asked == [{"orders": [0, 1]}] and desk.membership.joined


def test_a_grant_is_seen_when_it_is_told_or_a_moment_later(desk: Desk) -> None:
    desk.coordination.granted = {FIRST: 12}
    desk.coordination.changed()
    assert desk.membership.assigned[FIRST] == ("orders", 7, 0, 12)
    assert desk.membership.generation_of(FIRST) == 12
    desk.coordination.granted = {FIRST: 12, SECOND: 15}
    desk.pass_time(ZOOKEEPER_CHECK_SECONDS)
    assert desk.membership.assigned.keys() == {FIRST, SECOND} and desk.changes == 2


def test_what_is_revoked_is_held_until_it_is_released(desk: Desk) -> None:
    desk.coordination.granted = {FIRST: 12, SECOND: 15}
    desk.coordination.changed()
    desk.coordination.revoked = {SECOND}
    desk.coordination.changed()
    assert desk.membership.assigned.keys() == {FIRST} and desk.membership.owned.keys() == {FIRST, SECOND}
    desk.membership.release([SECOND])
    assert desk.coordination.granted == {FIRST: 12} and desk.membership.owned.keys() == {FIRST}


def test_nothing_is_handed_out_behind_the_end_of_the_lease(desk: Desk) -> None:
    desk.coordination.until = 5.0
    assert desk.membership.may_deliver()
    desk.coordination.now = 5.0  # the client's own clock stands still while the machine sleeps
    assert not desk.membership.may_deliver()


def test_a_look_before_handing_out_finds_what_nobody_told(desk: Desk) -> None:
    desk.coordination.granted = {FIRST: 12}
    desk.membership.may_deliver()
    assert desk.membership.assigned.keys() == {FIRST}


def test_a_lost_session_is_an_empty_share(desk: Desk) -> None:
    desk.coordination.granted = {FIRST: 12}
    desk.coordination.changed()
    desk.coordination.granted = {}
    desk.coordination.changed()
    assert desk.membership.owned == {} and desk.changes == 2


def test_what_makes_it_hopeless_is_raised(desk: Desk) -> None:
    desk.coordination.failure = NotAllowed("planted")
    desk.coordination.changed()
    assert [str(each) for each in desk.failures] == [str(NotAllowed("planted"))]


def test_why_it_is_idle_is_told(desk: Desk) -> None:
    desk.coordination.idle_reason = "3 members, and no partition is left for this one: tfmq topic grow"
    desk.pass_time(ZOOKEEPER_CHECK_SECONDS)
    assert "topic grow" in desk.membership.stats()["note"]


def test_leaving_closes_it_and_a_forked_child_has_a_name_of_its_own(desk: Desk) -> None:
    name = desk.membership.member_id
    desk.membership.reset_after_fork()
    assert desk.coordination.member == desk.membership.member_id != name
    for _ in desk.membership.leave(FAR):
        raise AssertionError("nothing is waited for")
    assert desk.coordination.closed
