"""The Twisted driver: runs operations of many callers over one connection in one reactor.

The reactor is imported only when a caller first waits, so that the program can install another reactor before.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial, wraps
from threading import get_ident
from typing import Any, Concatenate, ParamSpec, TypeVar

from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.interfaces import IReadDescriptor, IWriteDescriptor
from twisted.python.failure import Failure
from twisted.python.threadable import isInIOThread
from zope.interface import implementer

from tfmq.client.api_variants import return_annotation, set_result
from tfmq.client.drivers.event_loop import EventDriver
from tfmq.client.drivers.socket import resolve_address
from tfmq.client.operation import Event
from tfmq.errors import NotAllowed

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def deferred(
    method: Callable[Concatenate[Any, Parameters], Coroutine[Any, Any, Result]], doc: str | None = None
) -> Callable[Concatenate[Any, Parameters], Deferred[Result]]:
    """Return a method that starts the coroutine of `method` and returns a Deferred. Can be used as a decorator.

    `method` may belong to another class, if the class that gets the new method has the attributes that `method` uses.
    `doc` replaces the docstring. Cancelling the Deferred cancels the coroutine.
    """

    @wraps(method)
    def begin(self: Any, /, *arguments: Parameters.args, **named: Parameters.kwargs) -> Deferred[Result]:
        begun: Deferred[Result] = ensureDeferred(method(self, *arguments, **named))
        return begun

    if doc is not None:
        begin.__doc__ = doc
    return set_result(begin, f"Deferred[{return_annotation(method)}]")


def start_deferred(awaited: Awaitable[Any], done: Callable[[BaseException | None], None]) -> object:
    """Start an awaitable in the reactor. When the awaitable has ended, `done` is called with its error or None."""

    async def wait() -> None:
        error: BaseException | None = None
        try:
            await awaited
        except BaseException as failure:
            error = failure
        done(error)

    return ensureDeferred(wait())


@implementer(IReadDescriptor, IWriteDescriptor)
class SocketDescriptor:
    """The object by which the reactor watches a socket. The reactor may call `fileno` after the socket is closed."""

    def __init__(self, driver: DeferredDriver, fileno: int) -> None:
        self._driver = driver
        self._fileno = fileno

    def fileno(self) -> int:
        return self._fileno

    def logPrefix(self) -> str:
        return "tfmq"

    def doRead(self) -> None:
        self._driver._readable()

    def doWrite(self) -> None:
        self._driver._writable()

    def connectionLost(self, reason: Failure) -> None:
        self._driver._connection_lost(self)


class DeferredDriver(EventDriver):
    """Runs operations as coroutines that wait for Deferreds. A caller may cancel its Deferred."""

    _current = staticmethod(get_ident)
    uses_reactor = True
    """By this attribute a broker in this process recognises the driver without importing Twisted."""
    reactor: Any = None
    """The reactor; None before the first wait, unless the user has passed one."""

    def _reset_state(self) -> None:
        super()._reset_state()
        self._descriptor: SocketDescriptor | None = None
        self._ready: deque[Deferred[None]] = deque()
        self._firing = False
        self._resolving = False

    def run_in_threads(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        reactor = self.get_reactor()

        def finished(succeeded: bool, result: Any) -> None:
            done(*((result, None) if succeeded else (None, result.value)))
            self.wake()

        # The thread pool calls `back` in one of its threads, so `finished` is handed to the reactor's thread.
        back = partial(reactor.callFromThread, finished)
        reactor.getThreadPool().callInThreadWithCallback(back, work)

    def set_event(self, event: Event) -> None:
        if self.reactor is None:
            event.complete()
        else:
            self.reactor.callFromThread(event.complete)

    async def close(self) -> None:
        self.close_now()

    def reset_after_fork(self) -> None:
        # The reactors of child and parent share the watched descriptors, so the child must not remove a descriptor.
        self._descriptor = None
        super().reset_after_fork()

    def get_reactor(self) -> Any:
        """Return the reactor, by default the installed one. Raises `NotAllowed` outside of the reactor's thread."""
        if self.reactor is None:
            from twisted.internet import reactor

            self.reactor = reactor
        if self.reactor.running and not isInIOThread():
            raise NotAllowed(
                "This client belongs to the thread of its reactor; from others, use reactor.callFromThread or"
                " twisted.internet.threads.blockingCallFromThread."
            )
        return self.reactor

    def _check_other_caller(self) -> None:
        if self.reactor is None and "twisted.internet.reactor" not in sys.modules:
            return  # The program has not chosen a reactor yet, and the import of a reactor would install the default.
        if self.get_reactor().running:
            self._owner = get_ident()

    def _create_sleep(self) -> tuple[Deferred[None], Callable[..., None]]:
        self.get_reactor()
        sleep: Deferred[None] = Deferred()
        return sleep, lambda _=None: self._fire_soon(sleep)

    def _fire_soon(self, sleep: Deferred[None]) -> None:
        """Fire `sleep` in a later turn of the reactor, so that the caller never runs inside the current code."""
        self._ready.append(sleep)
        if not self._firing:
            self._firing = True
            self.reactor.callLater(0, self._fire)

    def _fire(self) -> None:
        self._firing = False
        ready, self._ready = self._ready, deque()
        for sleep in ready:
            if not sleep.called:
                sleep.callback(None)

    def _has_loop(self) -> bool:
        return self.get_reactor() is not None

    def _call_soon(self, function: Callable[[], None]) -> None:
        self.reactor.callLater(0, function)

    def _call_later(self, seconds: float, function: Callable[[], None]) -> Any:
        return self.reactor.callLater(seconds, function)

    def _cancel_call(self, call: Any) -> None:
        if call.active():
            call.cancel()

    def _watch_socket(self, fileno: int, to_write: bool) -> None:
        self._descriptor = SocketDescriptor(self, fileno)
        self.reactor.addReader(self._descriptor)
        if to_write:
            self.reactor.addWriter(self._descriptor)

    def _unwatch(self) -> None:
        self._watched = None
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            self.reactor.removeReader(descriptor)
            self.reactor.removeWriter(descriptor)

    def _connection_lost(self, descriptor: SocketDescriptor) -> None:
        if descriptor is not self._descriptor:
            return
        self._descriptor = self._watched = None
        self._readable()  # Process the data that were received before the connection ended, then its end.

    def _start_resolving(self) -> None:
        if self._resolving:
            return
        self._resolving = True

        def done(found: Any, error: BaseException | None) -> None:
            self._resolving = False
            self._address_resolved(found if error is None else OSError(0, str(error)))

        self.run_in_threads(partial(resolve_address, self.link.server), done)
