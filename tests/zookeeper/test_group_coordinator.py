"""Invariants of a group that ZooKeeper coordinates: never two owners of a partition, and each has one in the end.

See `tests.zookeeper.simulation` for what befalls the members; a failure prints the seed that brings it back.
"""

import logging
from typing import Any

import pytest

from tests.scale import scaled, seeded
from tests.zookeeper.simulation import SESSION_SECONDS, TOPIC, World
from tfmq.offsets.storage import PartitionName
from tfmq.zookeeper.group_coordinator import (
    NEVER,
    ROUNDS_BEFORE_LOG,
    MembershipStateMachine,
    RangeAssignment,
    RequestSteps,
    range_of,
)
from tfmq.zookeeper.paths import NodePaths
from tfmq.zookeeper.session import ConnectionLost, CreateNode, DeleteNode, GetChildren, GetNode, GetNodes, Node, SetNode

A, B = PartitionName("orders", 0), PartitionName("orders", 1)
OWNER_A = "/meta/consumers/billing/owners/orders/0-0"


@pytest.mark.parametrize("number", range(scaled(1000)))
def test_there_are_never_two_owners_and_no_offset_goes_back(number: int) -> None:
    world = World(seeded("coordinator", number))
    for _ in range(world.random.randint(1, 4)):
        world.join()
    for _ in range(world.random.randint(5, 25)):
        world.run(world.random.expovariate(1 / 4))
        world.befall()
    world.slow, world.down = 0.01, 0.0
    for member in world.alive():
        member.coordinator.set_topics(world.partitions)
    processed = world.processed
    world.run(12 * SESSION_SECONDS)
    members = {member.name: [TOPIC] for member in world.alive()}
    for member in world.alive():
        assert set(member.may_hand_out()) == range_of(member.name, members, world.partitions)
        assert not member.coordinator.waits_for and not member.coordinator.assignment().revoked
    assert world.processed > processed


# One step at a time


class One:
    """A coordinator in session 7, and a ZooKeeper that answers from `nodes`, one request after the other."""

    def __init__(self, **nodes: Node) -> None:
        self.coordinator = MembershipStateMachine(NodePaths("/meta"), "billing", "me", 10.0)
        self.nodes = {"/meta/consumers/billing/" + path.replace("__", "/"): node for path, node in nodes.items()}
        self.asked: list[Any] = []
        self.changes = 100
        self.coordinator.set_topics({"orders": [0, 1]})
        self.coordinator.on_connected(7)

    def run(self, now: float, breaks_at: type | None = None) -> None:
        """All that is due at `now`; where `breaks_at` says, the request is done, and its answer never comes."""
        while (course := self.coordinator.next_steps(now)) is not None:
            if not self.walk(course, now, breaks_at):
                return

    def walk(self, course: RequestSteps, now: float, breaks_at: type | None) -> bool:
        answer = None
        try:
            while True:
                request = course.send(answer)
                self.asked.append(request)
                answer = self.answer(request)
                if breaks_at is not None and isinstance(request, breaks_at):
                    course.throw(ConnectionLost())
                if isinstance(request, CreateNode | SetNode | DeleteNode):
                    self.coordinator.on_write_response(now)
        except StopIteration:
            return True
        except ConnectionLost:
            return False

    def answer(self, request: Any) -> Any:
        self.changes += 1
        if isinstance(request, GetChildren):
            return [path.rpartition("/")[2] for path in self.nodes if path.rpartition("/")[0] == request.path]
        if isinstance(request, GetNodes):
            return [self.nodes.get(path) for path in request.paths]
        node = self.nodes.get(request.path)
        if isinstance(request, CreateNode) and node is None:
            node = self.nodes[request.path] = Node(request.data, 7, self.changes, 0)
            return node
        if isinstance(request, DeleteNode):
            if request.beside in self.nodes:
                self.nodes.pop(request.path, None)
            return request.beside in self.nodes
        if isinstance(request, SetNode):
            return node is not None
        return node if isinstance(request, GetNode) else None

    def granted(self) -> set[PartitionName]:
        return set(self.coordinator.assignment().assigned)


def node(data: bytes, session: int) -> Node:
    return Node(data, session, 1, 0)


def test_it_registers_and_takes_its_range_with_generations_that_grow() -> None:
    one = One()
    one.run(1000.0)
    share = one.coordinator.assignment()
    assert one.nodes["/meta/consumers/billing/ids/me"].data == b"orders"
    assert one.nodes[OWNER_A].data == b"me"
    assert list(share.assigned) == [A, B] and 100 < share.assigned[A] < share.assigned[B]
    assert (share.revoked, share.until) == (frozenset(), 1005.0)


def test_a_cut_stops_handing_out_at_once_and_the_next_answer_goes_on() -> None:
    one = One()
    one.run(1000.0)
    one.coordinator.on_disconnected()
    assert one.coordinator.assignment().until == NEVER and one.coordinator.next_due() == float("inf")
    one.coordinator.on_write_response(1000.5)  # an answer that was on its way proves nothing any more
    assert one.coordinator.assignment().until == NEVER
    one.coordinator.on_connected(7)
    one.run(1001.0)
    assert one.coordinator.assignment().until == 1006.0 and one.granted() == {A, B}


def test_another_session_has_nothing_of_the_one_before() -> None:
    one = One()
    one.run(1000.0)
    one.coordinator.on_connected(8)
    assert one.coordinator.assignment() == RangeAssignment({}, frozenset(), NEVER)


