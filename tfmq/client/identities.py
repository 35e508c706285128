"""Producer ids in hand: leased many at a time, ahead of need, so that a stream seldom waits for one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tfmq.client.call import Call
from tfmq.client.link import Link
from tfmq.errors import TfmqError
from tfmq.ids import Lease
from tfmq.limits import PRODUCER_IDS_PER_LEASE
from tfmq.protocol.commands import LeaseProducerIds

LEASE_COUNT = 16
"""Asked for at once, or twice what is waited for: ids are plenty, a round trip before a first send is not."""

Taker = Callable[[int, TfmqError | None], None]


class Identities:
    """Gives each taker an id that no stream had before. Unused ones are never given back, and
    dropped when they grow old: the broker takes an id that was leased too long ago for one that it forgot.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lease = Lease(0, 0)
        self._lease_ends = 0.0
        self._takers: deque[Taker] = deque()
        self._call: Call | None = None

    def take(self, taker: Taker) -> None:
        """Call `taker(id, None)`, at once if an id is in hand, or `taker(0, error)` if none can be had."""
        self._takers.append(taker)
        self._serve()

    def _serve(self) -> None:
        if self._lease.count and self._link.now() >= self._lease_ends:
            self._lease = Lease(0, 0)
        while self._takers and self._lease.count:
            taken, self._lease = self._lease.take()
            self._takers.popleft()(taken.first, None)
        if self._takers and self._call is None:
            count = min(PRODUCER_IDS_PER_LEASE, max(LEASE_COUNT, 2 * len(self._takers)))
            self._call = self._link.call(LeaseProducerIds(count), unattended=True)
            self._call.when_done(self._leased)

    def _leased(self, call: Call) -> None:
        self._call = None
        if call.error is None:
            self._lease = Lease(call.reply.first, call.reply.count)
            self._lease_ends = self._link.now() + self._link.limits["producer_idle_seconds"] / 2
            self._serve()
            return
        takers, self._takers = self._takers, deque()
        for taker in takers:
            taker(0, call.error)
