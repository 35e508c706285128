"""Work that peers ask for and that may take long: only so much of it runs at once, so that forces, rolls and what
others ask for never wait behind all of it.

What must wait does so here, and whoever asked for much is served in turn with those who asked for little.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from tfmq.broker.reply import Run, Session
from tfmq.errors import Busy

WAITING_MAX: Final = 100_000
"""Each is an object of a few hundred bytes; whoever asked may be gone long since."""

Waiting = tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]]


class Lane:
    """A `Run` over another one, of which it takes `at_once` workers at most.

    What would be more than `waiting_max` pieces of waiting work ends at once, as `Busy`.
    """

    def __init__(self, run: Run, at_once: int, waiting_max: int = WAITING_MAX) -> None:
        self._run = run
        self._free = at_once
        self._waiting_max = waiting_max
        self._waiting: dict[object, deque[Waiting]] = {}
        self._count = 0

    def run(
        self,
        work: Callable[[], Any],
        done: Callable[[Any, BaseException | None], None],
        who: object = None,
    ) -> None:
        """As `Run`; `who` asks for it."""
        if self._free:
            self._begin(work, done)
        elif self._count >= self._waiting_max:
            done(None, Busy())
        else:
            self._count += 1
            self._waiting.setdefault(who, deque()).append((work, done))

    def _begin(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        self._free -= 1
        self._run(work, partial(self._ended, done))

    def _ended(
        self, done: Callable[[Any, BaseException | None], None], result: Any, error: BaseException | None
    ) -> None:
        self._free += 1
        while self._free and self._waiting:
            who = next(iter(self._waiting))
            line = self._waiting.pop(who)
            first = line.popleft()
            self._count -= 1
            if line:
                self._waiting[who] = line
            self._begin(*first)
        done(result, error)


# How much may wait for the disk: bytes and requests, of one session and of all.
#
# A session above its share is paused (its bytes stay in its own socket); above the broker's share a request
# is refused as `Busy`, and nothing of it has happened.

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
