"""Groups of several members: who gets what, what stays, what is given up, and who may save."""

import pytest

from tests.broker.group_member import Seat, seats, settle
from tests.broker.helpers import Broker
from tfmq.protocol.commands import (
    CommitOffsets,
    DeleteGroup,
    DescribeGroup,
    GroupOffset,
    Heartbeat,
    JoinGroup,
    LeaveGroup,
    ResetGroup,
)


@pytest.fixture
def broker() -> Broker:
    made = Broker()
    made.create(partitions=10)
    return made


def owners(broker: Broker, group: str = "billing") -> dict[int, str]:
    """By number, as the catalog has them."""
    row = broker.engine.broker.catalog.state.groups[group]
    return {key[1]: owner.member for key, owner in sorted(row.owners.items())}


def described(broker: Broker, group: str = "billing") -> dict[str, dict[str, object]]:
    """The members by name."""
    found = broker.ask(DescribeGroup(group)).description["members"]
    return {each["member"]: each for each in found}


# Joining


def test_the_first_who_joins_gets_a_name_a_generation_and_everything(broker: Broker) -> None:
    first = broker.join()
    assert first.member and first.generation > 0 and first.note == ""
    assert [row[2] for row in first.partitions] == list(range(10))
    assert all(row[3] <= first.generation for row in first.partitions)
    assert broker.join("another").generation > first.generation


def test_a_member_may_choose_its_name_and_a_repeated_join_makes_no_second_one(broker: Broker) -> None:
    first = Seat(broker, "ada")
    first.join()
    first.connect()
    first.join()
    assert first.name == "ada" and first.numbers == list(range(10))
    assert list(described(broker)) == ["ada"]


def test_a_second_member_waits_for_what_the_first_is_to_give_up(broker: Broker) -> None:
    first, second = Seat(broker, "ada"), Seat(broker, "bob")
    first.join()
    second.join()
    assert second.held == {}
    first.beat()
    assert first.numbers == [0, 1, 2, 3, 4] and len(first.held) == 10
    second.beat()
    assert second.held == {}
    first.finish()
    second.beat()
    assert second.numbers == [5, 6, 7, 8, 9]


def test_a_member_that_keeps_a_partition_is_not_disturbed(broker: Broker) -> None:
    first, second, third = seats(broker, "ada bob eve")
    before = {**first.held, **second.held, **third.held}
    assert len(before) == 10
    fourth = Seat(broker, "joe")
    fourth.join()
    settle(first, second, third, fourth)
    after = {**first.held, **second.held, **third.held, **fourth.held}
    moved = {name for name in before if after[name] != before[name]}
    assert moved == set(fourth.held) and len(moved) == 2


def test_a_handler_of_minutes_keeps_its_partition_as_long_as_its_heartbeats_come(broker: Broker) -> None:
    first, second = Seat(broker, "ada"), Seat(broker, "bob")
    first.join()
    second.join()
    first.beat()
    leaving = set(first.leaving)
    for _ in range(60):
        waiting = [first.ask_beat(10_000), second.ask_beat(10_000)]
        broker.advance(10)
        assert [answer.assigned for answer in waiting] == [None, None]
        second.take(waiting[1])
    assert "releases when its messages in work are finished" in second.note and "ada" in second.note
    assert first.commit(77, *leaving).fenced == []
    first.finish()
    second.beat()
    assert set(second.held) == leaving


def test_what_is_revoked_and_given_back_before_it_was_let_go_stays_under_its_grant(broker: Broker) -> None:
    first, second = Seat(broker, "ada"), Seat(broker, "bob")
    first.join()
    before = dict(first.held)
    second.join()
    first.beat()
    assert len(first.leaving) == 5
    second.leave()
    first.beat()
    assert first.held == before and not first.leaving


def test_who_leaves_makes_room_at_once(broker: Broker) -> None:
    first, second = seats(broker, "ada bob")
    waiting = second.ask_beat(10_000)
    assert first.leave().left is True
    assert len(waiting.assigned) == 10
    assert first.leave().left is False
    assert broker.ask(LeaveGroup("billing", "ghost", 99)).left is False


