"""A session that joins again and again, with long lists of topics, leaves no more than one that joined once."""

import pytest

from tests.broker.helpers import Broker, Session
from tfmq.protocol import commands


@pytest.mark.long
def test_joining_a_thousand_times_leaves_one_call_back_and_a_short_list() -> None:
    broker = Broker()
    session = Session()
    member = broker.join(session=session)
    topics = [f"topic-{n}" for n in range(5000)]
    for _ in range(1000):
        request = commands.JoinGroup("billing", member.member, topics)
        assert broker.ask(request, session=session).code == "ok"
    assert len(session.callbacks) == 1
    description = broker.ask(commands.DescribeGroup("billing")).description
    assert 0 < len(description["members"][0]["topics"]) < 1000


def test_every_group_of_a_session_is_free_when_it_ends() -> None:
    broker = Broker()
    broker.create()
    session = Session()
    for group in ("one", "two"):
        assert broker.join(group, session=session).code == "ok"
    session.close()
    broker.advance(3.1)
    for group in ("one", "two"):
        assert [row[0] for row in broker.join(group, session=Session()).partitions] == ["orders"]


def test_a_join_that_failed_leaves_no_member() -> None:
    broker = Broker()
    broker.create()
    session = Session()
    member = broker.join(session=session)
    broker.disk.faults.fail("write", error=28, path=".catalog")
    again = broker.ask(commands.JoinGroup("billing", member.member, []), session=session, turn=False)
    broker.engine.broker.end_turn()
    assert again.code == "disk_full"
    assert len(broker.join(session=Session()).partitions) == 1
    session.close()
    assert len(broker.ask(commands.DescribeGroup("billing")).description["members"]) == 1
