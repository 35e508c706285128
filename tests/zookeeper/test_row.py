"""The nodes of an offset, to and from bytes."""

from tfmq.offsets.storage import NO_OFFSET, StoredOffset
from tfmq.zookeeper.offsets import offset_data, row_data, stored_offset

STORED = StoredOffset(5, 1, 2, 3, 1 << 62)


def test_a_row_comes_back_as_it_was() -> None:
    assert stored_offset("/o", offset_data(STORED), row_data(STORED)) == STORED
    claimed = StoredOffset(NO_OFFSET, generation=4)
    assert offset_data(claimed) == b""
    assert stored_offset("/o", offset_data(claimed), row_data(claimed)) == claimed


def test_nothing_is_nothing() -> None:
    assert stored_offset("/o", None, None) is None


def test_an_offset_alone_is_of_no_incarnation_that_is_known() -> None:
    assert stored_offset("/o", b"17-5", None) == StoredOffset(5, 0, 0, -1, 0)


def test_the_offset_that_is_shown_wins() -> None:
    assert stored_offset("/o", b"0-9", row_data(STORED)) == StoredOffset(9, 0, 2, -1, 1 << 62)
