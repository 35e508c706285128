"""`tfmq status` on a live broker."""

from tests.cli.conftest import Cli
from tfmq.cli.status import readable


def test_the_status_is_an_object_or_a_table(cli: Cli) -> None:
    found = cli("status", "--json").json
    assert found["stopped"] == []
    assert found["settings"]["flush.messages"] == 1000
    table = cli("status").out.decode()
    assert "uptime" in table
    assert "flush.messages" not in table


def test_sizes_and_times_read_well() -> None:
    assert readable("bytes", 1536) == "1.5 KiB"
    assert readable("uptime_seconds", 3725) == "1:02:05"
    assert readable("topics", 7) == 7