def test_the_last_member_that_leaves_releases_its_partitions_in_the_catalog_too(broker: Broker) -> None:
    """An expired member that returns still owns its partitions; one that has left does not, nor after a restart."""
    (only,) = seats(broker, "ada")
    assert owners(broker) == dict.fromkeys(range(10), "ada")
    name = min(only.held)
    assert only.leave().left is True
    assert owners(broker) == {}
    for restart in (False, True):
        only.connect(broker.restart() if restart else broker)
        assert (only.ask_beat().code, only.commit(10, name).code, only.leave().left) == ("fenced", "fenced", False)
        assert owners(only.broker) == {}


# Topics


def test_new_partitions_are_assigned_and_deleted_ones_have_no_owner(broker: Broker) -> None:
    from tfmq.protocol.commands import GrowTopic

    first, second = seats(broker, "ada bob")
    waiting = [first.ask_beat(10_000), second.ask_beat(10_000)]
    assert broker.ask(GrowTopic("orders", 12)).code == "ok"
    first.take(waiting[0])
    second.take(waiting[1])
    assert len(first.numbers) == len(second.numbers) == 6
    waiting = [first.ask_beat(10_000)]
    broker.delete()
    assert waiting[0].assigned == []
    broker.create(partitions=2)
    settle(first, second)
    assert len(first.numbers) == len(second.numbers) == 1


@pytest.mark.long
def test_a_topic_is_waited_for() -> None:
    broker = Broker()
    seat = Seat(broker, "ada", topics="orders bills")
    assert seat.join().partitions == []
    waiting = seat.ask_beat(10_000)
    broker.create("bills", partitions=2)
    assert [row[0] for row in waiting.assigned] == ["bills", "bills"]


def test_a_member_that_wants_other_topics_gives_up_what_it_does_not_want(broker: Broker) -> None:
    broker.create("bills")
    first, second = seats(broker, "ada bob")
    first.wishes = first.wishes._replace(topics=["bills"])
    first.forgotten = True
    first.beat()
    assert first.leaving == set(first.held)
    first.finish()
    settle(first, second)
    assert first.share == [("bills", 0)] and second.numbers == list(range(10))


def test_members_may_ask_for_single_partitions(broker: Broker) -> None:
    first = Seat(broker, "ada", only=[("orders", 3), ("orders", 4)])
    second = Seat(broker, "bob", only=[("orders", 4)])
    for each in (first, second):
        each.join()
    settle(first, second)
    assert (first.numbers, second.numbers) == ([3], [4])


def test_the_strategy_is_that_of_the_oldest_member(broker: Broker) -> None:
    first = Seat(broker, "zoe", strategy="range")
    second = Seat(broker, "ada", strategy="sticky")
    first.join()
    second.join()
    settle(first, second)
    assert (second.numbers, first.numbers) == ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9])
    assert broker.ask(DescribeGroup("billing")).description["strategy"] == "range"
    assert Seat(broker, "eve", strategy="fair").ask_join().code == "bad_request"


# Death


def test_a_member_that_lost_everything_joins_again(broker: Broker) -> None:
    first, second = seats(broker, "ada bob", session_ms=5000)
    broker.advance(4)
    second.beat()
    broker.advance(2)
    second.beat()
    assert first.commit(10).code == "fenced"
    first.join()
    settle(first, second)
    assert len(first.numbers) == len(second.numbers) == 5


def test_a_member_that_joins_again_has_lost_what_it_had(broker: Broker) -> None:
    """Whatever of the earlier life is still on its way is fenced."""
    first = Seat(broker, "ada")
    first.join()
    old, held = first.generation, dict(first.held)
    first.join()
    assert first.generation > old and first.held.keys() == held.keys()
    late = CommitOffsets("billing", "ada", old, [GroupOffset("orders", broker.incarnation(), 0, 5)])
    assert broker.ask(late).code == "fenced"
    assert broker.ask(Heartbeat("billing", "ada", old, [])).code == "fenced"
    assert broker.ask(LeaveGroup("billing", "ada", old)).left is False
    assert first.commit(7).committed == 10


# Saving


# What is reported is on the disk


