"""Which letters a selection means; that databases mean the same is in test_shelf.py."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.dead_letters.helpers import failure, message
from tfmq.dead_letters.admin import Desk
from tfmq.dead_letters.model import (
    DEAD,
    FIRST_PAGE,
    WAITING,
    PagePosition,
    Selection,
    key_text,
    letter_from_message,
)
from tfmq.errors import BadRequest

LETTER = replace(
    letter_from_message(message(1, key=b"42", tag="new"), "billing"),
    failures=(failure(), failure(1, "KeyError: X")),
    kept_ms=10,
)


def test_everything_that_is_given_must_hold() -> None:
    assert Selection().holds(LETTER)
    whole = Selection((DEAD,), "billing", "orders", 0, "42", "new", "keyerror", 10, 11, (LETTER.id,))
    assert whole.holds(LETTER)
    others = [
        {"states": (WAITING,)},
        {"group": "shipping"},
        {"topic": "bills"},
        {"partition": 1},
        {"key": "4"},
        {"tag": "old"},
        {"error": "no such"},
        {"since_ms": 11},
        {"until_ms": 10},
        {"ids": ("zz",)},
    ]
    for other in others:
        assert not whole._replace(**other).holds(LETTER), other


def test_a_key_is_text_where_it_can_be() -> None:
    assert (key_text(None), key_text("a"), key_text(b"a")) == (None, "a", "a")
    assert key_text(b"\xff") == "\ufffd"


def test_the_first_page_is_before_every_letter() -> None:
    assert PagePosition(0, "") > FIRST_PAGE


@pytest.mark.parametrize(
    "wrong", [{"states": "dead"}, {"states": ("ded",)}, {"states": ["dead", 5]}, {"ids": "ab"}]
)
def test_states_and_ids_are_several(wrong: dict[str, Any], tmp_path: Path) -> None:
    with Desk(tmp_path / "dead.db") as desk, pytest.raises(BadRequest, match=next(iter(wrong))):
        list(desk.letters(Selection(**wrong)))
