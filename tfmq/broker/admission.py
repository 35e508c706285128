"""Limits on the work that clients cause: worker jobs, and pending requests.

`BoundedExecutor` limits the jobs that run at once. `Backpressure` limits the bytes and requests that are pending.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

from tfmq.broker.reply import Reply, Run, Session, client_error
from tfmq.errors import Busy

QUEUED_JOBS_MAX: Final = 100_000
"""Maximum number of queued jobs, because of their memory: a few hundred bytes each, until the job has run."""

QueuedJob = tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]]


class BoundedExecutor:
    """Runs jobs in worker threads by calling the function `run`. At most `at_once` jobs run at the same time.

    The other workers remain free for fsyncs and segment rolls, which therefore never wait for slow jobs of clients.
    Jobs above `at_once` are queued, and started round-robin over the callers. When `queued_max` jobs are queued, a
    further job fails immediately with `Busy`.
    """

    def __init__(self, run: Run, at_once: int, queued_max: int = QUEUED_JOBS_MAX) -> None:
        self._run = run
        self._free = at_once
        self._queued_max = queued_max
        self._queues: dict[object, deque[QueuedJob]] = {}
        self._queued = 0

    def run(
        self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None], caller: object = None
    ) -> None:
        """Run or queue `work`. At its end call `done(result, error)`. Each `caller` has a queue for its jobs."""
        if self._free:
            self._start(work, done)
        elif self._queued >= self._queued_max:
            done(None, Busy())
        else:
            self._queued += 1
            self._queues.setdefault(caller, deque()).append((work, done))

    def _start(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        self._free -= 1
        self._run(work, partial(self._job_done, done))

    def _job_done(
        self, done: Callable[[Any, BaseException | None], None], result: Any, error: BaseException | None
    ) -> None:
        self._free += 1
        while self._free and self._queues:
            caller = next(iter(self._queues))
            queue = self._queues.pop(caller)
            first = queue.popleft()
            self._queued -= 1
            if queue:
                self._queues[caller] = queue
            self._start(*first)
        done(result, error)


REQUEST_BYTES: Final = 512
"""Approximate memory of a pending request in bytes, without its body."""
RESUME_FRACTION = 2
"""A paused session is resumed only when at most 1/RESUME_FRACTION of its limit is in use, so that pauses are few."""


class Backpressure:
    """Limits on pending bytes and requests, per session and for the whole broker.

    A session that reaches its own limit is paused: the server stops reading from its socket. A request that would
    exceed a limit of the broker is rejected with `Busy` before it has any effect. After each successful `acquire` the
    caller must call `release` exactly once, with the same size.
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        self.set_limits(limits)
        self.pending_bytes = 0
        self.pending_requests = 0
        self.refusal = ""
        """Why requests are refused although they are within the limits; "" if they are not."""
        self._usage: dict[Session, int] = {}
        """Session -> its pending bytes, for each session with pending bytes."""
        self._paused: set[Session] = set()

    def set_limits(self, limits: Mapping[str, int]) -> None:
        """Replace the limits. Pending requests stay accepted even if they exceed the new limits."""
        self.pending_bytes_max = limits["pending_bytes"]
        self.session_bytes_max = limits["pending_bytes_per_session"]
        self.pending_requests_max = limits["pending_requests"]

    def acquire(self, session: Session, size_bytes: int) -> None:
        """Count a pending request of `size_bytes`. Pause its session if the session then reaches its own limit.

        Raises Busy, and counts nothing, if the request would exceed the broker's limit of requests or of bytes. The
        limit of bytes has one exception: while no bytes are pending, a request of any size is accepted.
        """
        if self.refusal:
            raise Busy(f"The broker accepts no writes for now: {self.refusal}. Wait a little and try again.")
        if self.pending_requests >= self.pending_requests_max or (
            self.pending_bytes and self.pending_bytes + size_bytes > self.pending_bytes_max
        ):
            raise Busy(
                "The broker waits for its disk and accepts no more requests for now. Wait a little and try again."
            )
        self.pending_bytes += size_bytes
        self.pending_requests += 1
        used = self._usage[session] = self._usage.get(session, 0) + size_bytes
        if used >= self.session_bytes_max and session not in self._paused:
            self._paused.add(session)
            session.pause()

    def release(self, session: Session, size_bytes: int) -> None:
        """Remove a request of `size_bytes` from the counts, after its reply.

        Resume a paused session when at most 1/RESUME_FRACTION of its limit is in use.
        """
        self.pending_bytes -= size_bytes
        self.pending_requests -= 1
        used = self._usage[session] = self._usage[session] - size_bytes
        if session in self._paused and used * RESUME_FRACTION <= self.session_bytes_max:
            self._paused.discard(session)
            session.resume()
        if not used:
            del self._usage[session]

    def reply_when_done(
        self, reply: Reply, session: Session, fields: Callable[[Any], Iterable[Any]], size_bytes: int = 0
    ) -> Callable[[Any, BaseException | None], None]:
        """Return a function `done(result, error)`. It replies with `error`, or if that is None, with `fields(result)`.

        The request, whose body has `size_bytes`, counts as pending until `done` is called. Raises Busy like `acquire`.
        """
        size = size_bytes + REQUEST_BYTES
        self.acquire(session, size)

        def done(result: Any, error: BaseException | None) -> None:
            self.release(session, size)
            if error is not None:
                reply.error(client_error(error))
            else:
                reply.ok(*fields(result))

        return done
