"""Letters as rows and back, without a database."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.dead_letters.helpers import failure, message
from tfmq.dead_letters.model import RedrivePosition, letter_from_message
from tfmq.dead_letters.sql_store import (
    BODY_COLUMNS,
    COLUMNS_WITHOUT_BODY,
    TABLE,
    letter_from_row,
    row_from_letter,
)

JOURNEY = RedrivePosition("again", 8, 3, 99, 5, 1 << 40)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("journey", [None, JOURNEY])
@pytest.mark.parametrize("key", [None, "42", b"42"])
def test_a_letter_comes_back_as_it_was(
    whole: bool, journey: RedrivePosition | None, key: bytes | str | None
) -> None:
    letter = letter_from_message(message(3, b"\x00x", key=key, tag="new"), "billing")
    letter = replace(
        letter,
        failures=(failure(), failure(1)),
        journey=journey,
        state="redriving",
        calls=3,
        token="me",
        lease_ms=5,
    )
    letter = letter if whole else replace(letter, body=None)
    row = row_from_letter(letter)
    assert letter_from_row(row) == letter
    assert set(row) == {column.name for column in (TABLE.c if whole else COLUMNS_WITHOUT_BODY)}


def test_what_may_be_large_is_read_only_where_it_is_wanted() -> None:
    assert {column.name for column in BODY_COLUMNS} == {"payload", "attribute"}
    assert not {column.name for column in COLUMNS_WITHOUT_BODY} & {"payload", "attribute"}


def test_text_is_such_as_every_database_takes() -> None:
    letter = replace(
        letter_from_message(message(key="a\0b", tag="\0"), "g"), failures=(failure(0, "bad \ud800\0"),)
    )
    row = row_from_letter(letter)
    assert (row["key_text"], row["tag"], row["error"]) == ("a\ufffdb", "\ufffd", "bad ?\ufffd")
    assert row["failures"].isascii() and "\0" not in row["failures"]
    assert letter_from_row(row).failures == letter.failures


def test_no_row_can_be_twice_for_one_message() -> None:
    (unique,) = [each for each in TABLE.constraints if each.name == "tfmq_dead_letters_message"]
    names = [column.name for column in unique.columns]  # type: ignore[attr-defined]
    assert names == ["group_name", "incarnation", "partition_number", "message_offset", "appended_ms"]
    assert [column.name for column in TABLE.primary_key] == ["id"]
