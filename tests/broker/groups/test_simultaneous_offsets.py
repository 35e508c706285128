"""Offsets of many transactions that are decided in one turn: more than one change of the catalog can have."""

import pytest

from tests.broker.helpers import Answer, Broker
from tfmq.broker import catalog
from tfmq.protocol.commands import GroupOffset, TransactionOffsets


def offsets_of(broker: Broker, member: Answer, group: str, count: int) -> TransactionOffsets:
    incarnation = broker.incarnation()
    rows = [
        GroupOffset("orders", incarnation, number, (1 << 62) + number, (1 << 32) - 1, 1 << 62)
        for number in range(count)
    ]
    return TransactionOffsets(group, member.member, member.generation, rows)


@pytest.mark.long
def test_more_than_a_segment_of_the_catalog_takes_is_applied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "SEGMENT_BYTES", 1 << 20)
    partitions, groups = 100, 500
    broker = Broker()
    broker.create(partitions=partitions)
    members = [broker.join(f"group-{number}") for number in range(groups)]
    streams = [broker.stream() for _ in members]
    answers = []
    for number, member in enumerate(members):
        offsets = offsets_of(broker, member, f"group-{number}", partitions)
        answers.append(broker.transact(streams[number], [], [offsets], turn=False))
    broker.engine.broker.end_turn()
    broker.work()
    assert {(answer.code, answer.state) for answer in answers} == {("ok", "committed")}
    assert len(broker.saved(f"group-{groups - 1}")) == partitions


def test_a_partition_that_is_named_again_and_again_counts_once() -> None:
    """The last one counts, as where offsets are committed without a transaction."""
    broker = Broker()
    broker.create()
    member = broker.join()
    row = offsets_of(broker, member, "billing", 1)
    (first,) = row.offsets
    rows = [first._replace(offset=number) for number in range(20_000)]
    answer = broker.transact(broker.stream(), [], [row._replace(offsets=rows)])
    assert answer.state == "committed"
    assert broker.saved() == {("orders", 0): 19_999}
    began = broker.begin(broker.stream(), "x")
    assert broker.prepare(began, [row._replace(offsets=rows)]).code == "ok"
    held = broker.engine.broker.transaction_commands.store.transactions[began.epoch].offsets
    assert [len(each.positions) for each in held] == [1]
