"""`tfmq bench` on a live broker: small counts, real figures, nothing left."""

from tests.cli.conftest import Cli
from tfmq.cli.bench import SINGLES, json_row


def test_three_rows_of_figures_and_no_topic_left(cli: Cli) -> None:
    rows = cli("bench", "--messages", "1000", "--size", "10", "--json").json
    assert [r["what"] for r in rows] == ["send in bulk", "send one at a time", "read"]
    assert [r["messages"] for r in rows] == [1000, SINGLES, 1000]
    assert all(r["messages_per_second"] > 0 for r in rows)
    assert not [t for t in cli("topic", "list", "--json").json if t["topic"].startswith("bench-")]


def test_a_topic_of_ones_own_is_kept(cli: Cli, topic: str) -> None:
    assert cli("bench", "--messages", "1000", "--size", "10", "--topic", topic).code == 0
    assert cli("topic", "show", topic, "--json").json["messages"] == 1002 + SINGLES


def test_a_row_is_arithmetic() -> None:
    assert json_row("x", 1000, 50, 2.0) == {
        "what": "x",
        "messages": 1000,
        "seconds": 2.0,
        "messages_per_second": 500,
        "bytes_per_second": 25_000,
        "microseconds_each": 2000.0,
    }
