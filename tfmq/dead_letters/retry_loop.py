"""Retry loop of a consumer: it calls the handler again for due dead letters, in the background, after growing delays.

The loop works without a broker if the store is not a topic. Exceptions of a handler are recorded in the letter and not
raised. An error of the store is logged, and the loop continues after a pause, which grows with each consecutive error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from tfmq.backoff import Backoff, backoff_seconds
from tfmq.client.consumer.message import ReceivedMessage
from tfmq.client.operation import CallUserCode, Event, Operation, Wait
from tfmq.client.worker.dead_letter_store import (
    EXPIRY_SECONDS,
    DeadLetterStore,
    Failure,
    HandlerNotCalled,
    LeasedLetter,
    StoreUnusable,
)
from tfmq.client.worker.listeners import Reject, RetryLater
from tfmq.errors import Closed, TfmqError

log = logging.getLogger("tfmq.dead_letters")

POLL_SECONDS: Final = 5.0
"""Maximum delay until the loop finds a letter that `tfmq dlq retry` or another member of the group made available."""
PAUSE_SECONDS: Final = 1.0
PAUSE_SECONDS_MAX: Final = 60.0
"""Maximum pause after a failure of the store. The pause is doubled after each consecutive failure."""
RENEWALS: Final = 3
"""How often a lease is renewed within its duration: several times, so that one slow response does not end the lease."""

HandlerCall = Callable[[ReceivedMessage[Any]], Operation[None]]
"""Returns an operation that calls the listener with a message.

