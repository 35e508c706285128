"""How often an idle query asks: Spark asks again 10 ms after an answer that had nothing new.

That is cheap for a few partitions and not for a thousand. So a query that found nothing rests, before it asks again,
for a multiple of what asking took. It asks after the rest, so what is there is never overlooked.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

REST: Final = 3.0
"""Times what asking took: an idle query is at work for a quarter of its time at most."""
REST_SECONDS_MAX: Final = 0.2


class Pace:
    """Of one query; `now` and `sleep` in seconds."""

    def __init__(
        self, now: Callable[[], float] = time.monotonic, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self._now, self._sleep = now, sleep
        self._rest = 0.0

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Around a question; behind one that was answered `idle` it rests first."""
        if self._rest > 0:
            self._sleep(self._rest)
        begun = self._now()
        yield
        self._rest = min(REST_SECONDS_MAX, REST * (self._now() - begun))

    def busy(self) -> None:
        """The answer had something new: the next question does not wait."""
        self._rest = 0.0
