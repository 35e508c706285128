"""What PostgreSQL holds of owners that are gone is finished as the broker says, and left where it says nothing."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy.engine import Engine

import tfmq
from tests.sql.conftest import prepared_names
from tests.sql.shop import orders
from tests.sql.test_in_doubt import prepare
from tfmq.sql.commit_protocol import executor_for, run_steps
from tfmq.sql.in_doubt import PreparedTransaction, prepared_name
from tfmq.sql.recovery import OrphanedTransactions, ScanResult
from tfmq.sql.session import broker_node, describe_transaction

STATES = ("open", "prepared", "committed", "rolled_back", "unknown")


@pytest.mark.long
def test_each_state_has_its_end(postgres_engine: Engine, tmp_path: Path) -> None:
    with tfmq.local_server(tmp_path / "data") as servers, tfmq.Producer(servers) as producer:
        kept = [begun(producer, state) for state in STATES[:-1]]
        node = broker_node(producer)
        for number, state in enumerate(STATES):
            prepare(postgres_engine, prepared_name(f"tfmq.sql.{state}", node), number)
        prepare(postgres_engine, prepared_name("tfmq.sql.elsewhere", "another-node"), 9)
        leftovers = OrphanedTransactions(executor_for(postgres_engine))
        assert len(prepared_names(postgres_engine)) == 6
        assert [describe_transaction(producer, f"tfmq.sql.{state}").state for state in STATES] == list(STATES)
        assert run_steps(leftovers.scan(producer)) == ScanResult(finished=3, waiting=2)
        assert orders(postgres_engine) == [2], "the one that the broker committed"
        assert prepared_names(postgres_engine) == [
            "tfmq.sql.elsewhere@another-node",
            f"tfmq.sql.open@{node}",
            f"tfmq.sql.prepared@{node}",
        ]
        assert run_steps(leftovers.scan(producer)) == ScanResult(finished=0, waiting=2)
        assert [each.state for each in kept[:2]] == ["open", "prepared"]
        assert kept[0].prepare() == "prepared", "looking at it took nothing from its owner"
        kept[0].rollback()
        kept[1].rollback()


@pytest.mark.parametrize(
    ("state", "decision"),
    [
        ("committed", "commit"),
        ("applying", "commit"),
        ("read_only", "commit"),
        ("heuristic_committed", "commit"),
        ("rolled_back", "rollback"),
        ("heuristic_rolled_back", "rollback"),
        ("open", "wait"),
        ("preparing", "wait"),
        ("prepared", "wait"),
        ("committing", "wait"),
        ("rolling_back", "wait"),
    ],
)
def test_every_state_of_the_broker_has_its_decision(monkeypatch: pytest.MonkeyPatch, state: str, decision: str) -> None:
    monkeypatch.setattr("tfmq.sql.recovery.describe_transaction", lambda producer, xid: SimpleNamespace(state=state))
    left = PreparedTransaction("tfmq.sql.x@node", "tfmq.sql.x", "node")
    assert run_steps(OrphanedTransactions(None)._decision(left, None)) == decision


def begun(producer: tfmq.Producer, state: str) -> tfmq.Transaction:
    transaction = producer.begin(f"tfmq.sql.{state}")
    transaction.send("orders", "1")
    if state in ("prepared", "committed"):
        transaction.prepare()
    if state == "committed":
        transaction.commit()
    if state == "rolled_back":
        transaction.rollback()
    return transaction


@pytest.mark.long
def test_what_belongs_to_another_broker_is_reported_once(
    postgres_engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepare(postgres_engine, prepared_name("tfmq.sql.x", "another-node"), 1)
    leftovers = OrphanedTransactions(executor_for(postgres_engine))
    with tfmq.local_server(tmp_path / "data") as servers, tfmq.Producer(servers) as producer:
        for _ in range(3):
            assert run_steps(leftovers.scan(producer)) == ScanResult()
    reported = [each.message for each in caplog.records if "ROLLBACK PREPARED" in each.message]
    assert len(reported) == 1
    assert "tfmq tx show tfmq.sql.x" in reported[0]
