"""One live member a group, fenced by a generation that never comes twice; offsets never go back."""

import pytest

from tests.broker.helpers import Broker, Session
from tfmq.protocol.commands import (
    CommitOffsets,
    DescribeGroup,
    GroupOffset,
    Heartbeat,
    JoinGroup,
    LeaveGroup,
    ListGroups,
    ResetGroup,
)


@pytest.fixture
def broker() -> Broker:
    made = Broker()
    made.create()
    return made


def test_the_first_who_joins_gets_a_name_and_a_generation(broker: Broker) -> None:
    first = broker.join()
    assert first.member and first.generation == 1
    assert broker.join("another").generation == 2


def test_a_second_live_member_is_refused_by_the_name_of_the_first(broker: Broker) -> None:
    first = broker.join(session=Session("ada at 127.0.0.1"))
    second = broker.join(session=Session())
    assert second.code == "not_allowed"
    assert first.member in str(second.failure) and "ada" in str(second.failure)


def test_a_member_whose_connection_is_gone_is_replaced_at_once_and_fenced(broker: Broker) -> None:
    session = Session()
    first = broker.join(session=session)
    session.close()
    second = broker.join()
    assert second.generation > first.generation
    assert broker.commit(first, 10).code == "fenced"
    assert broker.commit(second, 20).committed == 1
    assert broker.saved() == {("orders", 0): 20}


def test_a_silent_member_is_replaced_after_its_session_time(broker: Broker) -> None:
    first = broker.ask(JoinGroup("billing", "", ["orders"], 5000))
    broker.advance(4)
    assert broker.ask(Heartbeat("billing", first.member, first.generation, [])).assigned is None
    broker.advance(4)
    assert broker.join().code == "not_allowed"
    broker.advance(1.1)
    assert broker.join().code == "ok"


def test_a_member_comes_back_if_nobody_took_over(broker: Broker) -> None:
    session, again = Session(), Session()
    first = broker.join(session=session)
    session.close()
    assert broker.ask(Heartbeat("billing", first.member, first.generation, []), session=again).code == "ok"
    assert broker.join(session=Session()).code == "not_allowed"
    assert broker.commit(first, 10).code == "ok"


def test_the_same_member_that_joins_again_gets_a_new_generation(broker: Broker) -> None:
    first = broker.join()
    second = broker.join(member=first.member, session=Session())
    assert second.member == first.member and second.generation > first.generation
    assert broker.commit(first, 10).code == "fenced"


def test_who_leaves_makes_room_at_once(broker: Broker) -> None:
    first = broker.join()
    assert broker.ask(LeaveGroup("billing", first.member, first.generation)).left is True
    second = broker.join(session=Session())
    assert second.code == "ok"
    assert broker.ask(LeaveGroup("billing", first.member, first.generation)).left is False


def test_generations_are_never_given_twice_also_over_a_restart(broker: Broker) -> None:
    first = broker.join()
    again = broker.restart()
    assert again.join().generation > first.generation


def test_a_member_goes_on_after_the_broker_was_started_again(broker: Broker) -> None:
    first = broker.join()
    again = broker.restart()
    assert again.commit(first, 10).code == "ok"
    assert again.join(session=Session()).code == "not_allowed"


def test_nobody_commits_without_having_joined(broker: Broker) -> None:
    offsets = [GroupOffset("orders", broker.incarnation(), 0, 1)]
    for member, generation in (("", 0), ("ghost", 0), ("", 1)):
        assert broker.ask(CommitOffsets("billing", member, generation, offsets)).code == "fenced"


def test_a_join_that_could_not_be_forced_gives_nothing_away() -> None:
    broker = Broker(queued=True)
    broker.create()
    first = broker.join()
    broker.work()
    assert first.code == "ok"
    broker.disk.faults.fail("force", path="meta")
    failed = broker.join(member=first.member)
    broker.work()
    assert failed.code == "storage_stopped"
    assert broker.commit(first, 10).code != "ok"


def test_a_takeover_fences_from_the_moment_it_is_asked_for() -> None:
    broker = Broker(queued=True)
    broker.create()
    session = Session()
    first = broker.join(session=session)
    broker.work()
    session.close()
    second = broker.join(session=Session())
    late = broker.commit(first, 10)
    broker.work()
    assert (second.code, late.code) == ("ok", "fenced")


def test_groups_are_listed_and_described(broker: Broker) -> None:
    producer = broker.lease()
    ends = [broker.produce(producer, 2 * n, [b"x", b"y"]) for n in range(3)]
    member = broker.join()
    broker.commit(member, ends[1].positions[0][1])
    (listed,) = broker.ask(ListGroups()).groups
    assert (listed["group"], listed["live"], listed["partitions"]) == ("billing", True, 1)
    description = broker.ask(DescribeGroup("billing")).description
    assert description["members"][0]["member"] == member.member
    assert description["generation"] == member.generation
    assert description["offsets"][0]["lag"] == 4
    assert broker.ask(DescribeGroup("nobody")).description["members"] == []


def test_a_reset_needs_a_group_without_live_member_and_fences_the_last_one(broker: Broker) -> None:
    member = broker.join()
    offsets = [GroupOffset("orders", 0, 0, 77)]
    assert broker.ask(ResetGroup("billing", offsets)).code == "not_allowed"
    broker.session.close()
    broker.session = Session()
    assert broker.ask(ResetGroup("billing", offsets)).committed == 1
    assert broker.saved() == {("orders", 0): 77}
    assert broker.commit(member, 10).code == "fenced"
    assert broker.ask(ResetGroup("billing", [])).code == "bad_request"


def test_groups_are_bounded() -> None:
    broker = Broker(limits__groups=2)
    broker.create()
    assert [broker.join(name).code for name in ("a", "b", "c")] == ["ok", "ok", "not_allowed"]
    broker.session.close()
    broker.session = Session()
    assert broker.join("a").code == "ok"
