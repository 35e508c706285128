"""The blocking driver: runs operations of many threads over one connection."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, TypeVar

from tfmq.client.drivers.callbacks import Driver, Timer, check_not_in_callback
from tfmq.client.drivers.socket import choose_address, resolve_address
from tfmq.client.operation import CallUserCode, Event, Future, Operation, run_inline
from tfmq.errors import Closed, NotAllowed

log = logging.getLogger("tfmq.client")

Result = TypeVar("Result")
POLL_SECONDS_MAX = 3600.0
"""The longest single `poll`; afterwards the polling thread runs what is due and polls again."""
CLOSE_SECONDS = 5.0
READ_WRITE = select.POLLIN | select.POLLOUT


_done = attrgetter("done")
_warned_of_loop = False


def _warn_of_running_loop() -> None:
    """Log once per process that a blocking call is made inside a running event loop.

    Not in a notebook: its cells run in the loop of the kernel, one at a time.
    """
    global _warned_of_loop
    events = sys.modules.get("asyncio.events")
    if events is not None and events._get_running_loop() is not None and "ipykernel" not in sys.modules:
        _warned_of_loop = True
        log.warning(
            "A blocking tfmq client is used inside a running asyncio event loop, which is blocked while it waits:"
            " use tfmq.aio there, or call it in a thread (asyncio.to_thread)."
        )


class Waiter:
    """A thread that waits for any of `futures` while another thread polls."""

    __slots__ = ("followers", "futures", "gate")

    def __init__(self, futures: tuple[Future, ...], followers: dict[Waiter, None]) -> None:
        self.futures = futures
        self.followers = followers
        self.gate = threading.Lock()
        self.gate.acquire()

    def is_done(self) -> bool:
        """Return whether any of the futures is done."""
        return any(map(_done, self.futures))

    def wake(self, _: object = None) -> None:
        """Let the thread continue. Called under the driver's lock."""
        if _ is not None:  # The wait is over, because one of its futures calls this.
            self.followers.pop(self, None)
        if self.gate.locked():  # A second wake-up has no effect.
            self.gate.release()


