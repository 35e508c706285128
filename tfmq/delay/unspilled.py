"""Arrivals that are in no bucket: since when there are any, and the lowest due of them, pending or not."""

from typing import Final

UNTOLD: Final = (
    "What waits cannot be listed or counted, because the disk failed under the buckets of delayed messages. Mend the"
    " disk, then start the broker again."
)
"""Where they can never come into buckets, which is where lists look."""


class Unspilled:
    """See the module. `lows`: the lowest due, and that of those that are on their way into buckets, where known."""

    def __init__(self) -> None:
        self.low: int | None = None
        self.since: int | None = None
        self._going: tuple[int | None, int | None] = (None, None)

    def landed(self, low: int | None, now_ms: int) -> None:
        """More of them; None: no messages."""
        self.low = min([each for each in (low, self.low) if each is not None], default=None)
        self.since = self.since or now_ms

    @property
    def lows(self) -> list[int]:
        return [low for low in (self.low, self._going[0]) if low is not None]

    def begin_spill(self) -> None:
        """All that are there go; what comes from now on is apart."""
        self._going = self.low, self.since
        self.low = self.since = None

    def end_spill(self, done: bool) -> None:
        """They are in buckets, or stay where they are."""
        (low, since), self._going = self._going, (None, None)
        if not done:
            self.landed(low, since or 0)
            self.since = since
