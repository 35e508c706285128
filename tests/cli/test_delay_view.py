"""Delayed messages as the command line shows them: rows, times, bars."""

from __future__ import annotations

import io
import random
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

import click
import pytest

from tests.cli.delayed_broker import NOW_MS, DelayedBroker, Waiting
from tests.client.fake_broker import listening
from tfmq.cli import delay_view
from tfmq.cli.delay_view import (
    BAR_WIDTH,
    DAY,
    DISTANCES,
    HOUR,
    MINUTE,
    RANGES_MAX,
    SECOND,
    STEPS,
    TIME_MAX,
    YEAR,
    bar_end,
    bar_width,
    clip_edges,
    complete_handles,
    count_between,
    detail_row,
    due_fields,
    equal_edges,
    fine_edges,
    floor_to_step,
    json_row,
    main_range,
    print_histogram,
    relative_time,
    round_edges,
    round_step,
    sensible_edges,
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
    assert [relative_time(ms) for ms in (0, 250, 7_500_000, -3_000)] == ["now", "in 0.25 s", "in 2 h 5 min", "3 s ago"]


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
    full, empty, half = (next(line for line in lines if words in line) for words in ("now", "in 1 min", "in 2 min"))
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


# Ranges of time that show when messages are due, on rows of due times that a test makes up.

NOW = round(datetime(2026, 11, 21, 14, 7, 31).timestamp() * 1_000)


class Dues:
    """Due times, and how often they were requested."""

    def __init__(self, *dues: int) -> None:
        self.dues = sorted(dues)
        self.asked = 0

    def __call__(self, edges: Sequence[int]) -> list[int]:
        assert all(low < high for low, high in pairwise(edges)), "edges ascend"
        assert len(edges) <= 4_096
        self.asked += 1
        places = [bisect_left(self.dues, edge) for edge in edges]
        return [high - low for low, high in pairwise(places)]


def bars(dues: Dues, **window: int) -> tuple[list[int], list[int]]:
    edges = sensible_edges(dues, NOW, **window)
    return edges, dues(edges) if edges else []


def steps_in(edges: Sequence[int]) -> set[int]:
    return {high - low for low, high in pairwise(edges)}


@pytest.fixture(params=["UTC", "Europe/Berlin", "Asia/Kathmandu"])
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield request.param
    monkeypatch.undo()
    time.tzset()


def test_nothing_that_waits_has_no_ranges() -> None:
    assert sensible_edges(Dues(), NOW) == []
    assert sensible_edges(Dues(NOW + HOUR), NOW, first=NOW + 2 * HOUR) == []


def test_an_hour_of_messages_has_round_steps_of_minutes() -> None:
    edges, counts = bars(Dues(*range(NOW, NOW + HOUR, 500)))
    assert steps_in(edges[1:]) == {5 * MINUTE}
    assert sum(counts) == 7200 and min(counts) > 0 and len(counts) <= RANGES_MAX + 2
    assert edges[0] == NOW and edges[1] % (5 * MINUTE) == 0, "nothing looks late that is not"


def test_a_heap_in_three_days_is_looked_at_closely() -> None:
    start = NOW + 3 * DAY
    source = random.Random(1)
    edges, counts = bars(Dues(*(start + source.randrange(10 * MINUTE) for _ in range(5_000))))
    assert start - MINUTE <= edges[0] <= start < start + 10 * MINUTE - SECOND <= edges[-1] <= start + 12 * MINUTE
    assert min(counts[1:-1]) > 0 and len(counts) >= 10


def test_one_in_ten_years_does_not_stretch_the_ranges() -> None:
    dues = Dues(*range(NOW, NOW + HOUR, 1_000), NOW + 10 * YEAR)
    edges, counts = bars(dues)
    assert edges[-1] < NOW + 2 * HOUR
    assert sum(counts) >= 0.98 * 3_600


def test_few_messages_are_all_in_the_ranges_however_far() -> None:
    dues = Dues(NOW + SECOND, NOW + HOUR, NOW + 10 * YEAR)
    edges, counts = bars(dues)
    assert sum(counts) == 3
    assert edges[0] <= NOW + SECOND and edges[-1] > NOW + 10 * YEAR


def test_what_lies_around_now_more_and_more_thinly_has_growing_steps() -> None:
    dues = Dues(*(NOW + 10**decade * part for decade in range(1, 9) for part in range(1, 10) for _ in range(50)))
    dues.dues += [NOW + 30 * DAY] * 40
    dues.dues = sorted(dues.dues + [NOW + SECOND // 2] * 20_000)
    edges, counts = bars(dues)
    assert NOW + SECOND in edges and NOW + 10 * SECOND in edges and NOW + HOUR in edges
    assert min(counts[:6]) > 0 and sum(counts) >= 0.98 * len(dues.dues)


def test_all_at_one_moment_is_one_range_with_all() -> None:
    edges, counts = bars(Dues(*[NOW + HOUR] * 1_000))
    assert sum(counts) == 1_000 and max(counts) == 1_000
    assert edges[0] <= NOW + HOUR < edges[-1] <= NOW + HOUR + 1_000


def test_what_is_overdue_is_in_the_ranges() -> None:
    edges, counts = bars(Dues(*range(NOW - HOUR, NOW + HOUR, 1_000)))
    assert edges[0] <= NOW - 59 * MINUTE and sum(counts) >= 0.98 * 7_200


def test_a_window_is_kept_to() -> None:
    dues = Dues(*range(NOW, NOW + DAY, 10_000))
    edges, _ = bars(dues, first=NOW + HOUR + 7, end=NOW + 2 * HOUR + 11)
    assert edges[0] >= NOW + HOUR + 7 and edges[-1] == NOW + 2 * HOUR + 11


def test_the_end_of_time_and_its_beginning_can_be_drawn() -> None:
    for dues in (Dues(TIME_MAX - 1), Dues(0), Dues(0, TIME_MAX - 1), Dues(NOW, TIME_MAX - 1, TIME_MAX - 1)):
        edges, counts = bars(dues)
        assert sum(counts) == len(dues.dues)
        assert edges[0] >= 0 and edges[-1] <= TIME_MAX


def test_a_few_questions_are_enough() -> None:
    source = random.Random(7)
    for _ in range(200):
        scale = 10 ** source.uniform(0, 13)
        dues = Dues(*(NOW + int(source.expovariate(1 / scale)) for _ in range(source.randrange(1, 400))))
        count = len(dues.dues)
        edges = sensible_edges(dues, NOW)
        assert dues.asked <= 4
        assert len(edges) <= 2 * RANGES_MAX + 3
        assert sum(dues(edges)) >= 0.98 * count


def test_days_begin_at_midnight_of_this_place_also_when_summer_time_ends(zone: str) -> None:
    first = round(datetime(2026, 10, 23, 15).timestamp() * 1_000)
    edges = round_edges(first, first + 5 * DAY, DAY)
    assert all(datetime.fromtimestamp(edge / 1_000).hour == 0 for edge in edges)
    assert all(datetime.fromtimestamp(edge / 1_000).minute == 0 for edge in edges)
    assert 6 <= len(edges) <= 8
    assert steps_in(edges) == ({DAY} if zone != "Europe/Berlin" else {DAY, DAY + HOUR})


@pytest.mark.parametrize("step", [15 * MINUTE, 7 * HOUR, 36 * HOUR, 2 * DAY, 7 * DAY, 30 * DAY, 2 * YEAR])
def test_edges_stay_where_they_are_as_time_goes_on(zone: str, step: int) -> None:
    """Invariant: what begins later has the same edges, but for those that are over."""
    end = NOW + 20 * DAY + 5 * step
    first = round_edges(NOW, end, step)
    for later in (1, 30 * SECOND, MINUTE, 11 * MINUTE, DAY, 9 * DAY):
        assert set(round_edges(NOW + later, end, step)) <= set(first)
    if step == 7 * DAY:
        assert {datetime.fromtimestamp(edge / 1_000).strftime("%a %H:%M") for edge in first} == {"Mon 00:00"}


def test_hours_and_minutes_are_round_by_the_clock_of_this_place(zone: str) -> None:
    for step in (15 * MINUTE, HOUR, 6 * HOUR):
        at = datetime.fromtimestamp(floor_to_step(NOW, step) / 1_000)
        assert (at.hour * 60 + at.minute) % (step // MINUTE) == 0 and at.second == 0


def test_years_begin_in_january_and_go_on_beyond_the_calendar() -> None:
    edges = round_edges(NOW, NOW + 3 * YEAR, YEAR)
    assert {datetime.fromtimestamp(edge / 1_000).strftime("%m-%d %H") for edge in edges} == {"01-01 00"}
    far = round_edges(NOW, NOW + 20_000 * YEAR, 1_000 * YEAR)
    assert len(far) <= 23 and far[-1] >= NOW + 20_000 * YEAR
    assert far == sorted(set(far))


def test_steps_are_round_and_fit() -> None:
    assert [round_step(span) for span in (1, 20, 21, 19_999, HOUR, DAY)] == [1, 1, 2, SECOND, 5 * MINUTE, 2 * HOUR]
    assert round_step(TIME_MAX) in STEPS and round_step(TIME_MAX) * RANGES_MAX >= TIME_MAX
    assert list(STEPS) == sorted(set(STEPS)) and list(DISTANCES) == sorted(set(DISTANCES))


def test_edges_are_cut_at_both_ends() -> None:
    assert clip_edges([1, 5, 9, 5], 3, 9) == [3, 5, 9]
    assert equal_edges(0, 10, 4) == [0, 2, 5, 7, 10]
    assert equal_edges(7, 9, 1_000) == [7, 8, 9]
    assert fine_edges(100, 90, 110)[0] == 90 and fine_edges(100, 90, 110)[-1] == 110
    assert main_range([0, 1, 2, 3, 4], [0, 7, 0, 3]) == (1, 4)
