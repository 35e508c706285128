"""Tables for people, JSON for programs."""

import json
import re
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from types import SimpleNamespace
from typing import cast

import pytest

from tfmq.cli.option_types import point_in_time
from tfmq.cli.output import (
    ConnectionReport,
    Output,
    age_text,
    did_you_mean,
    escape_unprintable,
    format_cell,
    iso_text,
    json_text,
    progress,
    size_text,
    time_text,
    with_times,
)
from tfmq.client.connection.connection import ClientConnection, ConnectionState


def output(as_json: bool = False, quiet: bool = False) -> Output:
    return Output(None, as_json, quiet)


ROWS = [{"topic": "orders", "size_bytes": 12345, "open": True}, {"topic": "logs", "size_bytes": 0, "open": False}]


def test_a_list_is_one_json_array(capsys: pytest.CaptureFixture[str]) -> None:
    output(as_json=True).print_rows(ROWS, ("topic",), "none")
    assert json.loads(capsys.readouterr().out) == ROWS


def test_an_empty_list_is_an_empty_array_or_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    output(as_json=True).print_rows([], ("topic",), "no topics")
    output().print_rows([], ("topic",), "no topics")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("[]\n", "no topics\n")


def test_a_table_has_words_and_grouped_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    output().print_rows(ROWS, ("topic", "size_bytes", "open"), "")
    shown = capsys.readouterr().out
    assert "size bytes" in shown
    assert "12,345" in shown
    assert "yes" in shown


