"""Transactions as rows, lines and names that a shell completes."""

from collections.abc import Iterator

import click
import pytest

from tests.client.fake_broker import listening
from tests.client.in_doubt_broker import InDoubtBroker, row
from tfmq.cli.tx import describe_transaction, detail_row, json_row, table_row, xids
from tfmq.client.admin.models import transaction_description


@pytest.fixture
def servers() -> Iterator[str]:
    rows = [row("order-1", 1), row("order-2", 2), row("bill-3", 3), row("order-\n", 4)]
    with listening(InDoubtBroker(*rows)) as servers:
        yield servers


def completed(servers: str, start: str) -> list[str]:
    context = click.Context(click.Command("show"))
    context.params["servers"] = servers
    return [each.value for each in xids(context, click.Argument(["xid"]), start)]


def test_the_shell_offers_the_xids_that_wait_for_somebody(servers: str) -> None:
    assert completed(servers, "ord") == ["order-1", "order-2"]
    assert completed(servers, "") == ["order-1", "order-2", "bill-3"]
    assert completed(servers, "x") == []


def test_without_a_broker_the_shell_offers_nothing() -> None:
    assert completed("127.0.0.1:1", "") == []


def test_a_row_for_programs_has_everything_and_one_for_people_what_fits() -> None:
    found = transaction_description(row("order-1", 1, targets=2))
    assert json_row(found)["targets"] == 2 and json_row(found)["topics"] == ["orders"]
    assert "details" not in json_row(found)
    assert table_row(found)["age"] == "1 min 30 s" and table_row(found)["size"] == "2.0 KiB"


def test_all_of_one_leaves_out_what_says_nothing() -> None:
    found = transaction_description(row("order-1", 1, asked=0, local=False, sequence=-1, run="", batches=2))
    shown = detail_row(found)
    assert shown["batches"] == 2 and shown["messages"] == 3 and str(shown["began"]).startswith("2023-11-1")
    assert not {"asked", "local", "sequence", "run", "commit_group", "ends_by_itself"} & set(shown)
    over = transaction_description(
        {"xid": "x", "epoch": 7, "state": "committed", "decided_ms": 1_700_000_000_000}
    )
    assert set(detail_row(over)) == {"xid", "epoch", "state", "decided"}


def test_one_in_a_line() -> None:
    found = transaction_description(row("order-1", 1))
    assert describe_transaction(found) == (
        "order-1 (prepared, 1 min 30 s old, by a client at 127.0.0.1:5, 3 messages for orders)"
    )
    bare = transaction_description({"xid": "x", "state": "open"})
    assert describe_transaction(bare) == "x (open, 0 s old, 0 messages)"


def test_a_program_gets_each_time_as_ms_and_as_iso() -> None:
    found = json_row(transaction_description({"xid": "x", "began_ms": 1_795_000_000_123, "decided_ms": 0}))
    assert (found["began_ms"], found["began_at"]) == (1_795_000_000_123, "2026-11-18T11:06:40.123+00:00")
    assert (found["prepared_at"], found["expires_at"], found["decided_at"]) == (None, None, None)
