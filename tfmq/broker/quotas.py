"""How much may wait for the disk: bytes and requests, of one session and of all.

A session above its share is paused (its bytes stay in its own socket); above the broker's share a request
is refused as `Busy`, and nothing of it has happened.
"""

from collections.abc import Mapping

from tfmq.broker.caller import Session
from tfmq.errors import Busy

RESUME_PART = 2
"""A paused session is read again when 1/2 of its share is free: fewer switches than at the edge."""


class Share:
    """What one session has waiting."""

    __slots__ = ("bytes", "paused")

    def __init__(self) -> None:
        self.bytes = 0
        self.paused = False


class Quotas:
    """Counts what is pending. Every `take` that returns is followed by exactly one `give` of its size."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        self.set_limits(limits)
        self.bytes = 0
        self.requests = 0
        self._shares: dict[Session, Share] = {}

    def set_limits(self, limits: Mapping[str, int]) -> None:
        """What may wait from now on; what waits already may be more."""
        self.bytes_max = limits["pending_bytes"]
        self.session_bytes_max = limits["pending_bytes_per_session"]
        self.requests_max = limits["pending_requests"]

    def take(self, session: Session, size_bytes: int) -> None:
        """Counts one more request of `size_bytes`; raises `Busy` if the broker has no room for it."""
        if self.requests >= self.requests_max or (self.bytes and self.bytes + size_bytes > self.bytes_max):
            raise Busy(
                "The broker waits for its disk and takes no more for now. Wait a little and try again."
            )
        share = self._shares.get(session)
        if share is None:
            share = self._shares[session] = Share()
        self.bytes += size_bytes
        self.requests += 1
        share.bytes += size_bytes
        if share.bytes >= self.session_bytes_max and not share.paused:
            share.paused = True
            session.pause()

    def give(self, session: Session, size_bytes: int) -> None:
        """A request of `size_bytes` has been answered."""
        self.bytes -= size_bytes
        self.requests -= 1
        share = self._shares[session]
        share.bytes -= size_bytes
        if share.paused and share.bytes * RESUME_PART <= self.session_bytes_max:
            share.paused = False
            session.resume()
        if not share.bytes:
            del self._shares[session]