@pytest.mark.parametrize("width", [1, 10, 40])
def test_no_column_is_left_out_however_narrow_the_terminal_is(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    row = {name: f"{name * 10}-7" for name in "abcdefgh"}
    output().print_rows([row], list(row), "none")
    shown = capsys.readouterr().out
    assert all(value in shown for value in row.values())


def test_a_name_of_blanks_has_a_line_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    output().print_rows([{"xid": " " * 90, "state": "prepared" * 8}], ["xid", "state"], "none")
    assert "prepared" * 8 in capsys.readouterr().out


WIDE = {
    "id": "0123456789abcdef",
    "state": "heuristic_committed",
    "due": "2026-11-22 15:05:54 +01:00",
    "count": 12_345,
    "owner": "tfmq-python at 127.0.0.1:55436",
    "tag": None,
    "error": "ValueError: there is no such item in the warehouse of the customer",
    "handle": "d" * 59,
}


@pytest.mark.parametrize("width", [40, 80, 120, 300])
def test_no_word_time_or_number_of_a_list_is_broken_however_narrow_the_terminal_is(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    output().print_rows([WIDE, WIDE], list(WIDE), "none", ("handle",))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    for name in ("id", "state", "due", "handle"):
        assert sum(str(WIDE[name]) in line for line in lines) == 2, name
    words = [word for line in lines for word in line.split()]
    for name in ("owner", "error"):
        assert all(words.count(word) >= 2 for word in str(WIDE[name]).split()), name
    assert max(len(line) for line in lines) <= max(width, 61)
    assert any("due 2026" in line for line in lines) is (width < 300), "a heading where there is no table"
    assert not any("handle d" in line for line in lines), "it explains itself"


def test_a_table_gives_its_room_to_the_columns_that_need_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    row = {"id": "0123456789abcdef", "error": "one two three four five six seven eight nine ten"}
    output().print_rows([row], list(row), "none")
    first = next(line for line in capsys.readouterr().out.splitlines() if "0123456789abcdef" in line)
    assert first.rstrip().endswith("one two three four five six seven eight")


@pytest.fixture(params=["UTC", "America/New_York", "Asia/Kathmandu"])
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The zone of this machine."""
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield request.param
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("time_ms", [0, 1_795_000_000_123, 1_775_000_000_000, 253_402_200_000_000])
def test_a_time_is_read_as_it_is_shown(zone: str, time_ms: int) -> None:
    shown = time_text(time_ms)
    assert round(point_in_time(shown).timestamp()) == time_ms // 1000, shown
    assert round(point_in_time(time_text(time_ms, exact=True)).timestamp() * 1000) == time_ms
    assert round(point_in_time(shown[:-7]).timestamp()) == time_ms // 1000, "without a zone it is local"
    assert round(point_in_time(iso_text(time_ms) or "").timestamp() * 1000) == time_ms


def test_times_have_their_zone() -> None:
    assert time_text(datetime.fromisoformat("2026-11-22T15:05:54.5+01:00")) == "2026-11-22 15:05:54 +01:00"
    assert iso_text(1_795_000_000_123) == "2026-11-18T11:06:40.123+00:00"
    assert (time_text(None), time_text(1 << 62), iso_text(1 << 62), iso_text(-1)) == (
        "-",
        "after the year 9999",
        None,
        None,
    )
    row = with_times({"began_ms": 1_795_000_000_123, "ended_ms": 0}, "began", "ended")
    assert (row["began_at"], row["ended_at"]) == ("2026-11-18T11:06:40.123+00:00", None)


def test_markup_in_a_name_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    output().print_rows([{"topic": "[red]x[/red]"}], ("topic",), "")
    assert "[red]x[/red]" in capsys.readouterr().out


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    quiet = output(quiet=True)
    quiet.info("hello")
    quiet.print_rows(ROWS, ("topic",), "")
    quiet.print_object({"a": 1})
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "")


def test_an_object_is_json_or_two_columns(capsys: pytest.CaptureFixture[str]) -> None:
    output(as_json=True).print_object({"uptime_seconds": 3})
    assert json.loads(capsys.readouterr().out) == {"uptime_seconds": 3}
    output().print_object({"uptime_seconds": 3})
    assert "uptime seconds" in capsys.readouterr().out


def test_bytes_become_text_or_base64() -> None:
    assert json.loads(json_text({"a": b"caf\xc3\xa9", "b": b"\xff\xfe"})) == {"a": "café", "b": "//4="}


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(output(), "sending", 10) as advance:
        advance(10)
    assert capsys.readouterr().err == ""


def test_cells_sizes_and_hints_read_well() -> None:
    assert [format_cell(v) for v in (None, 1234567, True, [1, 2], {"a": 1}, 2.5)] == [
        "-",
        "1,234,567",
        "yes",
        "1, 2",
        "a=1",
        "2.5",
    ]
    assert [size_text(n) for n in (0, 1536, 5 << 30)] == ["0 B", "1.5 KiB", "5.0 GiB"]
    assert did_you_mean("ordrs", ["orders", "logs"]) == " Did you mean 'orders'?"
    assert did_you_mean("zebra", ["orders"]) == ""


def test_ages_have_their_two_largest_units() -> None:
    found = [age_text(seconds) for seconds in (0, 0.25, 9.5, 45.7, 90, 3600, 7500, 90_000, 8_640_000, 32e6, 4e11)]
    assert found == [
        "0 s",
        "0.25 s",
        "9.5 s",
        "45 s",
        "1 min 30 s",
        "1 h",
        "2 h 5 min",
        "1 d 1 h",
        "100 d",
        "1 y 5 d",
        "12,683 y 334 d",
    ]


def test_what_strangers_named_cannot_steer_a_terminal() -> None:
    assert escape_unprintable("order-42 äöü 漢") == "order-42 äöü 漢"
    assert escape_unprintable("a\x1b[31m\r\n\u202e") == "a\\x1b[31m\\r\\n\\u202e"


def test_a_long_list_is_one_array_written_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    output(as_json=True).print_array({"n": number} for number in range(3))
    assert json.loads(capsys.readouterr().out) == [{"n": 0}, {"n": 1}, {"n": 2}]
    output(as_json=True).print_array([])
    assert capsys.readouterr().out == "[]\n"


@pytest.mark.parametrize("state", [ConnectionState.DOWN, ConnectionState.GREETING])
def test_a_loss_is_reported_also_while_something_accepts_connections_and_never_answers(
    state: ConnectionState, capsys: pytest.CaptureFixture[str]
) -> None:
    link = SimpleNamespace(
        connection_count=1, state=ConnectionState.READY, has_pending_requests=True, server="h:1", servers=["h:1"]
    )
    report = ConnectionReport(cast("ClientConnection", link))
    report.check()
    link.state = state
    for _ in range(3):
        report.check()
    lost = "tfmq: no connection to the broker at h:1, trying again; stop with Ctrl-C\n"
    assert capsys.readouterr().err == lost
    link.connection_count, link.state = 2, ConnectionState.READY
    report.check()
    assert capsys.readouterr().err == "tfmq: connected to the broker at h:1 again\n"
