"""Until when files must stay because messages in memory say that their records lie there.

Whatever was near when arrivals were spilled, or a bucket split, was due below the horizon of that moment; what came
near later lies in the new files. So when everything below that horizon has fired, nobody looks into the old ones.
"""

from collections import deque
from typing import NamedTuple

from tfmq.delay.bucket import Bucket


class _Pin(NamedTuple):
    horizon: int
    offset: int | None
    bucket: Bucket | None


class Pins:
    """See the module. Arrivals before `offset` nobody needs."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self._pins: deque[_Pin] = deque()
        self._top = 0

    def spilled(self, offset: int, horizon: int) -> None:
        """Arrivals up to there are in buckets."""
        self._add(horizon, offset, None)

    def split(self, bucket: Bucket, horizon: int) -> None:
        """What was in the bucket is in others."""
        self._add(horizon, None, bucket)

    def _add(self, horizon: int, offset: int | None, bucket: Bucket | None) -> None:
        """A horizon that was taken back does not let an earlier pin go."""
        self._top = max(horizon, self._top) if self._pins else horizon
        self._pins.append(_Pin(self._top, offset, bucket))

    @property
    def next_horizon(self) -> int:
        """What is due below keeps the oldest pin; 0 without one."""
        return self._pins[0].horizon if self._pins else 0

    def release(self, needed: int) -> list[Bucket]:
        """Nothing in memory is due before `needed`: the buckets that nobody looks into any more."""
        found = []
        while self._pins and self._pins[0].horizon <= needed:
            pin = self._pins.popleft()
            if pin.bucket is not None:
                found.append(pin.bucket)
            if pin.offset is not None:
                self.offset = pin.offset
        return found