The operation raises what the listener raises (also `Reject` and `RetryLater`). If the consumer ends before the call,
the operation raises `HandlerNotCalled`, which also ends the retry loop.
"""


class Retrying:
    """Leases due letters from a store and calls the handler for each, one at a time.

    Start `run` as a task, or in a thread: `threading.Thread(target=driver.run, args=(x.run(),))`. `now`: clock of the
    driver that runs the operations (`link.now`) · `wall_clock`: returns seconds since 1970. If `handle` blocks its
    thread, `run` cannot renew the lease of the letter meanwhile; in that case start `renewing` as a second task.
    """

    def __init__(
        self, store: DeadLetterStore, handle: HandlerCall, *, now: Callable[[], float], wall_clock: Callable[[], float]
    ) -> None:
        self.store = store
        self.stop_asked = Event()
        self.current: LeasedLetter | None = None
        """The letter in progress."""
        self._call_handler = handle
        self._now = now
        self._wall_clock = wall_clock
        self._store_backoff = Backoff(PAUSE_SECONDS, PAUSE_SECONDS_MAX)
        self._expiry_due_at = now()

    def stop(self) -> None:
        """Lease no more letters; `run` ends after the letter in progress.

        The caller must hold the driver's lock. Code without the lock calls `set_event(stop_asked)` of the driver.
        """
        self.stop_asked.complete()

    def run(self) -> Operation[None]:
        """Lease due letters, handle them and record the results, until `stop`."""
        while not self.stop_asked.done:
            try:
                due = yield from self.store.lease_next()
                if due is None:
                    yield from self._wait_until_due((yield from self.store.seconds_until_due()))
                else:
                    yield from self._handle_leased(due)
                self._store_backoff.reset()
            except Closed:
                return
            except StoreUnusable:
                raise
            except TfmqError as error:
                log.error("Dead letters wait: %s", error)
                yield Wait((self.stop_asked,), self._store_backoff.advance())

    def renewing(self) -> Operation[None]:
        """Renew the lease of the letter in progress, until `stop` is called and no letter is in progress."""
        while not (self.stop_asked.done and self.current is None):
            yield Wait((), self.store.lease_seconds / RENEWALS)
            yield from self._renew_lease()

    def _wait_until_due(self, due_in: float | None) -> Operation[None]:
        """Delete expired letters, once in EXPIRY_SECONDS. Then wait `due_in` seconds, but at most POLL_SECONDS."""
        if self._now() >= self._expiry_due_at:
            self._expiry_due_at = self._now() + EXPIRY_SECONDS
            yield from self.store.delete_expired()
        seconds = POLL_SECONDS if due_in is None else min(POLL_SECONDS, due_in)
        yield Wait((self.stop_asked,), seconds)

    def _handle_leased(self, due: LeasedLetter) -> Operation[None]:
        """Handle a leased letter and record the result; after `stop` release it instead."""
        if self.stop_asked.done:
            yield from self.store.release(due)
            return
        self.current = due
        try:
            yield from self._record_until_stored((yield from self._call_and_get_result(due)))
        finally:
            self.current = None

    def _call_and_get_result(self, due: LeasedLetter) -> Operation[Callable[[], Operation[Any]]]:
        """Call the handler. Return the store operation that records the result."""
        store = self.store
        try:
            yield from self._run_with_lease_renewal(self._call_handler(due.message))
        except HandlerNotCalled:
            self.stop_asked.complete()  # The loop must not lease the released letter again, which is due at once.
            return partial(store.release, due)
        except RetryLater as later:
            return partial(store.postpone, due, later.seconds, later.reason)
        except Reject as rejected:
            return partial(store.mark_failed, due, self._create_failure(rejected), rejected=True)
        except Exception as error:
            return partial(store.mark_failed, due, self._create_failure(error))
        return partial(store.mark_handled, due)

    def _record_until_stored(self, record: Callable[[], Operation[Any]]) -> Operation[None]:
        """Repeat the store operation `record` until it succeeds: a full disk must not cause a second handler call."""
        backoff = Backoff(PAUSE_SECONDS, PAUSE_SECONDS_MAX)
        while True:
            try:
                yield from record()
                return
            except Closed:
                raise
            except TfmqError as error:
                if self.stop_asked.done:
                    raise
                log.error("The result of a retried message could not be recorded yet: %s", error)
            yield Wait((self.stop_asked,), backoff.advance())

    def _create_failure(self, error: Exception) -> Failure:
        return Failure.from_exception(error, round(self._wall_clock() * 1000))

    def _run_with_lease_renewal(self, handling: Operation[None]) -> Operation[None]:
        """Run the operation `handling`, and renew the lease of the current letter while `handling` waits."""
        every = self.store.lease_seconds / RENEWALS
        renew_at = self._now() + every
        try:
            while True:
                wait = next(handling)
                if isinstance(wait, CallUserCode):
                    yield wait
                    continue
                until = None if wait.seconds is None else self._now() + wait.seconds
                targets = tuple(wait.futures)
                while True:
                    left = renew_at - self._now()
                    if until is not None:
                        left = min(left, until - self._now())
                    yield Wait(targets, max(0.0, left))
                    if self._now() >= renew_at:
                        yield from self._renew_lease()
                        renew_at = self._now() + every
                    if any(each.done for each in targets) or (until is not None and self._now() >= until):
                        break
        except StopIteration:
            return
        finally:
            handling.close()

    def _renew_lease(self) -> Operation[None]:
        """Renew the lease of the current letter, if any; a failure is only logged, as the next renewal may succeed."""
        if self.current is None:
            return
        try:
            yield from self.store.renew_lease(self.current)
        except TfmqError as error:
            log.warning("The lease of a retried message could not be renewed: %s", error)


FIRST_MS: Final = 1_000
"""First delay of a letter. The consumer makes quicker retries before it stores the message as a letter."""
MAX_MS: Final = 3_600_000
"""Maximum delay: after the cause of failures was repaired, letters wait no longer than this."""
JITTER: Final = 0.2
"""Maximum random part added to a delay, so that messages that failed together are retried at different times."""


def retry_delay_ms(calls: int, chance: float) -> int:
    """Return the delay in ms after the `calls`-th call; it doubles with each call. `chance`: 0 to 1, for the jitter."""
    return round(backoff_seconds(calls, FIRST_MS, MAX_MS, JITTER * chance))
