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
from functools import partial
from typing import Any, TypeVar

from tfmq.busy_poll import FSYNC_SECONDS, SECONDS, BusyPoll
from tfmq.client.drivers.driver import Driver, Timer, check_not_in_callback, is_done, running_callbacks
from tfmq.client.drivers.socket import resolve_address
from tfmq.client.operation import CallUserCode, Event, Future, Operation, run_inline
from tfmq.errors import Closed, NotAllowed

log = logging.getLogger("tfmq.client")

Result = TypeVar("Result")
POLL_SECONDS_MAX = 3600.0
"""The longest single `poll`. After this time the polling thread runs due work and polls again."""
CLOSE_SECONDS = 5.0
READ_WRITE = select.POLLIN | select.POLLOUT


_warned_of_loop = False


def _warn_of_running_loop() -> None:
    """Log a warning, once per process, that a blocking call is made inside a running event loop.

    In a notebook nothing is logged, because its cells always run in an event loop, one at a time.
    """
    global _warned_of_loop
    if not _warned_of_loop and "ipykernel" not in sys.modules:
        _warned_of_loop = True
        log.warning(
            "A blocking tfmq client is used inside a running asyncio event loop, which is blocked while it waits:"
            " use tfmq.aio there, or call it in a thread (asyncio.to_thread)."
        )


def _is_any_done(futures: tuple[Future, ...]) -> bool:
    return any(map(is_done, futures))


class Waiter:
    """A thread that waits for any of `futures` while another thread polls. `followers`: all waiters of the driver."""

    __slots__ = ("followers", "futures", "gate")

    def __init__(self, futures: tuple[Future, ...], followers: dict[Waiter, None]) -> None:
        self.futures = futures
        self.followers = followers
        self.gate = threading.Lock()
        self.gate.acquire()

    def is_done(self) -> bool:
        return any(map(is_done, self.futures))

    def wake(self, future: Future | None = None) -> None:
        """Let the thread continue. Called under the driver's lock, also as the callback of each future."""
        if future is not None:  # The future `future` is done and calls this as its callback, so the wait is over.
            self.followers.pop(self, None)
        if self.gate.locked():  # A second wake-up has no effect.
            self.gate.release()

    def sleep(self, seconds: float) -> bool:
        """Sleep for at most `seconds`, and at most `POLL_SECONDS_MAX`. Return whether `wake` was called."""
        return seconds > 0 and self.gate.acquire(timeout=min(seconds, POLL_SECONDS_MAX))