def test_an_earlier_session_of_the_same_member_is_waited_for() -> None:
    one = One(ids__me=node(b"orders", 3))
    one.run(1000.0)
    assert not one.granted() and 1000.0 < one.coordinator.next_due() <= 1005.0
    del one.nodes["/meta/consumers/billing/ids/me"]
    one.coordinator.request_round()
    one.run(1001.0)
    assert one.granted() == {A, B}


def test_what_another_one_has_is_waited_for_and_said(caplog: pytest.LogCaptureFixture) -> None:
    one = One(owners__orders__0_0=node(b"", 0))
    one.nodes[OWNER_A] = node(b"other", 3)
    with caplog.at_level(logging.WARNING, "tfmq.consumer"):
        for look in range(ROUNDS_BEFORE_LOG + 2):
            one.run(1000.0 + 5 * look)
    assert one.granted() == {B}
    assert (
        one.coordinator.waiting_reason()
        == "waiting until their owners finish what they have in work: orders-0 (other)."
    )
    assert len(caplog.messages) == 1 and "orders-0 (other)" in caplog.text
    del one.nodes[OWNER_A]
    one.coordinator.request_round()
    one.run(2000.0)
    assert one.granted() == {A, B} and one.coordinator.waiting_reason() == ""


def test_what_is_not_its_range_any_more_is_revoked_and_removed_when_it_is_released() -> None:
    one = One()
    one.run(1000.0)
    one.nodes["/meta/consumers/billing/ids/aaa"] = node(b"orders", 9)
    one.coordinator.request_round()
    one.run(1001.0)
    assert one.coordinator.assignment().revoked == {A} and one.granted() == {A, B}
    one.run(1100.0)
    assert OWNER_A in one.nodes  # its handler may take as long as it likes
    one.coordinator.release([A])
    assert one.coordinator.assignment().revoked == set() and one.granted() == {B}
    one.run(1101.0)
    assert OWNER_A not in one.nodes


def test_what_is_released_when_it_is_wanted_again_is_taken_anew() -> None:
    one = One()
    one.run(1000.0)
    before = one.coordinator.assignment().assigned[A]
    one.coordinator.release([A])
    one.run(1001.0)
    assert one.coordinator.assignment().assigned[A] > before


def test_members_of_other_topics_take_no_part() -> None:
    one = One(ids__aaa=node(b"payments,refunds", 9))
    one.run(1000.0)
    assert one.granted() == {A, B} and one.coordinator.members == 2


def test_an_owner_node_whose_creation_got_no_reply_is_found_or_removed() -> None:
    one = One()
    one.run(1000.0)
    one.nodes.pop(OWNER_A)
    one.coordinator.request_round()
    one.run(1001.0, breaks_at=CreateNode)
    assert OWNER_A in one.nodes and one.granted() == {B}
    one.nodes["/meta/consumers/billing/ids/aaa"] = node(b"orders", 9)
    one.coordinator.request_round()
    one.run(1002.0)
    assert OWNER_A not in one.nodes  # else its range's new owner would wait without end

    one = One()
    one.run(1000.0)
    one.nodes.pop(OWNER_A)
    one.coordinator.request_round()
    one.run(1001.0, breaks_at=CreateNode)
    one.coordinator.request_round()
    one.run(1002.0)
    assert one.granted() == {A, B}


def test_a_node_that_was_removed_and_made_by_another_is_not_its_own() -> None:
    one = One()
    one.run(1000.0)
    one.nodes[OWNER_A] = node(b"other", 9)
    one.coordinator.request_round()
    one.run(1001.0)
    assert one.granted() == {B} and one.nodes[OWNER_A].data == b"other"


def test_a_member_whose_own_node_is_gone_registers_before_it_removes_anything() -> None:
    one = One()
    one.run(1000.0)
    del one.nodes["/meta/consumers/billing/ids/me"]
    one.coordinator.release([A])
    one.run(1000.1)
    assert OWNER_A in one.nodes
    one.coordinator.request_round()
    one.run(1000.2)
    one.run(1000.3)
    assert one.coordinator.assignment().assigned[A] > 105 and "/meta/consumers/billing/ids/me" in one.nodes


def test_never_is_a_node_of_another_session_removed() -> None:
    one = One()
    one.run(1000.0)
    one.coordinator.release([A])
    course = one.coordinator.next_steps(1001.0)
    assert course is not None
    answer = None
    while not isinstance(request := course.send(answer), GetNode):
        answer = one.answer(request)
    one.nodes[OWNER_A] = node(b"other", 9)  # between the look at all of them and the look at this one
    answer = one.answer(request)
    assert not isinstance(course.send(answer), DeleteNode)
    assert one.nodes[OWNER_A].data == b"other"


def test_new_topics_and_partitions_are_registered_and_taken() -> None:
    one = One()
    one.run(1000.0)
    one.coordinator.set_topics({"orders": [0, 1, 2], "payments": [0]})
    one.run(1001.0)
    assert SetNode("/meta/consumers/billing/ids/me", b"orders,payments") in one.asked
    assert one.granted() == {A, B, PartitionName("orders", 2), PartitionName("payments", 0)}


def test_a_beat_is_due_in_time_and_a_member_that_was_removed_registers_again() -> None:
    one = One()
    one.run(1000.0)
    assert one.coordinator.next_due() == pytest.approx(1000.0 + 10 / 6)
    del one.nodes["/meta/consumers/billing/ids/me"]
    one.run(1002.0)
    assert "/meta/consumers/billing/ids/me" in one.nodes and one.coordinator.assignment().until == 1007.0


def test_a_storm_of_changes_does_not_keep_it_from_its_beats() -> None:
    one = One()
    one.run(1000.0)
    one.coordinator.request_round()
    course = one.coordinator.next_steps(1004.0)
    assert course is not None and isinstance(course.send(None), SetNode)
