"""The offsets of all groups together are bounded: they are in memory, and in every snapshot of the catalog."""

from tests.broker.helpers import Broker, Session
from tfmq.protocol import commands
from tfmq.protocol.commands import GroupOffset


def commit(broker: Broker, group: str, count: int) -> str:
    session = Session()
    member = broker.join(group, session=session)
    offsets = [GroupOffset("orders", broker.incarnation(), number, 5) for number in range(count)]
    request = commands.CommitOffsets(group, member.member, member.generation, offsets)
    code = broker.ask(request, session=session).code
    broker.ask(commands.LeaveGroup(group, member.member, member.generation))
    return code


def test_groups_keep_no_more_offsets_than_the_limit_and_may_always_move_those_they_have() -> None:
    broker = Broker(limits__group_offsets=10)
    broker.create(partitions=20)
    assert commit(broker, "one", 6) == "ok"
    assert commit(broker, "two", 6) == "not_allowed"
    assert commit(broker, "two", 4) == "ok"
    broker = broker.restart()
    assert commit(broker, "three", 1) == "not_allowed"
    member = broker.ask(commands.ReadOffsets("one", None))
    assert len(member.offsets) == 6
    broker.delete()
    broker.create(partitions=20)
    assert commit(broker, "three", 10) == "ok"


def test_offsets_that_are_there_can_be_committed_at_the_limit() -> None:
    broker = Broker(limits__group_offsets=6)
    broker.create(partitions=20)
    assert commit(broker, "one", 6) == "ok"
    assert commit(broker, "one", 6) == "ok"


def test_a_reset_above_the_limit_is_refused_and_leaves_the_group_as_it_was() -> None:
    broker = Broker(limits__group_offsets=6)
    broker.create(partitions=20)
    assert commit(broker, "one", 6) == "ok"
    offsets = [GroupOffset("orders", 0, number, 1) for number in range(10)]
    assert broker.ask(commands.ResetGroup("one", offsets)).code == "not_allowed"
    assert broker.saved("one") == {("orders", number): 5 for number in range(6)}
    assert commit(broker, "one", 6) == "ok"
