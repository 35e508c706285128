"""One member of a group, while the broker hears of it: its connection, its wishes, what it has, what it waits for."""

from collections.abc import Collection
from typing import Final

from tfmq.broker.caller import Reply, Session
from tfmq.broker.group_strategies import Candidate, Partition
from tfmq.broker.register import Key
from tfmq.broker.timers import Timer

REJOINS_A_SESSION: Final = 10
"""A member whose connection is gone has a tenth of its session time to come back: its process is dead, or connects
again at once; to wait for the rest would only keep its partitions idle.
"""


class Wishes:
    """What a member asked for: `only` None: every partition of its topics."""

    __slots__ = ("only", "strategy", "topics")

    def __init__(self, topics: Collection[str], strategy: str, only: Collection[Partition] | None) -> None:
        self.topics = frozenset(topics)
        self.strategy = strategy
        self.only = None if only is None else frozenset(only)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Wishes) and self._all() == other._all()

    def __hash__(self) -> int:
        return hash(self._all())

    def _all(self) -> tuple[object, ...]:
        return self.topics, self.strategy, self.only

    @property
    def size(self) -> int:
        """How many names it keeps in memory; at least one, so that whoever asks for nothing is counted, too."""
        return 1 + len(self.topics) + len(self.only or ())


class Waiting:
    """A HEARTBEAT that waits for a change, and what its sender knows: what it holds (True: it is to give that up), and
    the last generation that it has seen.
    """

    __slots__ = ("generation", "held", "reply", "session", "timer")

    def __init__(self, reply: Reply, session: Session, generation: int, held: dict[Key, bool]) -> None:
        self.reply, self.session, self.generation, self.held = reply, session, generation, held
        self.timer: Timer | None = None


class Member:
    """See the module. `joined` is the generation of its join: what is older, of the same name, is not this member."""

    __slots__ = (
        "id", "joined", "latest", "lost_at", "owned", "seen", "session", "session_ms", "timer", "waiting", "wishes",
    )  # fmt: skip

    def __init__(self, id: str, joined: int, session_ms: int, now: float) -> None:
        self.id, self.joined, self.session_ms, self.seen = id, joined, session_ms, now
        self.session: Session | None = None
        self.latest = -1
        """The number of the latest connection over which it was heard of."""
        self.lost_at: float | None = None
        """When its connection went; None while there is one, and after a start, when it has its whole session time."""
        self.wishes: Wishes | None = None
        """None for one that was found in the catalog and has not been heard of: it keeps what it has."""
        self.owned: dict[Key, int] = {}
        """What it has, by which grant: on the disk, so that it may be told."""
        self.waiting: Waiting | None = None
        self.timer: Timer | None = None

    def attach(self, session: Session, now: float) -> None:
        """It is heard of over this connection."""
        self.session, self.lost_at, self.seen, self.latest = session, None, now, session.number

    def left(self, session: Session) -> bool:
        """Whether it has gone on over a later connection: what still comes over this one was sent before."""
        return session.number < self.latest

    def detach(self, now: float) -> None:
        """Its connection is gone."""
        self.session, self.lost_at = None, now

    def spare(self, now: float) -> None:
        """Nobody listened: it has its time from now on, also to come back."""
        self.seen = now
        if self.lost_at is not None:
            self.lost_at = now

    def deadline(self) -> float:
        """When it is dead if nothing more is heard of it."""
        seconds = self.session_ms / 1000
        if self.lost_at is None:
            return self.seen + seconds
        return min(self.seen + seconds, self.lost_at + seconds / REJOINS_A_SESSION)

    @property
    def generation(self) -> int:
        """The number that all its requests should bear: of its join, or of the last grant."""
        return max(self.joined, *self.owned.values()) if self.owned else self.joined

    @property
    def candidate(self) -> Candidate | None:
        """As the strategies see it."""
        wishes = self.wishes
        return None if wishes is None else Candidate(self.id, wishes.topics, wishes.only)
