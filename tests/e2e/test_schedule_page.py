"""What docs/schedules.md shows: its command lines on a real server, and the test that a user can copy."""

import re
import shlex
from pathlib import Path

from tests.cli.conftest import Cli
from tests.cli.conftest import broker as broker
from tests.cli.conftest import cli as cli
from tests.cli.conftest import offline as offline
from tfmq.testing.broker import SimulatedBroker
from tfmq.testing.plugin import tfmq_broker as tfmq_broker

PAGE = Path("docs/schedules.md")


def test_reports_are_made_on_working_days(tfmq_broker: SimulatedBroker) -> None:
    with tfmq_broker.admin() as admin:
        admin.schedule("0 9 * * mon-fri", "reports", "make the daily report", timezone="Europe/Berlin")
    tfmq_broker.clock.advance(days=7)
    assert [message.properties["scheduled_for"] for message in tfmq_broker.sent("reports")] == [
        "2026-01-06T09:00:00+01:00",
        "2026-01-07T09:00:00+01:00",
        "2026-01-08T09:00:00+01:00",
        "2026-01-09T09:00:00+01:00",
        "2026-01-12T09:00:00+01:00",
    ]


def test_what_was_missed_over_a_long_night_comes_once(tfmq_broker: SimulatedBroker) -> None:
    with tfmq_broker.admin() as admin:
        admin.schedule("0 * * * *", "reports", "go", name="hourly")
    tfmq_broker.crash(down=10 * 3600)
    tfmq_broker.clock.advance(1)
    assert [message.properties["scheduled_for"][11:16] for message in tfmq_broker.sent("reports")] == ["19:00"]


def test_a_year_passes_in_no_time(tfmq_broker: SimulatedBroker) -> None:
    with tfmq_broker.admin() as admin:
        admin.schedule("0 0 last * *", "invoices", "go")
    tfmq_broker.clock.advance(days=365)
    assert len(tfmq_broker.sent("invoices")) == 12


def test_the_command_lines_of_the_page_run_in_their_order(cli: Cli) -> None:
    lines = re.findall(r"^\$ tfmq (.*)$", PAGE.read_text(), re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        ran = cli(*shlex.split(line))
        assert ran.code == 0, ran.err


def test_the_example_of_the_page_is_the_one_that_runs_here() -> None:
    page, here = PAGE.read_text(), Path(__file__).read_text()
    (shown,) = re.findall(r"```python\n(def test_.*?)```", page, re.DOTALL)
    plain = here.replace(": SimulatedBroker) -> None:", "):")
    assert shown.strip() in plain
