"""Short names of buckets, for locators: a number from 1 to 65,535 for each that is there. Any thread."""

from collections.abc import Iterable

from journal.errors import Full
from tfmq.delay.bucket import Bucket
from tfmq.delay.columns import SLOTS_MAX


class Slots:
    """Who has which. A slot is given again only after all others: a locator that went stale finds nobody, for long."""

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self._buckets = {bucket.slot: bucket for bucket in buckets}
        self._last = max(self._buckets, default=0)

    def __getitem__(self, slot: int) -> Bucket:
        return self._buckets[slot]

    def get(self, slot: int) -> Bucket | None:
        """Who has it."""
        return self._buckets.get(slot)

    def __len__(self) -> int:
        return len(self._buckets)

    def free(self) -> int:
        """One that nobody has. Raises Full if there is none."""
        if len(self._buckets) >= SLOTS_MAX:
            raise Full(f"{SLOTS_MAX} buckets of delayed messages are there, and there can be no more")
        slot = self._last
        while True:
            slot = slot % SLOTS_MAX + 1
            if slot not in self._buckets:
                self._last = slot
                return slot

    def put(self, bucket: Bucket) -> None:
        """It has its slot from now on."""
        self._buckets[bucket.slot] = bucket

    def drop(self, buckets: Iterable[Bucket]) -> None:
        """They are gone."""
        for bucket in buckets:
            self._buckets.pop(bucket.slot, None)