def test_a_grant_is_on_the_disk_before_it_is_reported() -> None:
    broker = Broker(queued=True)
    broker.create(partitions=4)
    first, second = Seat(broker, "ada"), Seat(broker, "bob")
    for seat in (first, second):
        answer = seat.ask_join()
        assert answer.code == "waiting"
        broker.work()
        seat.take_join(answer)
    first.beat()
    waiting = second.ask_beat(10_000)
    first.finish()
    assert waiting.code == "waiting"
    lost = broker.crashed(broker.disk.crash(keep="nothing"))
    assert set(owners(lost).values()) == {"ada"}
    broker.work()
    assert len(waiting.assigned) == 2
    reported = broker.crashed(broker.disk.crash(keep="nothing"))
    assert sorted(owners(reported).values()) == ["ada", "ada", "bob", "bob"]


def test_a_join_that_could_not_be_fsynced_gives_nothing_away() -> None:
    broker = Broker(queued=True)
    broker.create()
    broker.disk.faults.fail("force", path="meta")
    failed = Seat(broker, "ada").ask_join()
    broker.work()
    assert failed.code == "storage_stopped"
    again = Seat(broker, "bob").ask_join()
    broker.work()
    assert again.code == "storage_stopped"


def test_a_grant_that_the_full_disk_refused_is_tried_again_and_no_other_member_has_it_meanwhile() -> None:
    broker = Broker()
    broker.create(partitions=2)
    first, second = Seat(broker, "ada"), Seat(broker, "bob")
    first.join()
    second.join()
    first.beat()
    broker.disk.faults.fail("write", error=28, path=".catalog")
    first.finish()
    second.beat()
    assert second.numbers == []
    broker.advance(1.1)
    second.beat()
    assert len(second.numbers) == len(first.numbers) == 1


@pytest.mark.parametrize("how", ["leave", "expire", "delete", "reset"])
def test_the_end_of_the_last_member_on_a_full_disk_is_in_the_catalog_once_there_is_space(
    broker: Broker, how: str
) -> None:
    """So that no start waits for that member. No group is kept in memory for it after that."""
    (only,) = seats(broker, "ada")
    full = broker.disk.faults.fail("write", error=28, times=None, path=".catalog")
    if how == "leave":
        assert only.leave().left is True
    else:
        only.disconnect()
        if how == "expire":
            broker.advance(31)
        else:
            change = (
                DeleteGroup("billing") if how == "delete" else ResetGroup("billing", [GroupOffset("orders", 0, 0, 77)])
            )
            assert broker.ask(change).code == "disk_full"
    for _ in range(3):
        broker.advance(1.1)
    row = broker.engine.broker.catalog.state.groups["billing"]
    assert [(each.member, each.expired) for each in row.owners.values()] == [("ada", False)] * 10
    assert full.hit >= 3, "it is tried again and again"
    broker.disk.faults.clear()
    broker.advance(1.1)
    expected = [("ada", True)] * 10 if how == "expire" else []
    assert [(each.member, each.expired) for each in row.owners.values()] == expected
    broker.advance(1.1)
    assert broker.engine.broker.group_coordinator.find("billing") is None
    second = Seat(broker.restart(), "bob")
    second.join()
    assert second.numbers == list(range(10))


def test_many_changes_of_a_turn_are_one_entry(broker: Broker) -> None:
    members = [Seat(broker, f"m{n}") for n in range(12)]
    before = broker.engine.broker.catalog.log.count
    answers = [seat.ask(JoinGroup("billing", seat.name, ["orders"]), turn=seat is members[-1]) for seat in members]
    assert [answer.code for answer in answers] == ["ok"] * 12
    assert broker.engine.broker.catalog.log.count == before + 1
    assert sorted(len(answer.partitions) for answer in answers) == [0, 0] + [1] * 10


# A restart of the broker


def test_generations_are_never_given_twice_also_over_a_restart(broker: Broker) -> None:
    first = broker.join()
    again = broker.restart()
    assert again.join().generation > first.generation


def test_owners_go_on_after_the_broker_was_started_again(broker: Broker) -> None:
    members = seats(broker, "ada bob eve")
    held = [dict(each.held) for each in members]
    again = broker.restart()
    stranger = Seat(again, "joe")
    stranger.join()
    assert stranger.held == {}
    assert stranger.note == "3 members have up to 30 s to reconnect after the start of the broker: ada, bob, eve"
    for each in members:
        each.connect(again)
        assert each.commit(10).fenced == []
    for each, before in zip(members, held, strict=True):
        each.beat()
        assert each.held == before
    settle(*members, stranger)
    assert sorted(len(each.numbers) for each in (*members, stranger)) == [2, 2, 3, 3]


