"""Offsets are saved for the owner of each partition, and set by hand where the group has no member."""

import pytest

from tests.broker.group_member import Seat, seats
from tests.broker.helpers import Broker, Session
from tfmq.protocol.commands import (
    CommitOffsets,
    DeleteGroup,
    GroupOffset,
    ListGroups,
    PartitionName,
    ReadOffsets,
    ResetGroup,
    TransactionOffsets,
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


def test_offsets_are_saved_for_the_owner_alone(broker: Broker) -> None:
    first, second = seats(broker, "ada bob")
    answer = first.commit(5, *first.held, *second.held)
    assert answer.committed == 5
    assert sorted(row[1] for row in answer.fenced) == second.numbers
    assert first.commit(9, *second.held).code == "fenced"
    assert broker.saved() == {("orders", n): 5 for n in first.numbers}


def test_a_revoked_partition_is_its_owners_until_that_lets_go(broker: Broker) -> None:
    first, second = Seat(broker, "ada"), Seat(broker, "bob")
    first.join()
    second.join()
    first.beat()
    leaving = sorted(first.leaving)
    assert first.commit(5, *leaving).fenced == []
    first.finish()
    assert first.commit(6, *leaving).code == "fenced"
    second.beat()
    assert second.commit(7, *leaving).fenced == []


def test_no_member_commits_without_having_joined(broker: Broker) -> None:
    offsets = [GroupOffset("orders", broker.incarnation(), 0, 1)]
    for member, generation in (("", 0), ("ghost", 0), ("", 1)):
        assert broker.ask(CommitOffsets("billing", member, generation, offsets)).code == "fenced"
    assert broker.ask(ListGroups()).groups == []


def test_a_zombie_loses_only_what_others_got_and_is_notified(broker: Broker) -> None:
    broker.create("bills")
    first = Seat(broker, "ada", topics="orders bills")
    first.join()
    broker.advance(31)
    second = Seat(broker, "bob")
    second.join()
    assert second.numbers == list(range(10))
    first.connect()
    answer = first.commit(10)
    assert answer.committed == 1 and len(answer.fenced) == 10
    assert broker.saved() == {("bills", 0): 10}
    first.beat()
    assert first.share == [("bills", 0)]


def test_a_takeover_fences_from_the_moment_it_is_planned() -> None:
    broker = Broker(queued=True)
    broker.create()
    first = Seat(broker, "ada")
    answer = first.ask_join()
    broker.work()
    first.take_join(answer)
    first.disconnect()
    second = Seat(broker, "bob").ask_join()
    broker.advance(3.1)
    assert first.commit(10).code == "fenced"
    broker.work()
    assert second.code == "ok" and broker.saved() == {}


def test_a_reset_needs_a_group_without_live_member_and_takes_everything(broker: Broker) -> None:
    first, second = seats(broker, "ada bob")
    offsets = [GroupOffset("orders", 0, 0, 77)]
    first.disconnect()
    refused = broker.ask(ResetGroup("billing", offsets))
    assert refused.code == "not_allowed" and "bob" in str(refused.failure)
    second.disconnect()
    assert broker.ask(ResetGroup("billing", offsets)).committed == 1
    assert broker.saved() == {("orders", 0): 77} and owners(broker) == {}
    for each in (first, second):
        each.connect()
        assert each.commit(10).code == "fenced"
    first.join()
    assert first.numbers == list(range(10))
    assert broker.ask(ResetGroup("free", [])).code == "bad_request"


def test_a_deleted_group_is_gone_with_all_that_was_its_own(broker: Broker) -> None:
    first, second = seats(broker, "ada bob")
    first.commit(10)
    first.disconnect()
    refused = broker.ask(DeleteGroup("billing"))
    assert refused.code == "not_allowed" and "bob" in str(refused.failure)
    second.disconnect()
    assert broker.ask(DeleteGroup("billing")).deleted is True
    assert broker.ask(ListGroups()).groups == [] and broker.saved() == {}
    assert broker.ask(DeleteGroup("billing")).deleted is False
    assert first.commit(20).code == "fenced"
    again = broker.crashed(broker.disk.crash(keep="nothing"))
    assert again.ask(ListGroups()).groups == []
    generation = first.generation
    first.connect()
    first.join()
    assert first.generation > generation and first.numbers == list(range(10))


def test_a_group_with_offsets_in_doubt_is_not_deleted(broker: Broker) -> None:
    first = Seat(broker, "ada")
    first.join()
    began = broker.begin(broker.stream(), "order-42")
    row = TransactionOffsets("billing", "ada", first.generation, rows(broker, 100, 7))
    assert broker.prepare(began, [row]).state == "prepared"
    first.leave()
    assert broker.ask(DeleteGroup("billing")).code == "busy"
    assert broker.decide(began).state == "committed"
    assert broker.ask(DeleteGroup("billing")).deleted is True


def test_a_reset_fences_before_it_is_on_the_disk() -> None:
    broker = Broker(queued=True)
    broker.create()
    first = Seat(broker, "ada")
    answer = first.ask_join()
    broker.work()
    first.take_join(answer)
    first.disconnect()
    reset = broker.ask(ResetGroup("billing", [GroupOffset("orders", 0, 0, 77)]), turn=False)
    late = first.commit(10)
    broker.work()
    assert (reset.code, late.code) == ("ok", "fenced")


def test_work_begun_under_an_earlier_grant_is_fenced_although_the_partition_came_back(broker: Broker) -> None:
    """Between the two it was another's, who may have gone further."""
    broker.create("bills")
    first, second = Seat(broker, "ada", topics="orders bills"), Seat(broker, "bob")
    first.join()
    broker.advance(31)
    second.join()
    second.commit(50)
    first.connect()
    first.forgotten = True
    unheard = first.ask_beat()
    second.leave()
    late = first.commit(20)
    assert len(late.fenced) == 10 and broker.saved()["orders", 0] == 50
    first.take(unheard)
    first.beat()
    assert len(first.numbers) == 11 and first.commit(60).fenced == []


def test_offsets_in_doubt_hold_the_next_owner_back_until_their_transaction_has_ended(broker: Broker) -> None:
    """The next owner of the partition begins after what the transaction took."""
    first, second = Seat(broker, "ada"), Seat(broker, "bob")
    first.join()
    first.commit(10)
    began = broker.begin(broker.stream(), "order-42")
    row = TransactionOffsets("billing", "ada", first.generation, rows(broker, 100, 7))
    assert broker.prepare(began, [row]).state == "prepared"
    first.leave()
    second.join()
    assert 7 in second.numbers
    wanted = [PartitionName("orders", 7)]
    assert broker.ask(ReadOffsets("billing", wanted)).code == "busy"
    assert second.commit(50, ("orders", broker.incarnation(), 7)).code == "busy"
    other = TransactionOffsets("billing", "bob", second.generation, rows(broker, 60, 7))
    assert broker.transact(broker.stream(), [("orders", 0, [b"x"])], [other]).code == "busy"
    assert broker.decide(began).state == "committed"
    assert [each[3] for each in broker.ask(ReadOffsets("billing", wanted)).offsets] == [100]
    assert second.commit(150, ("orders", broker.incarnation(), 7)).committed == 1


def test_a_transaction_with_offsets_of_one_partition_that_is_anothers_is_refused_whole(broker: Broker) -> None:
    first, second = seats(broker, "ada bob")
    mine, other = first.numbers[0], second.numbers[0]
    row = TransactionOffsets("billing", "ada", first.generation, rows(broker, 9, mine, other))
    refused = broker.transact(broker.stream(), [("orders", 0, [b"x"])], [row])
    assert refused.code == "fenced" and f"orders-{other}" in str(refused.failure)
    assert broker.payloads() == [] and broker.saved() == {}
    row = TransactionOffsets("billing", "ada", first.generation, rows(broker, 9, mine))
    assert broker.transact(broker.stream(), [("orders", 0, [b"x"])], [row]).state == "committed"
    assert broker.saved() == {("orders", mine): 9}


def test_a_producers_connection_says_nothing_about_its_members(broker: Broker) -> None:
    """Offsets inside a transaction come over another connection, whose end is not the end of the member."""
    first = Seat(broker, "ada")
    first.join()
    producer = Session("the producer")
    row = TransactionOffsets("billing", "ada", first.generation, rows(broker, 9, 0))
    assert broker.transact(broker.stream(), [], [row], session=producer).state == "committed"
    producer.close()
    broker.advance(5)
    first.beat()
    assert len(first.numbers) == 10


def test_a_member_is_heard_of_in_the_transactions_with_its_offsets_too(broker: Broker) -> None:
    first = Seat(broker, "ada")
    first.join()
    second = Seat(broker, "bob")
    second.join()
    for offset in range(8):
        broker.advance(10)
        second.beat()
        row = TransactionOffsets("billing", "ada", first.generation, rows(broker, offset, 0))
        assert broker.transact(broker.stream(), [], [row], session=Session()).state == "committed"
    assert second.held == {}


def rows(broker: Broker, offset: int, *numbers: int) -> list[GroupOffset]:
    return [GroupOffset("orders", broker.incarnation(), number, offset) for number in numbers]


def test_what_was_sent_before_the_member_connected_again_takes_nothing_back(broker: Broker) -> None:
    (seat,) = seats(broker, "ada")
    left = seat.session
    seat.session = Session("ada, connected again")
    assert seat.commit(9).committed == 10
    newer, seat.session = seat.session, left
    assert seat.commit(5).code == "fenced"
    assert seat.ask_beat().code == "fenced"
    assert seat.ask_join().code == "fenced"
    assert broker.saved()[("orders", 0)] == 9
    seat.session = newer
    assert seat.commit(12).committed == 10, "it is a member as before"
    assert broker.saved()[("orders", 0)] == 12
