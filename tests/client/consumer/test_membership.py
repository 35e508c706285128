"""One member of a group: what it says to the broker, and what it makes of the answers."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.client.scripted_broker import Broker, Script, ScriptedLink, consumer_options
from tfmq.client.consumer.membership import ZOOKEEPER_CHECK_SECONDS, Membership, ZooKeeperMembership
from tfmq.client.operation import BackgroundTasks, Event
from tfmq.errors import Busy, NotAllowed
from tfmq.offsets.storage import PartitionName
from tfmq.protocol import commands as wire
from tfmq.zookeeper.group_coordinator import RangeAssignment

FIRST, SECOND = PartitionName("orders", 0), PartitionName("orders", 1)
FAR = 1e9


class Member:
    """A membership whose conversation goes on as time passes."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.script = Script(broker)
        self.link: ScriptedLink = self.script.link
        self.failures: list[Exception] = []
        self.changes = 0
        self.membership = Membership(consumer_options(topics="orders", group="g", session=9), self.link, self._changed)
        self.tasks: BackgroundTasks = self.script.core.tasks
        self.tasks.start(self.membership.run(), self.failures.append)

    def _changed(self) -> None:
        self.changes += 1

    def join(self) -> Member:
        self.membership.subscribe(["orders"])
        self.script.pass_time(0.1)
        return self

    def last(self, kind: type) -> Any:
        return self.broker.sent(kind)[-1]


@pytest.fixture
def broker() -> Broker:
    made = Broker()
    made.create("orders", 2)
    return made


def test_it_joins_once_it_is_known_what_it_wants_and_has_what_it_is_given(broker: Broker) -> None:
    member = Member(broker)
    member.script.pass_time(1)
    assert broker.sent(wire.JoinGroup) == []
    member.join()
    assert broker.sent(wire.JoinGroup)[0].member == member.membership.member_id
    assert member.membership.assigned.keys() == {FIRST, SECOND} == member.membership.owned.keys()
    assert (member.changes, member.membership.generation) == (1, 1)


def test_its_heartbeat_waits_at_the_broker_for_a_third_of_a_session(broker: Broker) -> None:
    member = Member(broker).join()
    assert member.last(wire.Heartbeat).wait_ms == 3000
    member.script.pass_time(9)
    assert 3 <= len(broker.sent(wire.Heartbeat)) <= 5


def test_what_is_revoked_is_held_and_said_to_be_leaving_until_it_is_released(broker: Broker) -> None:
    member = Member(broker).join()
    broker._grants = lambda wishes, generation: [  # type: ignore[method-assign]
        wire.GrantedPartition("orders", broker.topics["orders"][0], 0, generation)
    ]
    member.script.pass_time(4)
    assert member.membership.assigned.keys() == {FIRST}
    assert member.membership.owned.keys() == {FIRST, SECOND}
    assert [each.leaving for each in member.last(wire.Heartbeat).held] == [False, True]
    count = len(broker.sent(wire.Heartbeat))
    member.membership.release([SECOND])
    member.script.pass_time(0.1)
    assert len(broker.sent(wire.Heartbeat)) == count + 1, "it says so at once"
    assert [each.partition for each in member.last(wire.Heartbeat).held] == [0]


def test_other_wishes_are_reported_at_once_and_the_same_ones_are_not(broker: Broker) -> None:
    member = Member(broker).join()
    member.script.pass_time(0.1)
    count = len(broker.sent(wire.Heartbeat))
    member.membership.subscribe(["orders"])
    member.script.pass_time(0.1)
    assert len(broker.sent(wire.Heartbeat)) == count
    member.membership.subscribe(["orders", "bills"], [FIRST])
    member.script.pass_time(0.1)
    reported = [each.subscription for each in broker.sent(wire.Heartbeat)[count:]]
    assert reported[0].only == [("orders", 0)] and reported[1:] in ([], [None])


def test_a_broker_that_has_forgotten_gets_the_topics_again(broker: Broker) -> None:
    member = Member(broker).join()
    answer = broker.on_heartbeat

    def forgetful(request: wire.Heartbeat) -> Any:
        return answer(request) or (wire.HeartbeatReply(1, None, "", True) if request.subscription is None else None)

    broker.on_heartbeat = forgetful  # type: ignore[method-assign]
    member.script.pass_time(4)
    assert [each.subscription is None for each in broker.sent(wire.Heartbeat)][-2:] == [True, False]


