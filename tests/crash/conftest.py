"""What the tests of crashes share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _without_log_lines(request: pytest.FixtureRequest) -> Iterator[None]:
    """Turns logging off in tests that do not look at it. One test opens up to 60,000 brokers, and pytest keeps each log
    line until the test ends, with the objects that it names: 8 GB."""
    if "caplog" in request.fixturenames:
        yield
        return
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
