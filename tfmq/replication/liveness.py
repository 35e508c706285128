"""When a standby may claim a term, and when a primary refuses requests. Safety does not depend on it, only service.

All times are seconds of one monotonic clock, and passed in. The clock goes on while a process is frozen. So it is seen
afterwards that there was a gap, and nothing is concluded from what was seen before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GAP_SHARE: Final = 0.25
"""A standby that had no answer for longer than this share of the lease does not know whether the primary lives."""
REFUSE_SHARE: Final = 0.5
"""A primary that has stored nothing for this share of the lease refuses requests until it has."""


@dataclass
class StandbyLease:
    """How long a standby has seen that its primary stores nothing.

    `jitter_seconds` must be drawn anew for each lease: it makes it unlikely that two standbys claim at once. `began` is
    when the standby began to follow.
    """

    lease_seconds: float
    jitter_seconds: float
    began: float

    def __post_init__(self) -> None:
        self._silent_from = self._silent_until = self._heard = self.began

    def entry_found(self, now: float) -> None:
        """An entry was read: the primary has stored it at some time before `now`."""
        self._heard = self._silent_from = self._silent_until = now

    def nothing_found(self, asked: float, now: float) -> None:
        """The store, asked at `asked`, has answered at `now` that there is no next entry.

        A store that does not answer is not reported: it is a gap.
        """
        if now - self._heard > self.lease_seconds * GAP_SHARE:
            self._silent_from = now
        self._heard = now
        self._silent_until = max(asked, self._silent_from)

    def restart(self, now: float, jitter_seconds: float) -> None:
        """Begin a new lease: another server has claimed, or an attempt to become primary has failed."""
        self.jitter_seconds = jitter_seconds
        self._heard = self._silent_from = self._silent_until = now

    def may_claim(self, now: float) -> bool:
        """Return whether nothing was stored for a lease, and the last poll is no older than a gap may be."""
        silent = self._silent_until - self._silent_from
        return (
            silent >= self.lease_seconds + self.jitter_seconds and now - self._heard <= self.lease_seconds * GAP_SHARE
        )


@dataclass
class PrimaryLease:
    """How long a primary has stored nothing. `began`: when the put of its BEGIN began."""

    lease_seconds: float
    began: float

    def entry_stored(self, put_began: float) -> None:
        """An entry is stored, with all before it, by a put that began at `put_began`.

        The time of the answer is not used: standbys may have seen the entry long before.
        """
        self.began = max(self.began, put_began)

    @property
    def refuses_from(self) -> float:
        """From this time on requests are refused, unless an entry is stored."""
        return self.began + self.lease_seconds * REFUSE_SHARE

    def may_serve(self, now: float) -> bool:
        return now < self.refuses_from