def test_a_member_that_was_taken_for_dead_has_nothing_and_joins_again_under_a_new_name(broker: Broker) -> None:
    member = Member(broker).join()
    name = member.membership.member_id
    broker.take_over("g")
    member.script.pass_time(4)
    assert [each.member for each in broker.sent(wire.JoinGroup)] == [name, member.membership.member_id]
    assert member.membership.member_id != name
    assert member.membership.owned == {} and member.membership.joined
    broker.thieves.clear()
    member.script.pass_time(4)
    assert member.membership.assigned.keys() == {FIRST, SECOND}


def test_a_heartbeat_that_fails_in_passing_is_sent_again_and_a_refusal_is_raised(broker: Broker) -> None:
    member = Member(broker).join()
    broker.fail[wire.Heartbeat] = [Busy() for _ in range(3)]
    member.script.pass_time(12)
    assert member.failures == [] and broker.fail[wire.Heartbeat] == []
    broker.fail[wire.Heartbeat] = [NotAllowed()]
    member.script.pass_time(4)
    assert [type(each) for each in member.failures] == [NotAllowed]


def test_a_member_without_a_reply_for_a_session_hands_out_nothing(broker: Broker) -> None:
    member = Member(broker).join()
    assert member.membership.may_deliver()
    broker.down = True
    member.script.pass_time(8)
    assert member.membership.may_deliver()
    member.script.pass_time(4)
    assert not member.membership.may_deliver()
    broker.down = False
    member.script.pass_time(3)
    assert member.membership.may_deliver()
    assert member.membership.assigned.keys() == {FIRST, SECOND}, "the broker kept its place"


def test_the_broker_was_heard_of_when_it_was_asked_not_when_it_answered(broker: Broker) -> None:
    """It may have answered long ago, and have given everything away since."""
    member = Member(broker).join()
    asked_at = member.link.time
    while len(broker.sent(wire.Heartbeat)) < 3:  # the second one waits at the broker, and is answered at its end
        asked_at = member.link.time
        member.script.pass_time(0.05)
    answered_at = member.link.time
    assert answered_at - asked_at < 0.1, "the answer, and the next one"
    broker.down = True
    member.script.pass_time(5.9)
    assert member.membership.may_deliver()
    member.script.pass_time(0.3)
    assert not member.membership.may_deliver(), "asked three seconds before it answered"


def test_without_its_connection_it_hands_out_for_a_tenth_of_its_session(broker: Broker) -> None:
    """The broker gives its partitions away that soon."""
    member = Member(broker).join()
    broker.down, member.link.state = True, "lost"
    member.script.pass_time(0.5)
    assert member.membership.may_deliver()
    member.script.pass_time(0.5)
    assert not member.membership.may_deliver()


