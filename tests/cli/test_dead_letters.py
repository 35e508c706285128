"""How letters are chosen and shown."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from click import Command

from tests.dead_letters.helpers import failure, message
from tfmq.cli.dlq import (
    COLUMNS,
    ERROR_CHARACTERS,
    PENDING_STATES,
    STATES,
    LetterChoice,
    dlq,
    export_row,
    json_row,
    table_row,
)
from tfmq.dead_letters import model as letters
from tfmq.dead_letters.model import RedrivePosition, letter_from_message

LETTER = replace(
    letter_from_message(message(1, b"x", key=b"\xff", born_ms=1_763_000_000_000), "billing"),
    failures=(failure(0, f"E: {'long ' * 100}\x1b"),),
    kept_ms=1_763_700_000_000,
)


def test_the_words_of_states_are_the_stores() -> None:
    assert STATES == letters.STATES
    assert set(PENDING_STATES) == set(letters.STATES) - set(letters.FINAL_STATES)


def test_a_choice_becomes_a_selection() -> None:
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    choice = LetterChoice(None, "billing", {"topic": "orders", "key": None, "since": moment, "states": ()})
    found = choice.selection(("dead",), ("3f",))
    assert (found.states, found.group, found.topic, found.ids) == (("dead",), "billing", "orders", ("3f",))
    assert found.since_ms == round(moment.timestamp() * 1000) and found.until_ms is None
    assert LetterChoice(None, None, {"states": ("waiting",)}).selection(("dead",)).states == ("waiting",)


def test_a_choice_narrows_or_does_not() -> None:
    assert not LetterChoice("dead.db", None, {"topic": None, "states": ()}).has_filters
    assert (
        LetterChoice(None, "billing", {}).has_filters
        and LetterChoice(None, None, {"partition": 0}).has_filters
    )


def test_a_row_has_plain_values_and_none_for_what_is_not() -> None:
    row = json_row(LETTER)
    assert (row["key"], row["next_at"], row["sent_to"], row["sent_offset"]) == ("\ufffd", None, None, None)
    assert row["kept_at"] == "2025-11-21T04:40:00.000+00:00"
    sent = json_row(
        replace(LETTER, journey=RedrivePosition("again", 8, 3, 99, 5, 0), sent_offset=0, next_ms=1)
    )
    assert (sent["sent_to"], sent["sent_offset"], bool(sent["next_at"])) == ("again-3", 0, True)


def test_a_table_is_narrow_and_steers_no_terminal() -> None:
    found = table_row(LETTER)
    assert set(found) == set(COLUMNS)
    assert len(found["error"]) == ERROR_CHARACTERS and "\x1b" not in found["error"]
    assert table_row(replace(LETTER, key=None))["key"] == "-"
    strange = table_row(replace(LETTER, id="\x1b[2J", group="\x1b[2J", topic="\x1b[2J", broker="\x1b[2J"))
    assert not any("\x1b" in each for each in strange.values()), (
        "who may write to the topic may write anything"
    )


def test_whole_it_is_what_send_reads() -> None:
    row = export_row(LETTER)
    assert export_row(replace(LETTER, body=None)).keys() < row.keys(), "its body is gone: the rest is shown"
    assert (row["id"], row["payload"], row["key"], row["key_base64"]) == (LETTER.id, "x", None, "/w==")
    assert row["born_at"].startswith("2025-11-13") and "at_ms" not in row["failures"][0]


def test_an_error_that_is_cut_shows_it() -> None:
    whole, longer = "x" * ERROR_CHARACTERS, "y" * (ERROR_CHARACTERS + 1)
    for error, shown in ((whole, whole), (longer, longer[: ERROR_CHARACTERS - 3] + "...")):
        row = table_row(replace(LETTER, failures=(failure(0, error),)))
        assert row["error"] == shown and len(shown) == ERROR_CHARACTERS


@pytest.mark.parametrize("name", ["list", "show", "retry", "drop", "export", "redrive"])
def test_every_command_has_store_group_and_json(name: str) -> None:
    command: Command = dlq.commands[name]
    options = {option for parameter in command.params for option in parameter.opts}
    assert {"--store", "--group", "--json", "--quiet", "--servers"} <= options
    assert command.epilog and "Example" in command.epilog
