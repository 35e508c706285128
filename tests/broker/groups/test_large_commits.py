"""Large commits that arrive together: none makes another too large, and a reset stays whole."""

import pytest

from tests.broker.helpers import Answer, Broker
from tfmq.protocol import commands
from tfmq.protocol.commands import GroupOffset


def many(broker: Broker, count: int) -> list[GroupOffset]:
    incarnation = broker.incarnation()
    return [GroupOffset("orders", incarnation, 0, (1 << 62) + n, (1 << 32) - 1, 1 << 62) for n in range(count)]


def commit(broker: Broker, group: str, member: Answer, offsets: list[GroupOffset]) -> Answer:
    request = commands.CommitOffsets(group, member.member, member.generation, offsets)
    return broker.ask(request, turn=False)


@pytest.mark.long
def test_commits_that_fill_more_than_a_segment_in_one_turn_are_all_taken() -> None:
    broker = Broker()
    broker.create()
    groups = [f"group-{n}" for n in range(25)]
    members = [broker.join(group) for group in groups]
    offsets = many(broker, 20_000)
    answers = [commit(broker, group, member, offsets) for group, member in zip(groups, members, strict=True)]
    broker.engine.broker.end_turn()
    broker.work()
    assert {answer.code for answer in answers} == {"ok"}
    assert broker.saved("group-24") == {("orders", 0): (1 << 62) + 19_999}


@pytest.mark.long
def test_what_waits_for_the_catalog_s_disk_is_bounded_in_bytes() -> None:
    broker = Broker()
    broker.create()
    member = broker.join()
    catalog = broker.engine.broker.catalog
    catalog._preparing = True
    offsets = many(broker, 20_000)
    answers = [commit(broker, "billing", member, offsets) for _ in range(200)]
    assert answers[-1].code == "busy"
    waiting = sum(answer.code == "waiting" for answer in answers)
    catalog._preparing = False
    broker.engine.broker.end_turn()
    assert waiting > 10
    assert sum(answer.code == "ok" for answer in answers) == waiting


def test_a_reset_beside_large_commits_is_one_append() -> None:
    broker = Broker()
    broker.create()
    member = broker.join()
    offsets = many(broker, 20_000)
    answers = [commit(broker, "billing", member, offsets) for _ in range(6)]
    reset = broker.ask(commands.ResetGroup("other", offsets), turn=False)
    broker.disk.faults.fail("force", times=None, path="meta")
    before = broker.engine.broker.catalog.log.end_offset
    broker.engine.broker.end_turn()
    assert broker.engine.broker.catalog.log.end_offset > before
    assert reset.code == "storage_stopped" and {answer.code for answer in answers} == {"storage_stopped"}
