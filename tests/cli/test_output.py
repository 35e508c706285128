"""Tables for people, JSON for programs."""

import json
import sys

import pytest

from tfmq.cli.output import Output, age_text, cell, did_you_mean, dumps, printable, progress, size_text


def output(as_json: bool = False, quiet: bool = False) -> Output:
    return Output(None, as_json, quiet)


ROWS = [
    {"topic": "orders", "size_bytes": 12345, "open": True},
    {"topic": "logs", "size_bytes": 0, "open": False},
]


def test_a_list_is_one_json_array(capsys: pytest.CaptureFixture[str]) -> None:
    output(as_json=True).rows(ROWS, ("topic",), "none")
    assert json.loads(capsys.readouterr().out) == ROWS


def test_an_empty_list_is_an_empty_array_or_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    output(as_json=True).rows([], ("topic",), "no topics")
    output().rows([], ("topic",), "no topics")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("[]\n", "no topics\n")


def test_a_table_has_words_and_grouped_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    output().rows(ROWS, ("topic", "size_bytes", "open"), "")
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
    output().rows([row], list(row), "none")
    shown = capsys.readouterr().out
    assert all(value in shown for value in row.values())


def test_markup_in_a_name_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    output().rows([{"topic": "[red]x[/red]"}], ("topic",), "")
    assert "[red]x[/red]" in capsys.readouterr().out


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    quiet = output(quiet=True)
    quiet.say("hello")
    quiet.rows(ROWS, ("topic",), "")
    quiet.object({"a": 1})
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "")


def test_an_object_is_json_or_two_columns(capsys: pytest.CaptureFixture[str]) -> None:
    output(as_json=True).object({"uptime_seconds": 3})
    assert json.loads(capsys.readouterr().out) == {"uptime_seconds": 3}
    output().object({"uptime_seconds": 3})
    assert "uptime seconds" in capsys.readouterr().out


def test_bytes_become_text_or_base64() -> None:
    assert json.loads(dumps({"a": b"caf\xc3\xa9", "b": b"\xff\xfe"})) == {"a": "café", "b": "//4="}


def test_progress_is_silent_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(output(), "sending", 10) as advance:
        advance(10)
    assert capsys.readouterr().err == ""


def test_cells_sizes_and_hints_read_well() -> None:
    assert [cell(v) for v in (None, 1234567, True, [1, 2], {"a": 1}, 2.5)] == [
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
    found = [
        age_text(seconds) for seconds in (0, 0.25, 9.5, 45.7, 90, 3600, 7500, 90_000, 8_640_000, 32e6, 4e11)
    ]
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
    assert printable("order-42 äöü 漢") == "order-42 äöü 漢"
    assert printable("a\x1b[31m\r\n\u202e") == "a\\x1b[31m\\r\\n\\u202e"


def test_a_long_list_is_one_array_written_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    output(as_json=True).array({"n": number} for number in range(3))
    assert json.loads(capsys.readouterr().out) == [{"n": 0}, {"n": 1}, {"n": 2}]
    output(as_json=True).array([])
    assert capsys.readouterr().out == "[]\n"
