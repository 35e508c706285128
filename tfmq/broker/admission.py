"""Limits on the work that clients cause: worker jobs, and pending requests.

`BoundedExecutor` limits the jobs that run at once. `Backpressure` limits the bytes and requests that are pending.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from tfmq.broker.reply import Run, Session
from tfmq.errors import Busy

WAITING_MAX: Final = 100_000
"""Each queued job takes a few hundred bytes, and the client that asked for it may have disconnected."""

Waiting = tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]]


class Lane:
    """A `Run` that uses at most `at_once` workers of another `Run`.

    Slow jobs that clients ask for therefore cannot delay fsyncs and segment rolls. Jobs above that number are queued
    and started round-robin over the callers, so that one caller with many jobs does not delay the others. When
    `queued_max` jobs are queued, the next one fails immediately with `Busy`.
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
        """Run `work` in a worker, then call `done(result, error)`.

        `caller` identifies the queue for round-robin.
        """
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


RESUME_PART = 2
"""A paused session is resumed when half of its limit is free again, to avoid rapid toggling at the limit."""


class Share:
    """Pending bytes of one session, and whether the session is paused."""

    __slots__ = ("bytes", "paused")

    def __init__(self) -> None:
        self.bytes = 0
        self.paused = False


class Quotas:
    """Limits on pending bytes and requests, per session and for the whole broker.

    A session above its own limit is paused: its unread bytes stay in its socket. Above the broker's limit a request
    is rejected with `Busy` before it has any effect. Every `acquire` that returns is followed by exactly one
    `release` of the same size.
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        self.set_limits(limits)
        self.bytes = 0
        self.requests = 0
        self._shares: dict[Session, Share] = {}

    def set_limits(self, limits: Mapping[str, int]) -> None:
        """Replace the limits. Requests that are already pending may exceed them."""
        self.bytes_max = limits["pending_bytes"]
        self.session_bytes_max = limits["pending_bytes_per_session"]
        self.requests_max = limits["pending_requests"]

    def take(self, session: Session, size_bytes: int) -> None:
        """Count one more pending request. Raises Busy if the broker has no room for it."""
        if self.requests >= self.requests_max or (self.bytes and self.bytes + size_bytes > self.bytes_max):
            raise Busy(
                "The broker waits for its disk and accepts no more requests for now. Wait a little and try again."
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
        """Release a request of `size_bytes` after its reply."""
        self.bytes -= size_bytes
        self.requests -= 1
        share = self._shares[session]
        share.bytes -= size_bytes
        if share.paused and share.bytes * RESUME_PART <= self.session_bytes_max:
            share.paused = False
            session.resume()
        if not share.bytes:
            del self._shares[session]
