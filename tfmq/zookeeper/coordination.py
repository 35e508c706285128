"""A member of a group that ZooKeeper coordinates: the `Coordinator` on a session of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from tfmq.errors import TfmqError
from tfmq.offsets.storage import PartitionName
from tfmq.zookeeper.address import BROKER, zookeeper_address
from tfmq.zookeeper.connection import new_client
from tfmq.zookeeper.coordinator import Coordinator, Share
from tfmq.zookeeper.layout import Layout
from tfmq.zookeeper.runner import Runner

CLOSE_SECONDS: Final = 10.0
PATIENCE_SECONDS: Final = 3.0
"""So long behind its start, or the last answer that counted, a member does not complain that nobody answers."""


def uptime() -> float:
    """A clock that goes on while the machine sleeps, as sessions do; `time.monotonic` of Linux stands still then."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class Coordination:
    """One member. No method waits, but `close` for a moment; all may be called from any thread.

    `session_seconds`: what ZooKeeper is asked for; it may give less · `changed` is called, in threads of this class,
    when `share` has something new, and must not wait.
    """

    def __init__(
        self,
        address: str,
        group: str,
        member: str,
        *,
        session_seconds: float,
        changed: Callable[[], None],
        clock: Callable[[], float] = uptime,
    ) -> None:
        """Touches no network. Raises BadRequest for what is no address, NotSupported without kazoo."""
        self.address = zookeeper_address(address)
        new_client(self.address, session_seconds)
        self._group, self._seconds, self._changed, self._clock = group, session_seconds, changed, clock
        self._begin(member)

    def _begin(self, member: str) -> None:
        layout = Layout(self.address.root, BROKER)
        self._coordinator = Coordinator(layout, self._group, member, self._seconds)
        self._runner = Runner(self.address, self._coordinator, self._changed, self._clock)
        self._patient_until = float("inf")

    # What it is told

    def wants(self, partitions: Mapping[str, Sequence[int]]) -> None:
        """The topics that this member reads, and the partitions that they have now. The first time it joins."""
        runner = self._runner
        with runner.condition:
            if runner.is_closed:
                return
            self._coordinator.wants(partitions)
            if not runner.is_started:
                self._patient_until = self._clock() + PATIENCE_SECONDS
                runner.start()
            runner.wake()

    def release(self, names: Iterable[PartitionName]) -> None:
        """Nothing of these is in work, and all is saved: somebody else may have them."""
        with self._runner.condition:
            self._coordinator.release(names)
            self._runner.wake()

    # What it says

    def share(self) -> Share:
        """What this member has; see `Share`. The time `until` is of its clock, and soon over."""
        with self._runner.condition:
            return self._coordinator.share()

    def is_sure(self) -> bool:
        """Whether what it has is its own at this moment: ask at each message."""
        return self._clock() < self.share().until

    @property
    def generation(self) -> int:
        """The highest generation of what it has; 0: it has nothing."""
        return max(self.share().granted.values(), default=0)

    @property
    def failure(self) -> TfmqError | None:
        """Why it will never have anything; None: it may."""
        return self._runner.failure

    @property
    def why_idle(self) -> str:
        """Why there is nothing, or not all, to be had; "": it has what is its own."""
        with self._runner.condition:
            coordinator = self._coordinator
            if self.failure is not None:
                return str(self.failure)
            now = self._clock()
            if coordinator.share().until > now:
                self._patient_until = now + PATIENCE_SECONDS
            elif now >= self._patient_until:
                return f"{self.address} does not answer."
            if coordinator.is_idle:
                return (
                    f"{coordinator.members} members, and no partition is left for this one: tfmq topic grow"
                )
            return coordinator.why_waiting()

    # The end

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Leave: what this member had is free when this returns, or else when its session is over."""
        self._runner.close(seconds)

    def renew(self, member: str) -> None:
        """In a forked child: it is a member of its own, which joins when it says what it wants. The parent's session,
        and its connection, are left alone.
        """
        self._begin(member)
