"""What may be written for a place to start at, and what is refused in so many words."""

from datetime import UTC, datetime
from typing import Any

import pytest

from tfmq.client.start import EARLIEST, LATEST, Question, question, seek_question
from tfmq.errors import BadRequest
from tfmq.message import Ordinal
from tfmq.protocol.commands import BY_OFFSET, BY_ORDINAL, BY_TIME_MS

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
NOON_MS = 1_767_268_800_000


def test_every_way_to_start() -> None:
    assert question("earliest") == EARLIEST
    assert question("latest") == LATEST
    assert question(0) == Question(BY_OFFSET, 0, exact=True)
    assert question(Ordinal(7)) == Question(BY_ORDINAL, 7)
    assert question(NOON) == Question(BY_TIME_MS, NOON_MS)


@pytest.mark.parametrize("start", ["first", -1, 1 << 63, True, None, 1.5, Ordinal(-1), datetime(2026, 1, 1)])
def test_what_is_no_start_is_refused(start: Any) -> None:
    with pytest.raises(BadRequest):
        question(start)


def test_a_seek_takes_exactly_one_place_and_the_record_at_or_before_an_offset() -> None:
    assert seek_question(offset=5) == Question(BY_OFFSET, 5)
    assert seek_question(ordinal=5) == Question(BY_ORDINAL, 5)
    assert seek_question(time=NOON) == Question(BY_TIME_MS, NOON_MS)
    assert seek_question(to="latest") == LATEST
    for wrong in ({}, {"offset": 1, "ordinal": 1}, {"to": "middle"}, {"offset": -1}):
        with pytest.raises(BadRequest):
            seek_question(**wrong)