def test_a_handover_of_seconds_is_not_logged_and_a_long_one_once(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    member = Member(broker).join()
    for number in range(10):
        broker.note = f"waits for orders-{number} and 1 more, which {number:016x} (c at 127.0.0.1:{number}) releases"
        member.membership._on_connected(None)
        member.script.pass_time(0.1)
    assert member.membership.note == broker.note and broker.note not in caplog.text
    member.script.pass_time(60)
    assert caplog.text.count("This member of group g waits for orders-9") == 1
    broker.note = ""
    member.script.pass_time(60)
    assert caplog.text.count("of group g") == 1


def test_an_idle_member_says_why_once(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    broker._grants = lambda *_: []  # type: ignore[method-assign]
    why = "2 members, 1 partition: tfmq topic grow"
    broker.note = why
    member = Member(broker).join()
    for _ in range(5):  # it is asked often while others come and go
        member.membership._on_connected(None)
        member.script.pass_time(0.1)
    assert "reads nothing" not in caplog.text, "it may pass"
    member.script.pass_time(30)
    assert caplog.text.count(f"reads nothing: {why}") == 1
    assert member.membership.stats()["note"] == why


def test_leaving_ends_it_and_a_forked_child_is_another_member(broker: Broker) -> None:
    member = Member(broker).join()
    name = member.membership.member_id
    member.membership.reset_after_fork()
    assert member.membership.member_id != name and not member.membership.joined
    other = Member(broker).join()
    other.script.run(other.membership.leave(FAR))
    assert broker.sent(wire.LeaveGroup)[0].member == other.membership.member_id
    assert other.membership.owned == {}


# A place in a group that ZooKeeper coordinates, with a coordination by hand; `tests/zookeeper` has the real one.


class Coordination:
    def __init__(self, address: str, group: str, member: str, *, session_seconds: float, on_change: Any) -> None:
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


class Rig:
    def __init__(self) -> None:
        self.link = ScriptedLink(Broker())
        options = consumer_options(
            topics="orders", group="g", coordinator="zookeeper://127.0.0.1:1/meta", offsets="file:/x"
        )
        made = self.membership = ZooKeeperMembership(options, self.link, self._changed, Event.complete)
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
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr("tfmq.zookeeper.group_coordinator.GroupMembership", Coordination)
    made = Rig()
    made.membership.subscribe(["orders"], None, {FIRST: 7, SECOND: 7})
    return made


def test_the_broker_coordinates_unless_a_zookeeper_is_named() -> None:
    made = Script(Broker(), group="g").core.membership
    assert type(made) is Membership


def test_it_asks_for_all_partitions_that_there_are(rig: Rig) -> None:
    assert rig.coordination.asked == [{"orders": [0, 1]}] and rig.membership.joined


def test_a_grant_is_seen_when_it_is_reported_or_a_moment_later(rig: Rig) -> None:
    rig.coordination.granted = {FIRST: 12}
    rig.coordination.changed()
    assert rig.membership.assigned[FIRST] == ("orders", 7, 0, 12)
    assert rig.membership.generation_of(FIRST) == 12
    rig.coordination.granted = {FIRST: 12, SECOND: 15}
    rig.pass_time(ZOOKEEPER_CHECK_SECONDS)
    assert rig.membership.assigned.keys() == {FIRST, SECOND} and rig.changes == 2


def test_what_is_revoked_is_held_until_it_is_released(rig: Rig) -> None:
    rig.coordination.granted = {FIRST: 12, SECOND: 15}
    rig.coordination.changed()
    rig.coordination.revoked = {SECOND}
    rig.coordination.changed()
    assert rig.membership.assigned.keys() == {FIRST} and rig.membership.owned.keys() == {FIRST, SECOND}
    rig.membership.release([SECOND])
    assert rig.coordination.granted == {FIRST: 12} and rig.membership.owned.keys() == {FIRST}


def test_nothing_is_handed_out_after_the_end_of_the_lease(rig: Rig) -> None:
    rig.coordination.until = 5.0
    assert rig.membership.may_deliver()
    rig.coordination.now = 5.0  # the client's own clock stands still while the machine sleeps
    assert not rig.membership.may_deliver()


def test_a_check_before_handing_out_finds_unreported_changes(rig: Rig) -> None:
    rig.coordination.granted = {FIRST: 12}
    rig.membership.may_deliver()
    assert rig.membership.assigned.keys() == {FIRST}


def test_a_lost_session_is_an_empty_share(rig: Rig) -> None:
    rig.coordination.granted = {FIRST: 12}
    rig.coordination.changed()
    rig.coordination.granted = {}
    rig.coordination.changed()
    assert rig.membership.owned == {} and rig.changes == 2


def test_what_makes_it_hopeless_is_raised(rig: Rig) -> None:
    rig.coordination.failure = NotAllowed("planted")
    rig.coordination.changed()
    assert [str(each) for each in rig.failures] == [str(NotAllowed("planted"))]


def test_why_it_is_idle_is_reported(rig: Rig) -> None:
    rig.coordination.idle_reason = "3 members, and no partition is left for this one: tfmq topic grow"
    rig.pass_time(ZOOKEEPER_CHECK_SECONDS)
    assert "topic grow" in rig.membership.stats()["note"]


def test_leaving_closes_it_and_a_forked_child_has_a_name_of_its_own(rig: Rig) -> None:
    name = rig.membership.member_id
    rig.membership.reset_after_fork()
    assert rig.coordination.member == rig.membership.member_id != name
    for _ in rig.membership.leave(FAR):
        raise AssertionError("nothing is waited for")
    assert rig.coordination.closed
