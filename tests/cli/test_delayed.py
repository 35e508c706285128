"""Delayed messages as the command line shows them: rows, times, bars."""

import io
import sys
from datetime import datetime
from typing import Any

import click
import pytest

from tests.cli.delayed_broker import NOW_MS, DelayedBroker, Waiting
from tests.client.fake_broker import listening
from tfmq.cli import delay_view
from tfmq.cli.delay_view import (
    BAR_WIDTH,
    bar_end,
    bar_width,
    complete_handles,
    count_between,
    detail_row,
    due_fields,
    json_row,
    print_histogram,
    relative_time,
    shorten_key,
    table_row,
)
from tfmq.cli.output import time_text
from tfmq.client.admin.delayed import DelayedCounts, delayed_description
from tfmq.client.send.delivery_time import moment_ms


def found(**fields: Any) -> Any:
    return delayed_description(Waiting(NOW_MS + 90_000, **fields).row())


def test_a_row_for_people_has_the_time_and_how_far_it_is() -> None:
    row = table_row(found(topic="reminders", key="42"), NOW_MS)
    assert row["due"] == time_text(NOW_MS + 90_000)
    assert (row["in"], row["topic"], row["key"]) == ("in 1 min 30 s", "reminders", "42")


def test_a_row_for_programs_has_numbers_and_iso_times() -> None:
    row = json_row(found())
    assert row["due_ms"] == NOW_MS + 90_000
    assert datetime.fromisoformat(row["due"]).timestamp() * 1_000 == NOW_MS + 90_000
    assert row["due"].endswith("+00:00")
    assert row["handle"].startswith("d") and row["state"] == "pending"
    unknown = json_row(delayed_description({"handle": "d" * 59, "state": "unknown"}))
    assert {name: value for name, value in unknown.items() if value is not None} == {
        "handle": "d" * 59,
        "state": "unknown",
    }


def test_what_is_not_known_is_left_out() -> None:
    shown = detail_row(delayed_description({"handle": "d" * 59, "state": "unknown"}), NOW_MS)
    assert shown == {"state": "unknown", "handle": "d" * 59}
    assert "in" in detail_row(found(), NOW_MS)
    assert "in" not in detail_row(found(state="delivered"), NOW_MS)


def test_keys_cannot_steer_the_terminal_nor_fill_it() -> None:
    assert shorten_key("a\x1b[2J") == "a\\x1b[2J"
    assert shorten_key(b"\xff\x00") == "\\xff\\x00"
    assert len(shorten_key("k" * 60_000) or "") == delay_view.KEY_CHARACTERS
    assert shorten_key(None) is None


def test_distances_read_well() -> None:
    assert [relative_time(ms) for ms in (0, 250, 7_500_000, -3_000)] == [
        "now",
        "in 0.25 s",
        "in 2 h 5 min",
        "3 s ago",
    ]


def test_edges_go_to_the_broker_to_the_ms() -> None:
    class Counter:
        def delayed_histogram(self, edges: Any, topic: str | None) -> Any:
            self.asked = [moment_ms(each) for each in edges]
            return DelayedCounts(tuple(self.asked), tuple(range(1, len(self.asked))), 99)

    counter: Any = Counter()
    late = 1 << 60
    edges = [0, 1, NOW_MS, NOW_MS + 1, 253_402_300_799_999, late, late + 1, late + 2_000]
    assert count_between(counter, None, edges) == ([1, 2, 3, 4, 5, 0, 6], 99)
    assert counter.asked[:5] == edges[:5] and len(counter.asked) == 7


def test_a_handle_says_when_it_is_due() -> None:
    assert due_fields(found().handle)["due_ms"] == NOW_MS + 90_000
    assert due_fields(None) == {"due_ms": None, "due": None}


def test_what_is_there_at_all_can_be_seen() -> None:
    assert bar_end(0, 100, BAR_WIDTH) == 0 and bar_end(7, 7, BAR_WIDTH) == 7
    for width in (10, BAR_WIDTH):
        assert bar_end(1, 10**9, width) * 8 * width == pytest.approx(10**9)


def test_bars_have_what_the_texts_leave_of_a_line() -> None:
    rows = [("2026-11-21 14:00:00", "in 56 min 39 s", "1,000")]
    assert [bar_width(rows, width) for width in (40, 80, 200)] == [10, 29, BAR_WIDTH]


def test_bars_are_drawn_with_their_times_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    print_histogram([NOW_MS, NOW_MS + 60_000, NOW_MS + 120_000, NOW_MS + 180_000], [1_200, 0, 600], NOW_MS)
    lines = capsys.readouterr().out.splitlines()
    full, empty, half = (
        next(line for line in lines if words in line) for words in ("now", "in 1 min", "in 2 min")
    )
    assert "1,200" in full and full.count("█") == BAR_WIDTH
    assert "█" not in empty and " 0" in empty
    assert half.count("█") == BAR_WIDTH // 2
    assert time_text(NOW_MS) in full


@pytest.mark.parametrize("width", [1, 20, 40, 60])
def test_counts_are_shown_however_narrow_the_terminal_is(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    print_histogram([NOW_MS, NOW_MS + 60_000], [1_234], NOW_MS)
    shown = capsys.readouterr().out
    assert "1,234" in shown and "█" in shown and time_text(NOW_MS) in shown


def test_where_there_are_no_blocks_bars_are_of_plain_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    print_histogram([NOW_MS, NOW_MS + 60_000], [5], NOW_MS)
    out.flush()
    assert b"#" * BAR_WIDTH in out.buffer.getvalue()


def test_the_shell_offers_the_handles_of_the_next_ones() -> None:
    def offered(servers: str, start: str) -> list[str]:
        context = click.Context(click.Command("cancel"))
        context.params = {"servers": servers}
        return [each.value for each in complete_handles(context, click.Argument(["handle"]), start)]

    broker = DelayedBroker(Waiting(NOW_MS + 2), Waiting(NOW_MS + 1))
    later, sooner = (each.handle for each in broker.rows)
    with listening(broker) as servers:
        assert offered(servers, "") == [sooner, later]
        assert offered(servers, sooner[:-1]) == [sooner]
        assert offered(servers, "x") == []
    assert offered("127.0.0.1:1", "") == []
