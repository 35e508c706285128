"""A member of a group: its subscription, partitions and heartbeat, and when it expires (the session timeout).

The timer that removes expired members is in `GroupCoordinator`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tfmq.broker.catalog_state import Key
from tfmq.broker.groups.assignors import Partition
from tfmq.broker.reply import Reply, Session
from tfmq.broker.timers import Timer

HEARTBEATS_PER_TIMEOUT: Final = 3
"""The reply to a heartbeat waits for at most the session timeout divided by this, so that two heartbeats may be lost
before the member expires."""
LATE_FRACTION: Final = 0.1
"""If a member's timeout check is late by more than this part of the timeout, the broker was suspended or overloaded."""
RECONNECT_FRACTION: Final = 10
"""A member expires when its connection has been closed for a tenth of its session timeout. Either its process is dead,
or it reconnects at once; a longer wait would only keep its partitions idle."""


class GroupSubscription(NamedTuple):
    """The subscription of a member: to the partitions `only`, or if that is None, to all partitions of `topics`."""

    topics: frozenset[str]
    strategy: str
    only: frozenset[Partition] | None

    @property
    def name_count(self) -> int:
        """Number of names plus one, so that empty subscriptions count in the limit `group_subscriptions`, too."""
        return 1 + len(self.topics) + len(self.only or ())


@dataclass(slots=True, eq=False)
class ParkedHeartbeat:
    """A parked HEARTBEAT. `generation` is the last generation that the sender had received."""

    reply: Reply
    session: Session
    generation: int
    held: dict[Key, bool]
    """Partition that the sender holds -> whether the sender is releasing it."""
    timer: Timer | None = None


@dataclass(slots=True, eq=False)
class Member:
    """A member that has not left or expired: its connection, subscription and partitions.

    `joined` is the generation of its join. A request with the same member id and a lower generation is from an earlier
    member.
    """

    id: str
    joined: int
    session_ms: int
    seen_at: float
    session: Session | None = None
    latest_connection: int = -1
    """The number of the latest connection that the member used."""
    disconnected_at: float | None = None
    """When the member's connection was closed (monotonic seconds); None while the member is connected. Also None for a
    restored member without a connection, so that the full session timeout applies."""
    subscription: GroupSubscription | None = None
    """None for a member restored from the catalog, until its first heartbeat. Until then it keeps its partitions."""
    owned: dict[Key, int] = field(default_factory=dict)
    """Owned partition -> the generation that assigned it. Only durable assignments, so the member may be notified."""
    parked: ParkedHeartbeat | None = None
    timer: Timer | None = None
    dead_letters: int | None = None
    """How many dead letters the member reported last; None for a restored member before its first heartbeat."""

    def connected(self, session: Session, now: float) -> None:
        """Record that the member uses the connection `session` now."""
        self.session, self.disconnected_at, self.seen_at = session, None, now
        self.latest_connection = session.number

    def disconnected(self, now: float) -> None:
        self.session, self.disconnected_at = None, now

    def restart_timeout(self, now: float) -> None:
        """Restart the session timeout, because the broker itself did not run and so read no requests."""
        self.seen_at = now
        if self.disconnected_at is not None:
            self.disconnected_at = now

    def expires_at(self) -> float:
        """Return when the member expires if it sends nothing more (monotonic seconds)."""
        seconds = self.session_ms / 1000
        if self.disconnected_at is None:
            return self.seen_at + seconds
        return min(self.seen_at + seconds, self.disconnected_at + seconds / RECONNECT_FRACTION)

    @property
    def generation(self) -> int:
        """The generation of the member's join or last assignment. The member's requests should name this generation."""
        return max(self.joined, *self.owned.values()) if self.owned else self.joined


def is_live(member: Member, now: float) -> bool:
    """Return whether the member is connected and within its session timeout."""
    return member.session is not None and now - member.seen_at <= member.session_ms / 1000


def client_identity(member: Member) -> str:
    return member.session.identity if member.session is not None else ""