class BlockingDriver(Driver):
    """Runs operations in the calling threads. Thread-safe.

    The first thread that waits is the *polling thread*: it polls the socket and reads the replies for all waiting
    threads, so that a single thread needs no other thread for its round trips. When its own wait is over, it wakes one
    other waiting thread, which then polls. The polling thread waits for reading and writing in one `poll` and reads
    first, so client and broker cannot block each other while both write. While no caller waits, `NetworkThread` polls.

    The connection and all objects built on it are used only under `lock`. User callbacks run without the lock.
    """

    lock: threading.RLock

    def _reset_state(self) -> None:
        super()._reset_state()
        self.lock = threading.RLock()
        self._polling_thread: int | None = None
        self._waiters: dict[Waiter, None] = {}
        self._in_poll = self._reading = False
        self._wake_pipe = WakePipe()
        self._busy_poll = BusyPoll()
        self._poller = select.poll()
        self._polled = (-1, 0)
        self.network_thread = NetworkThread(self)

    # For the API variants

    def run(self, operation: Operation[Result]) -> Result:
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
            with self.lock:  # Closing the generator lets the operation abandon its requests.
                operation.close()
            raise

    def wait(self, futures: Iterable[Future], seconds: float | None = None) -> bool:
        """Wait until any of `futures` is done or `seconds` have passed (see `Driver`). Return whether one is done.

        Raises `NotAllowed` if called by a callback or under the driver's lock.
        """
        # A caller may wait for each of its messages, so the usual case is tested here without a function call.
        if running_callbacks.now:
            check_not_in_callback()
        waited = tuple(futures)
        if any(map(is_done, waited)):
            return True
        loops = sys.modules.get("asyncio.events")
        if loops is not None and loops._get_running_loop() is not None:
            _warn_of_running_loop()
        deadline = self.clock() + (POLL_SECONDS_MAX * 10_000 if seconds is None else seconds)
        if self.lock._is_owned():  # type: ignore[attr-defined]
            raise NotAllowed("Selectors, codecs and hooks must not wait for the broker.")
        finished = partial(is_done, waited[0]) if len(waited) == 1 else partial(_is_any_done, waited)
        with self.lock:
            polls = self._polling_thread is None or self._polling_thread == threading.get_ident()
            if polls and not self.closed and not finished():
                try:
                    self._poll_until(finished, deadline)
                finally:
                    if self._waiters or self.link.background_requests or self.link.output:
                        self._wake_next_poller()
        if not polls:
            self._wait_for_other_thread(Waiter(waited, self._waiters), deadline)
        if self.callbacks:
            self.callbacks.run()
        done = any(map(is_done, waited))
        if self.closed and not done:
            raise Closed("The client was closed before that was done.")
        return done

    def _wait_for_other_thread(self, waiter: Waiter, deadline: float) -> None:
        """Wait while another thread polls. When that thread stops polling, poll in its place."""
        if self._wait_once(waiter, deadline):
            return
        with self.lock:
            self._waiters.pop(waiter, None)
            try:
                while not waiter.is_done() and not self.closed:
                    if self._may_poll():
                        self._poll_until(waiter.is_done, deadline)
                        break
                    if not self._wait_for_turn(waiter, deadline):
                        break
            finally:
                self._end_wait(waiter)

    def _wait_once(self, waiter: Waiter, deadline: float) -> bool:
        """Register `waiter`. If another thread polls, sleep once.

        Return True if the wait is over and no other thread must be woken. The caller then does not take the lock: many
        threads may be woken together, and would queue for it.
        """
        try:
            with self.lock:
                for target in waiter.futures:
                    target.add_done_callback(waiter.wake)
                if self._may_poll() or waiter.is_done() or self.closed:
                    return False
                self._add_waiter(waiter)
            woken = waiter.sleep(deadline - self.clock())
        except BaseException:
            with self.lock:
                self._end_wait(waiter)
            raise
        single_done = len(waiter.futures) == 1 and waiter.futures[0].done
        # If no thread polls but other threads wait, this thread must poll, or must wake one of them to poll.
        orphaned = self._polling_thread is None and bool(self._waiters)
        return woken and single_done and not orphaned

    def call_later(self, seconds: float, function: Callable[[], None]) -> Timer:
        """Call `function` once after `seconds`, under the lock. The timer's `cancel` prevents the call."""
        with self.lock:
            timer = self.timers.add(seconds, function)
        self.wake()
        return timer

    def run_in_thread(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Run `work`, which may block and use the client, in a thread. Then call `done` with its result or error."""

        def finished(result: Any, error: BaseException | None) -> None:
            with self.lock:
                done(result, error)
                if not self.closed:
                    self.poll_nonblocking()
            self.wake()
            # `wake` wakes only the background thread. The thread that waits for this work may be the polling thread,
            # asleep on the socket: `set_event` wakes that one. Nothing waits for the event itself.
            self.set_event(Event())

        threading.Thread(target=run_inline, args=(work, finished), name="tfmq-work", daemon=True).start()

    def set_event(self, event: Event) -> None:
        if self.lock.acquire(blocking=False):
            try:
                event.complete()
            finally:
                self.lock.release()
        else:
            # Another thread has the lock, so run no callbacks: the polling thread checks the futures of all waiters.
            event.done = True
        self._wake_polling_thread()

    def wake(self, at_once: bool = False) -> None:
        """Make the background thread check for new work: at its next periodic check or, with `at_once`, immediately."""
        self.network_thread.wake(at_once)

    def flush(self) -> None:
        if self.link.output:
            self.channel.flush()
            if self.link.output:
                self._wake_polling_thread()  # The polling thread must now wait for the socket to become writable, too.

    def poll_nonblocking(self) -> None:
        """Read and write without blocking. If another thread polls, only write. Called under the lock."""
        if self._polling_thread is None:
            self._poll_until(lambda: False, self.clock())
            self._wake_next_poller()
        else:
            self.flush()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Close the connection and fail all open requests. Wait up to `seconds` for the background thread to end."""
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

    def _may_poll(self) -> bool:
        """Return whether no other thread polls. The thread that polls may poll again in a signal handler."""
        return self._polling_thread is None or self._polling_thread == threading.get_ident()

    def _wait_for_turn(self, waiter: Waiter, deadline: float) -> bool:
        """Sleep until a future of the waiter is done, or this thread must poll. Return False after `deadline`."""
        self._add_waiter(waiter)
        self.lock.release()
        try:
            woken = waiter.sleep(deadline - self.clock())
        finally:
            self.lock.acquire()
            self._waiters.pop(waiter, None)
        return woken or self.clock() < deadline

    def _add_waiter(self, waiter: Waiter) -> None:
        self._waiters[waiter] = None
        if self.network_thread.is_polling:
            self._wake_polling_thread()  # The background thread stops polling, so that a waiting caller polls itself.
        self.flush()

    def _end_wait(self, waiter: Waiter) -> None:
        """Remove `waiter` after its wait has ended for any reason, and wake another thread that can poll."""
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

    def _poll_until(self, done: Callable[[], bool], deadline: float) -> None:
        """Poll for all threads, at least once, until `done()` or the deadline. Called under the lock."""
        outer, self._polling_thread = self._polling_thread, threading.get_ident()
        try:
            while True:
                self._run_turn(done, deadline)
                if done() or self.closed or self.clock() >= deadline:
                    return
        finally:
            self._polling_thread = outer
            if outer is not None:
                self._wake_polling_thread()  # The interrupted `poll` may wait for data that was read here.

    def _run_turn(self, done: Callable[[], bool], deadline: float) -> None:
        """Call `tick` of all tickers if one is due, poll the socket once, and process the received data."""
        if self.link.output:
            self.channel.flush()
        due = self.next_time()
        if due <= self.clock():
            for ticker in self.tickers:
                ticker.tick()
            self.channel.tick()
            if self.channel.socket is None:
                self._connect()
            if self.link.output:
                self.channel.flush()
            due = self.next_time()
        events = self._poll_socket(done, min(due, deadline))
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

    def _poll_socket(self, done: Callable[[], bool], until: float) -> int:
        """Wait without the lock until the socket is ready, the thread is woken or the time is `until`. Then read.

        If `done()` is true, do not wait. Return the socket's events, 0 for none.
        """
        # `nested` is true if a signal handler polls while its thread is inside `poll`.
        channel, nested = self.channel, self._in_poll
        # `_reading` is true if the signal arrived after the interrupted poll had read data, before it processed them.
        # New data would be processed before these older data, so close the connection.
        if self._reading:
            channel.connection_failed(ConnectionResetError("a signal arrived while a reply was read"))
        source = channel.socket
        to_write = channel.connecting or (self.link.output and not channel.handshaking)
        polled = (-1 if source is None else source.fileno(), READ_WRITE if to_write else select.POLLIN)
        if polled != self._polled or nested:
            self._poller, self._polled = select.poll(), polled
            if polled[0] >= 0:
                self._poller.register(*polled)
            self._poller.register(self._wake_pipe.descriptor, select.POLLIN)
        poll = self._poller
        events, data, received = 0, None, False
        self._in_poll, self._reading = True, False
        try:
            # These checks run after `_in_poll` is set, because `set_event` does not always take the lock. An event
            # that is already set is found here. For an event that is set later, `set_event` writes to the wake pipe.
            if self._waiters:
                self._wake_done()
            seconds = 0.0 if done() else max(0.0, min(until - self.clock(), POLL_SECONDS_MAX))
            busy_seconds = FSYNC_SECONDS if self.link.waits_for_fsync else SECONDS
            self.lock.release()
            try:
                for descriptor, event in self._busy_poll.poll(poll.poll, -(-seconds * 1000 // 1), seconds=busy_seconds):
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
        finally:
            self._in_poll = nested
            if self.closed:
                channel.close()
            elif self._reading and not received:
                # An exception such as Ctrl-C interrupted reading. The data that were read are lost, so the data that
                # follow cannot be decoded.
                channel.connection_failed(ConnectionResetError("reading was interrupted"))
            elif channel.socket is source:  # Otherwise the connection was closed in the meantime: discard its data.
                channel.process_received(data)
            self._reading = False
        return events

    def _connect(self) -> None:
        """Start to connect if a request waits for a connection. Release the lock while the address is resolved."""
        if self.closed or not self.link.wants_connection():
            return
        server = self.link.server
        self.lock.release()
        try:
            found = resolve_address(server)
        finally:
            self.lock.acquire()
        if isinstance(found, Exception):
            self.channel.connection_failed(found)
        elif not self.closed:
            self.channel.start_connecting(found)

    def _wake_polling_thread(self) -> None:
        if self._in_poll:
            self._wake_pipe.notify()


ACTIVE_SECONDS = 1.0
"""For this time after its last work, the background thread looks for new work every few ms: cheaper than waking it."""
CHECK_SECONDS = 0.005
"""How often the background thread looks for new work. At the default linger time (5 ms) a batch waits up to 10 ms."""
CHECK_SECONDS_MIN = 0.0005
POLLING_SECONDS_MAX = 60.0


class NetworkThread:
    """The background thread of one driver.

    While no caller waits, the thread sends batches whose linger time is over, reads the replies and sends heartbeats.
    The thread starts when it is first needed, sleeps until the next action is due, and polls only while background
    requests are open. When a caller begins to wait, the caller polls instead. The thread has only a weak reference to
    the driver, and ends when the client is garbage-collected.
    """

    def __init__(self, driver: BlockingDriver) -> None:
        gate = self._gate = threading.Event()
        self._driver = weakref.ref(driver, lambda _: gate.set())
        self._thread: threading.Thread | None = None
        self.sleeping = True
        """Whether the thread has stopped its periodic checks, so that new work must wake it."""
        self._stopping = False
        self._used_at = 0.0
        self.is_polling = False

    def wake(self, at_once: bool = False) -> None:
        """Wake the thread if it has stopped its periodic checks; with `at_once` in any case."""
        if self._stopping or not (self.sleeping or at_once):
            return
        self.sleeping = False
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tfmq-network", daemon=True)
            self._thread.start()
        self._gate.set()

    def stop(self, seconds: float) -> None:
        self._stopping = True
        self._gate.set()
        thread = self._thread
        started = thread is not None and thread.ident is not None  # False if `wake` is just about to start the thread.
        if thread is not None and started and thread is not threading.current_thread():
            thread.join(seconds)

    def _run(self) -> None:
        pause: float | None = 0.0
        while not self._stopping:
            self._gate.wait(pause)
            self._gate.clear()
            self.sleeping = False
            driver = self._driver()
            if driver is None or driver.network_thread is not self:
                return
            pause = self._run_due(driver) if not self._stopping else 0.0
            del driver

    def _run_due(self, driver: BlockingDriver) -> float | None:
        """Do the work that is due. Return how many seconds the thread may sleep; None: until it is woken."""
        with driver.lock:
            link = driver.link
            busy = bool(link.background_requests)
            if driver._polling_thread is None and not driver.closed:
                driver.poll_nonblocking()
                if link.background_requests and not driver._waiters:
                    self.is_polling = True
                    try:
                        driver._poll_until(
                            lambda: self._stopping or not link.background_requests or bool(driver._waiters),
                            driver.clock() + POLLING_SECONDS_MAX,
                        )
                    finally:
                        self.is_polling = False
                driver._wake_next_poller()
            now = driver.clock()
            due = driver.next_time()
            if busy or link.background_requests or due < now + CHECK_SECONDS:
                self._used_at = now
            self.sleeping = now - self._used_at >= ACTIVE_SECONDS
        if driver.callbacks:
            driver.callbacks.run()
        if self.sleeping:
            return None if due == float("inf") else max(CHECK_SECONDS, due - now)
        return min(CHECK_SECONDS, max(CHECK_SECONDS_MIN, due - now))


class WakePipe:
    """A pipe that wakes a thread from `poll`. The pipe is created when its `descriptor` is first used."""

    def __init__(self) -> None:
        self._ends: tuple[PipeEnd, PipeEnd] | None = None

    @property
    def descriptor(self) -> int:
        if self._ends is None:
            read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._ends = PipeEnd(read), PipeEnd(write)
        return self._ends[0].descriptor

    def notify(self) -> None:
        """Make the descriptor readable, if the pipe exists. May be called in any thread and in signal handlers."""
        ends = self._ends  # Keeps the pipe open until the byte is written, even if another thread calls `close` now.
        if ends is not None:
            with contextlib.suppress(BlockingIOError):  # A full pipe wakes the thread, too.
                os.write(ends[1].descriptor, b"w")

    def drain(self) -> None:
        ends = self._ends
        with contextlib.suppress(BlockingIOError):
            while ends is not None and len(os.read(ends[0].descriptor, 4096)) == 4096:
                pass

    def close(self) -> None:
        """Let go of the pipe. It is closed when no other thread writes to it any more."""
        self._ends = None


class PipeEnd:
    """One end of a pipe, closed with its last reference.

    A thread that wrote to a bare number might write to another file: one that got the number after a close.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)
