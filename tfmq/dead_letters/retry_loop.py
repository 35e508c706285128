"""Waiting messages are handled again at their time: the loop that a consumer runs beside its own.

It needs no broker where the store needs none. What a handler raises is never raised here: it is the letter's history.
A store that fails is asked again, with growing pauses, and said in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from tfmq.client.consumer.message import ReceivedMessage
from tfmq.client.operation import Flag, Operation, Wait
from tfmq.client.worker.dead_letter_store import (
    TIDY_SECONDS,
    DeadLetters,
    Due,
    Failure,
    NotCalled,
    StoreUnusable,
)
from tfmq.client.worker.listeners import Reject, RetryLater
from tfmq.errors import Closed, TfmqError

log = logging.getLogger("tfmq.dead_letters")

POLL_SECONDS: Final = 5.0
"""How long a letter that `tfmq dlq retry` released, or another member put back, may wait to be seen."""
PAUSE_SECONDS: Final = 1.0
PAUSE_SECONDS_MAX: Final = 60.0
"""Between two tries of a store that fails, doubled each time."""
RENEWALS: Final = 3
"""A lease is renewed so many times before it would be over, so that one slow answer does not lose it."""

Handle = Callable[[ReceivedMessage[Any]], Operation[None]]
"""Calls the listener with a message, as an operation; raises what that raises (`Reject` and `RetryLater` too), and
`NotCalled` where it was not called because its consumer ends: then this loop ends, too."""


class Retrying:
    """One at a time. Start `run` as a task, or in a thread: `threading.Thread(target=driver.run, args=(x.run(),))`.

    `now`: the clock of waits (`link.now`) · `wall_clock`: seconds since 1970. Where `handle` blocks its thread, the
    lease of a message is renewed by whoever runs `renewing` as a task beside it.
    """

    def __init__(
        self, store: DeadLetters, handle: Handle, *, now: Callable[[], float], wall_clock: Callable[[], float]
    ) -> None:
        self.store = store
        self.stop_asked = Flag()
        self.current: Due | None = None
        """The message in work."""
        self._handle = handle
        self._now = now
        self._wall_clock = wall_clock
        self._pause = PAUSE_SECONDS
        self._tidy_at = now()

    def stop(self) -> None:
        """Take nothing more; what is being handled is finished, then `run` ends. Under the driver's lock, or by its
        `raise_flag(stop_asked)` from anywhere."""
        self.stop_asked.settle()

    def run(self) -> Operation[None]:
        """Take what is due, handle it, say what became of it; until `stop`."""
        while not self.stop_asked.done:
            try:
                due = yield from self.store.take()
                if due is None:
                    yield from self._rest((yield from self.store.seconds_until_due()))
                else:
                    yield from self._serve(due)
                self._pause = PAUSE_SECONDS
            except Closed:
                return
            except StoreUnusable:
                raise
            except TfmqError as error:
                log.error("Dead letters wait: %s", error)
                yield Wait((self.stop_asked,), self._pause)
                self._pause = min(PAUSE_SECONDS_MAX, 2 * self._pause)

    def renewing(self) -> Operation[None]:
        """Keep the lease of the message in work; until `stop` and the end of that work."""
        while not (self.stop_asked.done and self.current is None):
            yield Wait((), self.store.lease_seconds / RENEWALS)
            yield from self._renew()

    def _rest(self, due_in: float | None) -> Operation[None]:
        if self._now() >= self._tidy_at:
            self._tidy_at = self._now() + TIDY_SECONDS
            yield from self.store.tidy()
        seconds = POLL_SECONDS if due_in is None else min(POLL_SECONDS, due_in)
        yield Wait((self.stop_asked,), seconds)

    def _serve(self, due: Due) -> Operation[None]:
        """One call of the handler, and what came of it."""
        if self.stop_asked.done:
            yield from self.store.give_back(due)
            return
        self.current = due
        try:
            yield from self._said((yield from self._outcome(due)))
        finally:
            self.current = None

    def _outcome(self, due: Due) -> Operation[Callable[[], Operation[Any]]]:
        """One call of the handler; how to tell the store what came of it."""
        store = self.store
        try:
            yield from self._kept_alive(self._handle(due.message))
        except NotCalled:
            self.stop_asked.settle()  # its consumer ends; what is given back is due at once
            return partial(store.give_back, due)
        except RetryLater as later:
            return partial(store.put_off, due, later.seconds, later.reason)
        except Reject as rejected:
            return partial(store.failed, due, self._failure(rejected), rejected=True)
        except Exception as error:
            return partial(store.failed, due, self._failure(error))
        return partial(store.handled, due)

    def _said(self, tell: Callable[[], Operation[Any]]) -> Operation[None]:
        """Told until the store takes it: what was handled is not to be handled again because a disk was full."""
        pause = PAUSE_SECONDS
        while True:
            try:
                yield from tell()
                return
            except Closed:
                raise
            except TfmqError as error:
                if self.stop_asked.done:
                    raise
                log.error("What became of a retried message could not be written down yet: %s", error)
            yield Wait((self.stop_asked,), pause)
            pause = min(PAUSE_SECONDS_MAX, 2 * pause)

    def _failure(self, error: Exception) -> Failure:
        return Failure.of(error, round(self._wall_clock() * 1000))

    def _kept_alive(self, handling: Operation[None]) -> Operation[None]:
        """As `handling`, with the lease renewed while it waits."""
        every = self.store.lease_seconds / RENEWALS
        renew_at = self._now() + every
        try:
            while True:
                wait = next(handling)
                until = None if wait.seconds is None else self._now() + wait.seconds
                targets = tuple(wait.targets)
                while True:
                    left = renew_at - self._now()
                    if until is not None:
                        left = min(left, until - self._now())
                    yield Wait(targets, max(0.0, left))
                    if self._now() >= renew_at:
                        yield from self._renew()
                        renew_at = self._now() + every
                    if any(each.done for each in targets) or (until is not None and self._now() >= until):
                        break
        except StopIteration:
            return
        finally:
            handling.close()

    def _renew(self) -> Operation[None]:
        """A store that cannot renew now is asked again; the handler goes on meanwhile."""
        if self.current is None:
            return
        try:
            yield from self.store.renew(self.current)
        except TfmqError as error:
            log.warning("The lease of a retried message could not be renewed: %s", error)