@pytest.mark.parametrize("strategy", ["sticky", "range", "consistent_hash"])
def test_nothing_moves_while_members_come_back_one_by_one(broker: Broker, strategy: str) -> None:
    members = seats(broker, "ada bob eve joe", strategy=strategy)
    held = [dict(each.held) for each in members]
    again = broker.restart()
    for each in reversed(members):
        each.connect(again)
        each.beat()
    settle(*members)
    assert [each.held for each in members] == held


def test_who_does_not_come_back_after_a_restart_keeps_its_share_for_its_session_time(broker: Broker) -> None:
    first, second = seats(broker, "ada bob", session_ms=8000)
    again = broker.restart()
    second.connect(again)
    for _ in range(3):
        second.beat()
        assert len(second.numbers) == 5
        again.advance(2)
    again.advance(2.1)
    second.beat()
    assert second.numbers == list(range(10))
    first.connect(again)
    assert first.ask_beat().code == "fenced"


def test_a_member_that_expired_stays_expired_over_a_restart(broker: Broker) -> None:
    (first,) = seats(broker, "ada")
    first.disconnect()
    broker.advance(31)
    again = broker.restart()
    assert described(again) == {}
    second = Seat(again, "bob")
    second.join()
    assert second.numbers == list(range(10))
    first.connect(again)
    assert first.ask_beat().code == first.commit(10).code == "fenced"


def test_a_member_that_expired_before_a_restart_may_return_to_partitions_without_an_owner(broker: Broker) -> None:
    (first,) = seats(broker, "ada", session_ms=20_000)
    first.disconnect()
    broker.advance(31)
    first.connect(broker.restart())
    assert first.commit(10).committed == 10 and first.beat().forgotten
    assert described(first.broker)["ada"]["session_ms"] == 20_000


def test_a_member_that_returned_has_its_session_time_after_the_next_restart(broker: Broker) -> None:
    (first,) = seats(broker, "ada")
    first.disconnect()
    broker.advance(31)
    first.connect()
    first.beat()
    again = broker.restart()
    second = Seat(again, "bob")
    second.join()
    assert second.held == {} and "1 member has up to 30 s to reconnect" in second.note
    first.connect(again)
    assert first.commit(10).committed == 10


def test_a_member_that_expires_before_its_assignment_is_written_stays_expired_too() -> None:
    broker = Broker(queued=True)
    broker.create()
    Seat(broker, "ada").ask_join()
    broker.advance(31)
    broker.work()
    again = broker.crashed(broker.disk.crash(keep="nothing"))
    assert [owner.expired for owner in again.engine.broker.catalog.state.groups["billing"].owners.values()] == [True]


def test_heartbeats_write_nothing_and_an_end_and_a_return_write_one_entry_each(broker: Broker) -> None:
    (first,) = seats(broker, "ada")
    log = broker.engine.broker.catalog.log
    before = log.count
    for _ in range(20):
        first.beat()
        broker.advance(5)
    assert log.count == before
    first.disconnect()
    broker.advance(31)
    assert log.count == before + 1
    first.connect()
    settle(first)
    assert log.count == before + 2


def test_what_was_given_up_before_a_restart_is_free_after_it(broker: Broker) -> None:
    first, second = seats(broker, "ada bob")
    first.leave()
    second.leave()
    third = Seat(broker.restart(), "eve")
    third.join()
    assert third.numbers == list(range(10))


def test_a_grant_that_was_lost_with_the_broker_before_it_was_reported_is_made_again() -> None:
    """It is in the catalog, and its member knows nothing of it."""
    broker = Broker()
    broker.create(partitions=2)
    first, second = Seat(broker, "ada"), Seat(broker, "bob")
    first.join()
    second.join()
    first.beat()
    first.finish()
    again = broker.crashed(broker.disk.crash(keep="nothing"))
    for each in (first, second):
        each.connect(again)
        each.beat()
    assert (len(first.numbers), len(second.numbers)) == (1, 1)
    assert second.commit(5).committed == 1


# Descriptions, resets, bounds
