"""The values that go in and out are what the pages say."""

from __future__ import annotations

from journal.record.batch import PLAIN, succession_source
from journal.record.block_trailer import SOURCE_SUCCESSION


def test_a_plain_source_has_no_position() -> None:
    assert PLAIN == (0, 0, 0, 0)


def test_a_succession_tells_never_sent_from_the_first_sequence() -> None:
    assert succession_source(5, 6, -1) == (SOURCE_SUCCESSION, 5, 6, 0)
    assert succession_source(5, 6, 0) == (SOURCE_SUCCESSION, 5, 6, 1)
