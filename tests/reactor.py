"""A reactor of its own for each test, in the test's thread; bounded, and not the installed one."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.epollreactor import EPollReactor
from twisted.python.failure import Failure

SECONDS = 20.0


@contextmanager
def a_reactor(kind: Callable[[], Any] = EPollReactor) -> Iterator[Any]:
    """A reactor whose descriptors are closed at the end."""
    reactor = kind()
    internal = list(reactor._internalReaders)
    try:
        yield reactor
    finally:
        for reader in internal:
            reader.connectionLost(None)
        if kind is EPollReactor:
            reactor._poller.close()


def play(
    story: Callable[[Any], Coroutine[Any, Any, Any]],
    *,
    stops: bool = True,
    kind: Callable[[], Any] = EPollReactor,
    seconds: float = SECONDS,
) -> Any:
    """Run `story(reactor)` in a reactor to its end and give its result; raises what it raises, or that it took too
    long. `stops`: else the story stops the reactor by itself."""
    ends: list[Any] = []
    with a_reactor(kind) as reactor:

        def over(result: Any) -> None:
            ends.append(result)
            if stops:
                reactor.stop()

        def begin() -> None:
            done: Deferred[Any] = ensureDeferred(story(reactor))
            done.addTimeout(seconds, reactor).addBoth(over)

        reactor.callWhenRunning(begin)
        reactor.run(installSignalHandlers=False)
    assert ends, "the reactor ended before the story"
    if isinstance(ends[0], Failure):
        ends[0].raiseException()
    return ends[0]


def pause(reactor: Any, seconds: float) -> Deferred[None]:
    """Fires after `seconds`."""
    over: Deferred[None] = Deferred()
    reactor.callLater(seconds, over.callback, None)
    return over
