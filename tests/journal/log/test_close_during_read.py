"""A log that is let go of while a reader is on its way into it: the reader gets an error of tfmq."""

import pytest

from journal.errors import Closed
from tests.journal.logs import Bench


def test_a_reader_that_comes_just_after_the_log_went_is_notified_that_it_is_closed() -> None:
    bench = Bench()
    log = bench.open()
    bench.send(3)
    log.force()
    reader = log._reader
    log.abandon("its topic was deleted")
    with pytest.raises(Closed):
        reader.read(0, 1000, False, None, cached=False)
    with pytest.raises(Closed):
        reader.seek_offset(5)
    with pytest.raises(Closed):
        reader.oldest_ms()
