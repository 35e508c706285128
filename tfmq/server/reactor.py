"""The reactor that tells when a turn ends: everything that one poll brought has been handed on.

Work that arrives together is done together: requests of one turn become one append, replies of one turn one
write for each connection. `Turn` runs its hooks then, if anybody asked for it. On `TurnReactor` that costs
nothing; on another reactor a call at once stands in for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from twisted.internet.epollreactor import EPollReactor
from twisted.python import log

ROUNDS_MAX = 16
"""How often hooks may ask each other for another round in one turn: a loop between them is a mistake."""


class Turn:
    """The hooks that run, in their order, at the end of a turn in which `want` was called."""

    def __init__(self, reactor: Any) -> None:
        self._reactor = reactor
        self._hooks: list[Callable[[], None]] = []
        self._own = isinstance(reactor, TurnReactor)
        self._wanted = False
        self.ending = False
        """The hooks are running: whoever comes before another hook need not want what that one does anyway."""
        if self._own:
            reactor.turn = self

    def at_end(self, hook: Callable[[], None]) -> None:
        """Run `hook` at the end of each turn in which somebody wants it, after the hooks before it."""
        self._hooks.append(hook)

    def want(self) -> None:
        """This turn's end has something to do."""
        if not self._wanted:
            self._wanted = True
            if not self._own:
                self._reactor.callLater(0, self.run)

    def run(self) -> bool:
        """End the turn; whether there was anything to do. What a hook asks for runs before this returns."""
        if not self._wanted:
            return False
        self.ending = True
        for _ in range(ROUNDS_MAX):
            self._wanted = False
            for hook in self._hooks:
                try:
                    hook()
                except Exception:
                    log.err(None, "a hook of the turn's end failed")
            if not self._wanted:
                break
        self.ending = False
        return True


class TurnReactor(EPollReactor):  # type: ignore[misc]
    """epoll with a turn's end, on the monotonic clock (Twisted's default is the wall clock, which jumps).

    A turn's end runs before the poll for what timers did, and behind it for what the poll brought.
    """

    turn: Turn | None = None
    seconds = staticmethod(time.monotonic)

    def doPoll(self, timeout: float | None) -> None:
        """One poll. As in the base class, but without its logging context (3 us an event)."""
        turn = self.turn
        if turn is not None and turn.run():
            timeout = min(timeout or 0, self.timeout() or 0) if timeout is not None else self.timeout()
        events = self._poller.poll(-1 if timeout is None else timeout, max(len(self._selectables), 1))
        selectables = self._selectables
        for descriptor, event in events:
            selectable = selectables.get(descriptor)
            if selectable is not None:
                self._doReadOrWrite(selectable, descriptor, event)
        if turn is not None:
            turn.run()

    doIteration = doPoll


def installed() -> Any:
    """The process's reactor: a `TurnReactor` where there is epoll and none was chosen before."""
    import sys

    if "twisted.internet.reactor" not in sys.modules:
        from twisted.internet.main import installReactor

        installReactor(TurnReactor())
    from twisted.internet import reactor

    return reactor