class BlockingDriver(Driver):
    """Runs operations in the calling threads. Thread-safe.

    One of the waiting threads polls the socket: the *polling thread*, the first that waits. It reads for all. When its
    own wait is over, it wakes exactly one other thread to poll. So a round trip of a single thread needs no other
    thread.

    The socket is non-blocking, and no thread writes more than the socket accepts. The polling thread waits for reading
    and writing in one `poll` and reads first, so two peers that both write cannot block each other. The background
    thread `NetworkThread` starts once work must be done while no caller waits: lingering batches, their replies,
    heartbeats.

    The connection and everything built on it is used under `lock` only. User callbacks run outside of it. `close` ends
    the driver; a forked child resets it.
    """

    lock: threading.RLock

    def _reset_state(self) -> None:
        super()._reset_state()
        self.lock = threading.RLock()
        self._polling_thread: int | None = None
        self._waiters: dict[Waiter, None] = {}
        self._in_poll = self._reading = False
        self._wake_pipe = WakePipe()
        self._poller = select.poll()
        self._polled = (-1, 0)
        self.network_thread = NetworkThread(self)

    # For the API variants

    def run(self, operation: Operation[Result]) -> Result:
        """Run `operation` to its end. Return its result or raise its error."""
        check_not_in_callback()
        try:
            while True:
                with self.lock:
                    step = next(operation)
                if isinstance(step, CallUserCode):
                    step.function()
                else:
                    self.wait(step.futures, step.seconds)
        except StopIteration as end:
            self.callbacks.run()
            return end.value  # type: ignore[no-any-return]
        except BaseException:
            with self.lock:  # The operation abandons its requests.
                operation.close()
            raise

    def wait(self, futures: Iterable[Future], seconds: float | None = None) -> bool:
        """Return whether any of `futures` is done within `seconds` (None: no limit).

        Raises `Closed` if the driver is closed first, `NotAllowed` in a callback and under the driver's lock.
        """
        check_not_in_callback()
        waiter = Waiter(tuple(futures), self._waiters)
        if waiter.is_done():
            return True
        if not _warned_of_loop:
            _warn_of_running_loop()
        deadline = self.clock() + (POLL_SECONDS_MAX * 10_000 if seconds is None else seconds)
        if self.lock._is_owned():  # type: ignore[attr-defined]
            raise NotAllowed("Selectors, codecs and hooks must not wait for the broker.")
        if not self._wait_once(waiter, deadline):
            with self.lock:
                self._waiters.pop(waiter, None)
                try:
                    self._wait(waiter, deadline)
                finally:
                    self._end_wait(waiter)
        if self.callbacks:
            self.callbacks.run()
        done = waiter.is_done()
        if self.closed and not done:
            raise Closed("The client was closed before that was done.")
        return done

    def _wait_once(self, waiter: Waiter, deadline: float) -> bool:
        """Register `waiter` and, if another thread polls, sleep once.

        Return True if that completed the wait. The future has then removed the waiter's callback, so that 64 woken
        threads need not queue for the lock.
        """
        try:
            with self.lock:
                for target in waiter.futures:
                    target.add_done_callback(waiter.wake)
                if self._may_poll() or waiter.is_done() or self.closed:
                    return False
                self._add_waiter(waiter)
            remaining = deadline - self.clock()
            woken = remaining > 0 and waiter.gate.acquire(timeout=min(remaining, POLL_SECONDS_MAX))
        except BaseException:
            with self.lock:
                self._end_wait(waiter)
            raise
        forgotten = len(waiter.futures) == 1 and waiter.futures[0].done
        # This thread may have been woken to poll; some thread has to do it.
        orphaned = self._polling_thread is None and bool(self._waiters)
        return woken and forgotten and not orphaned

    def call_later(self, seconds: float, function: Callable[[], None]) -> Timer:
        """Call `function` once after `seconds`, under the lock. `cancel` of the timer prevents it."""
        with self.lock:
            timer = self.timers.add(seconds, function)
        self.wake()
        return timer

    def run_in_thread(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Run `work`, which may block and use the client, in a daemon thread. An `Executor`."""

        def finished(result: Any, error: BaseException | None) -> None:
            with self.lock:
                done(result, error)
                if not self.closed:
                    self.poll_nonblocking()
            self.wake()
            # A thread that drives the client while it waits for this work sleeps on the socket: wake it.
            self.set_event(Event())

        threading.Thread(target=run_inline, args=(work, finished), name="tfmq-work", daemon=True).start()

    def set_event(self, event: Event) -> None:
        """Set `event` from any thread, or from a signal handler."""
        if self.lock.acquire(blocking=False):
            try:
                event.complete()
            finally:
                self.lock.release()
        else:
            event.done = True  # The polling thread, once woken, checks the futures of all waiting threads.
        self._wake_polling_thread()

    def wake(self, at_once: bool = False) -> None:
        """Wake the background thread, because work is due later, or now (`at_once`)."""
        self.network_thread.wake(at_once)

    def flush(self) -> None:
        """Write as much output as the socket accepts. Called under the lock."""
        if self.link.output:
            self.channel.flush()
            if self.link.output:
                self._wake_polling_thread()  # The polling thread does not wait for the socket to become writable.

    def poll_nonblocking(self) -> None:
        """Read and write without blocking, if no other thread polls. Called under the lock."""
        if self._polling_thread is None:
            self._poll_until(lambda: False, self.clock(), once=True)
            self._wake_next_poller()
        else:
            self.flush()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Close the connection and fail all open requests. Does not wait for the peer."""
        with self.lock:
            self.closed = True
            self.link.close()
            if not self._in_poll:
                self.channel.close()
            self._wake_polling_thread()
            for waiter in self._waiters:
                waiter.wake()
        self.network_thread.stop(seconds)
        with self.lock:
            if self._polling_thread is None:
                self.channel.close()
                self._wake_pipe.close()
        self.callbacks.run()

    def reset_after_fork(self) -> None:
        self._wake_pipe.close()
        super().reset_after_fork()

    # Polling and waiting

    def _wait(self, waiter: Waiter, deadline: float) -> None:
        while not waiter.is_done() and not self.closed:
            if self._may_poll():
                if not self._poll_until(waiter.is_done, deadline):
                    return
            elif not self._wait_for_turn(waiter, deadline):
                return

    def _may_poll(self) -> bool:
        """Return whether this thread may poll; a signal handler may while its own thread polls."""
        return self._polling_thread is None or self._polling_thread == threading.get_ident()

    def _wait_for_turn(self, waiter: Waiter, deadline: float) -> bool:
        """Sleep until a future is done or this thread must poll. Return False on timeout."""
        self._add_waiter(waiter)
        remaining = deadline - self.clock()
        self.lock.release()
        try:
            woken = remaining > 0 and waiter.gate.acquire(timeout=min(remaining, POLL_SECONDS_MAX))
        finally:
            self.lock.acquire()
            self._waiters.pop(waiter, None)
        return woken or self.clock() < deadline

    def _add_waiter(self, waiter: Waiter) -> None:
        self._waiters[waiter] = None
        if self.network_thread.is_polling:
            self._wake_polling_thread()  # The background thread yields to a thread that waits for its own reply.
        self.flush()

    def _end_wait(self, waiter: Waiter) -> None:
        """Remove `waiter` after any end of its wait, and let another thread poll."""
        self._waiters.pop(waiter, None)
        for target in waiter.futures:
            if not target.done:
                target.remove_done_callback(waiter.wake)
        self._wake_next_poller()

    def _wake_next_poller(self) -> None:
        """If no thread polls, wake exactly one waiting thread, or the background thread."""
        if self._polling_thread is None:
            for waiter in self._waiters:
                if not waiter.is_done():
                    waiter.wake()
                    return
            if self.link.background_requests or self.link.output:
                self.network_thread.wake()

    def _poll_until(self, done: Callable[[], bool], deadline: float, once: bool = False) -> bool:
        """Poll for all threads until `done()`. Return False on timeout. Called under the lock."""
        outer, self._polling_thread = self._polling_thread, threading.get_ident()
        try:
            while True:
                self._run_turn(done, deadline)
                if done() or self.closed:
                    return True
                if once or self.clock() >= deadline:
                    return False
        finally:
            self._polling_thread = outer
            if outer is not None:
                self._wake_polling_thread()  # The result that the interrupted `poll` waits for may have been read here.

    def _run_turn(self, done: Callable[[], bool], deadline: float) -> None:
        """Run what is due, poll once, and process the result."""
        for ticker in self.tickers:
            ticker.tick()
        self.channel.tick()
        if self.channel.socket is None:
            self._connect()
        if self.link.output:
            self.channel.flush()
        if self._waiters:
            self._wake_done()
        # An expired request or a failed connection attempt may already have completed the wait.
        due = self.clock() if done() else min(deadline, self.next_time())
        events = self._poll_socket(max(0.0, min(due - self.clock(), POLL_SECONDS_MAX)))
        if events & select.POLLOUT or (events and self.channel.connecting):
            self.channel.on_writable()
        if self._waiters:
            self._wake_done()
        if self.callbacks:
            self.lock.release()
            try:
                self.callbacks.run()
            finally:
                self.lock.acquire()

    def _wake_done(self) -> None:
        for waiter in [each for each in self._waiters if each.is_done()]:
            waiter.wake()

    def _poll_socket(self, seconds: float) -> int:
        """Wait for the socket or a wake-up without the lock, and read. Return the socket's events."""
        # Nested: a signal handler polls inside a `poll` of its thread.
        channel, nested = self.channel, self._in_poll
        # The signal arrived between reading and processing: data read now would be processed out of order.
        if self._reading:
            channel.connection_failed(ConnectionResetError("a signal arrived while a reply was read"))
        source = channel.socket
        polled = (channel.fileno(), READ_WRITE if channel.wants_write else select.POLLIN)
        if polled != self._polled or nested:
            self._poller, self._polled = select.poll(), polled
            if polled[0] >= 0:
                self._poller.register(*polled)
            self._poller.register(self._wake_pipe.descriptor, select.POLLIN)
        poll = self._poller
        events, data, received = 0, None, False
        self._in_poll, self._reading = True, False
        self.lock.release()
        try:
            for descriptor, event in poll.poll(-(-seconds * 1000 // 1)):
                if descriptor != polled[0]:
                    self._wake_pipe.drain()
                else:
                    events = event
                    if event & ~select.POLLOUT:
                        self._reading = True
                        data = channel.receive()
                        received = True
        finally:
            self.lock.acquire()
            self._in_poll = nested
            if self.closed:
                channel.close()
            elif self._reading and not received:
                # For example Ctrl-C. The data read is lost, so the rest of the stream cannot be decoded.
                channel.connection_failed(ConnectionResetError("reading was interrupted"))
            elif channel.socket is source:  # Otherwise that connection is closed, and its data is discarded.
                channel.process_received(data)
            self._reading = False
        return events

    def _connect(self) -> None:
        """Start connecting if the connection needs it. Resolves names without the lock."""
        if self.closed or not self.link.wants_connection():
            return
        server = self.link.server
        self.lock.release()
        try:
            found = resolve_address(server)
        finally:
            self.lock.acquire()
        if not isinstance(found, list):
            self.channel.connection_failed(found)
        elif not self.closed:
            self.channel.start_connecting(choose_address(found))

    def _wake_polling_thread(self) -> None:
        if self._in_poll:
            self._wake_pipe.notify()


ACTIVE_SECONDS = 1.0
"""The background thread checks this long before it sleeps: waking it costs more."""
CHECK_SECONDS = 0.005
"""The pause between two checks: the linger time, so that a batch waits at most twice as long."""
CHECK_SECONDS_MIN = 0.0005
POLLING_SECONDS_MAX = 60.0


class NetworkThread:
    """The background thread of one driver.

    It sends lingering batches, reads their replies and sends heartbeats while no caller waits. It starts when first
    needed, sleeps until the next action is due, and polls only while background requests are open. A waiting caller
    takes over the polling. The driver is referenced weakly: the thread ends when the client is garbage-collected.
    """

    def __init__(self, driver: BlockingDriver) -> None:
        gate = self._gate = threading.Event()
        self._driver = weakref.ref(driver, lambda _: gate.set())
        self._thread: threading.Thread | None = None
        self._sleeping = True
        self._stopping = False
        self._used_at = 0.0
        self.is_polling = False

    def wake(self, at_once: bool = False) -> None:
        """Wake the thread if it sleeps without limit; with `at_once` in any case."""
        if self._stopping or not (self._sleeping or at_once):
            return
        self._sleeping = False
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tfmq-network", daemon=True)
            self._thread.start()
        self._gate.set()

    def stop(self, seconds: float) -> None:
        """Stop the thread; wait at most `seconds` for its end."""
        self._stopping = True
        self._gate.set()
        thread = self._thread
        started = thread is not None and thread.ident is not None  # Another thread may be about to start it.
        if thread is not None and started and thread is not threading.current_thread():
            thread.join(seconds)

    def _run(self) -> None:
        pause: float | None = 0.0
        while not self._stopping:
            self._gate.wait(pause)
            self._gate.clear()
            self._sleeping = False
            driver = self._driver()
            if driver is None or driver.network_thread is not self:
                return
            pause = self._run_due(driver) if not self._stopping else 0.0
            del driver

    def _run_due(self, driver: BlockingDriver) -> float | None:
        """Run what is due. Return the time to sleep (None: until woken)."""
        with driver.lock:
            link = driver.link
            busy = bool(link.background_requests)
            if driver._polling_thread is None and not driver.closed:
                driver.poll_nonblocking()
                if link.background_requests and not driver._waiters:
                    self._poll_in_background(driver)
                driver._wake_next_poller()
            now = driver.clock()
            due = driver.next_time()
            if busy or link.background_requests or due < now + CHECK_SECONDS:
                self._used_at = now
            self._sleeping = now - self._used_at >= ACTIVE_SECONDS
        if driver.callbacks:
            driver.callbacks.run()
        if self._sleeping:
            return None if due == float("inf") else max(CHECK_SECONDS, due - now)
        return min(CHECK_SECONDS, max(CHECK_SECONDS_MIN, due - now))

    def _poll_in_background(self, driver: BlockingDriver) -> None:
        """Poll until no background request is open, or a caller waits."""
        link = driver.link
        self.is_polling = True
        try:
            driver._poll_until(
                lambda: self._stopping or not link.background_requests or bool(driver._waiters),
                driver.clock() + POLLING_SECONDS_MAX,
            )
        finally:
            self.is_polling = False


class WakePipe:
    """A pipe that wakes a thread from `poll`. Created when it is first polled."""

    def __init__(self) -> None:
        self._read = self._write = -1

    @property
    def descriptor(self) -> int:
        """The descriptor to poll for reading."""
        if self._read < 0:
            self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        return self._read

    def notify(self) -> None:
        """Make the descriptor readable, if it was ever polled. Safe in threads and signal handlers."""
        if self._write >= 0:
            with contextlib.suppress(BlockingIOError):  # A full pipe wakes the thread, too.
                os.write(self._write, b"w")

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._read, 4096)) == 4096:
                pass

    def close(self) -> None:
        ends = (self._read, self._write)
        self._read = self._write = -1
        for descriptor in ends:
            if descriptor >= 0:
                os.close(descriptor)
