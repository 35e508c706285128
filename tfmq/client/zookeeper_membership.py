"""A place in a group that ZooKeeper coordinates, for a consumer: as `Membership`, where the broker is not asked."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from tfmq.client.consumer_options import ConsumerOptions
from tfmq.client.link import Link
from tfmq.client.membership import Membership
from tfmq.client.positions import PartitionName
from tfmq.client.waiting import Flag, Operation, Wait
from tfmq.errors import BadRequest
from tfmq.protocol.commands import GrantedPartition

LOOK_SECONDS: Final = 0.5
"""A change is told at once, but where the client is busy at that moment: then it is seen so much later."""
CLOSE_SECONDS: Final = 10.0


def membership_of(
    options: ConsumerOptions,
    link: Link,
    changed: Callable[[], None],
    raise_flag: Callable[[Flag], None],
) -> Membership:
    """The place of a consumer with these options, wherever its group is coordinated. Raises NotSupported."""
    if options.group is None:
        raise BadRequest("Without a group there is no place in one.")
    session_ms = int(options.session * 1000)
    if options.coordinator is None:
        return Membership(
            link, options.group, session_ms=session_ms, strategy=options.strategy, changed=changed
        )
    return ZooKeeperMembership(
        link,
        options.group,
        session_ms=session_ms,
        changed=changed,
        address=options.coordinator,
        raise_flag=raise_flag,
    )


class ZooKeeperMembership(Membership):
    """One member. Its shares are ranges, whatever strategy was asked for."""

    def __init__(
        self,
        link: Link,
        group: str,
        *,
        session_ms: int,
        changed: Callable[[], None],
        address: str,
        raise_flag: Callable[[Flag], None],
    ) -> None:
        from tfmq.zookeeper.group_coordinator import Coordination  # kazoo is for who uses it

        super().__init__(link, group, session_ms=session_ms, changed=changed)
        self._poke = Flag()
        self._raise_flag = raise_flag
        self._incarnations: Mapping[PartitionName, int] = {}
        self._coordination: Coordination = Coordination(
            address,
            group,
            self.member,
            session_seconds=session_ms / 1000,
            changed=lambda: self._raise_flag(self._poke),
        )

    def want(
        self,
        topics: Sequence[str],
        only: Iterable[PartitionName] | None = None,
        wanted: Mapping[PartitionName, int] | None = None,
    ) -> None:
        """As its base; the partitions are those of `wanted`."""
        self._incarnations = dict(wanted or {})
        numbers: dict[str, list[int]] = {topic: [] for topic in topics}
        for name in sorted(self._incarnations):
            numbers.setdefault(name.topic, []).append(name.partition)
        self._coordination.wants(numbers)
        self.joined = True
        self._poke.settle()

    def release(self, names: Iterable[PartitionName]) -> None:
        """As its base."""
        gone = [name for name in names if name in self.held]
        super().release(gone)
        self._coordination.release(gone)

    def may_hand_out(self) -> bool:
        """As its base: a session that may be over, and a partition that is taken back, hold everything up."""
        share = self._coordination.share()
        if self._differs(share.granted, share.revoked):
            self._poke.settle()
        return self._coordination.is_sure()

    def live(self) -> Operation[None]:
        """Never ends: takes note of what ZooKeeper says. Raises what makes it hopeless."""
        while True:
            self._poke = Flag()
            self.failure = self._coordination.failure
            if self.failure is not None:
                raise self.failure
            share = self._coordination.share()
            self.generation = max(self.generation, self._coordination.generation)
            self._note(self._coordination.why_idle)
            if self._differs(share.granted, share.revoked):
                self._see(share.granted, share.revoked)
            yield Wait((self._poke,), LOOK_SECONDS)

    def _differs(self, granted: Mapping[PartitionName, int], revoked: Iterable[PartitionName]) -> bool:
        held = {name: each.grant for name, each in self.held.items()}
        return held != dict(granted) or self.held.keys() - self.share.keys() != set(revoked)

    def _see(self, granted: Mapping[PartitionName, int], revoked: Iterable[PartitionName]) -> None:
        self.held = {
            name: GrantedPartition(name.topic, self._incarnations.get(name, 0), name.partition, grant)
            for name, grant in granted.items()
        }
        self.share = {name: each for name, each in self.held.items() if name not in set(revoked)}
        self._changed()

    def leave(self, until: float) -> Operation[None]:
        """As its base; waits a moment for ZooKeeper."""
        self._forget()
        self._coordination.close(max(0.0, min(CLOSE_SECONDS, until - self._link.now())))
        yield from ()

    def renew(self) -> None:
        """As its base."""
        super().renew()
        self._coordination.renew(self.member)
