"""The blocking driver: operations of many threads over one connection.

The thread that waits reads. The first to wait becomes the *leader* and reads for all; when it has what it waited
for, it passes the leadership to exactly one of the others. So a round trip of a lone thread needs no other thread.
The socket never blocks, nobody writes more than the socket takes, and the leader waits for reading and writing in
one `poll`, reading first: two ends that both write without reading cannot stand still. A keeper thread exists once
something must happen while nobody waits: lingering batches, their answers, heartbeats.

Everything built on the link is touched under `lock` only. Users' callbacks run outside of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from tfmq.client.connection.connection import Link
from tfmq.client.drivers.callbacks import Callbacks, Timer, Timers, refuse_in_callback
from tfmq.client.drivers.fork import after_fork
from tfmq.client.drivers.socket import Channel, choose, look_up
from tfmq.client.operation import Flag, Operation, Waitable, in_a_thread
from tfmq.errors import Closed, NotAllowed

log = logging.getLogger("tfmq.client")

Result = TypeVar("Result")
FOREVER_SECONDS = 3600.0
"""The longest single `poll`; then the leader looks around once and polls again."""
CLOSE_SECONDS = 5.0
READ_WRITE = select.POLLIN | select.POLLOUT


_told_of_loop = False


def _tell_of_loop() -> None:
    """Log, once in a process, that a call waits inside a running event loop. In a notebook that is as it should be: its
    cells run in the loop of the kernel, one at a time."""
    global _told_of_loop
    events = sys.modules.get("asyncio.events")
    if events is not None and events._get_running_loop() is not None and "ipykernel" not in sys.modules:
        _told_of_loop = True
        log.warning(
            "A blocking tfmq client is used inside a running asyncio event loop, which stands still while it waits:"
            " use tfmq.aio there, or call it in a thread (asyncio.to_thread)."
        )


class Ticker(Protocol):
    """A part with times of its own. Both are called under the lock."""

    def next_time(self) -> float: ...

    def tick(self) -> None: ...


class Waiter:
    """A thread that waits for any of `targets` while another one leads."""

    __slots__ = ("gate", "others", "targets")

    def __init__(self, targets: tuple[Waitable, ...], others: dict[Waiter, None]) -> None:
        self.targets = targets
        self.others = others
        self.gate = threading.Lock()
        self.gate.acquire()

    @property
    def done(self) -> bool:
        targets = self.targets
        return targets[0].done if len(targets) == 1 else any(target.done for target in targets)

    def wake(self, _: object = None) -> None:
        """Under the lock: let it go on. One whose wait is over is none of the followers any more."""
        if _ is not None:
            self.others.pop(self, None)
        if self.gate.locked():  # woken twice is woken
            self.gate.release()


class BlockingDriver:
    """Runs operations in the threads that call. `close` is the end; a forked child gets everything anew."""

    def __init__(self, link: Link, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.link = link
        self.clock = clock
        self.timers = Timers(clock)
        self.tickers: list[Ticker] = [self.timers]
        self.callbacks = Callbacks()
        self.on_fork: list[Callable[[], None]] = []
        """Called in a forked child: forget what the parent had open."""
        self._begin()
        after_fork(self)

    def _begin(self) -> None:
        self.lock = threading.RLock()
        self.channel = Channel(self.link)
        self.closed = False
        self._leader: int | None = None
        self._waiters: dict[Waiter, None] = {}
        self._polling = self._reading = False
        self._wake = WakePipe()
        self._poller = select.poll()
        self._polled = (-1, 0)
        self.keeper = Keeper(self)

    # For the faces

    def run(self, operation: Operation[Result]) -> Result:
        """Run `operation` to its end and give its result. Raises what it raises."""
        refuse_in_callback()
        try:
            while True:
                with self.lock:
                    step = next(operation)
                self.wait(step.targets, step.seconds)
        except StopIteration as end:
            self.callbacks.run()
            return end.value  # type: ignore[no-any-return]
        except BaseException:
            with self.lock:  # it gives up what it waited for
                operation.close()
            raise

    def wait(self, targets: Iterable[Waitable], seconds: float | None = None) -> bool:
        """Whether any of `targets` was done within `seconds` (None: for ever). Raises `Closed` if that came first."""
        refuse_in_callback()
        waiter = Waiter(tuple(targets), self._waiters)
        if waiter.done:
            return True
        if not _told_of_loop:
            _tell_of_loop()
        deadline = self.clock() + (FOREVER_SECONDS * 10_000 if seconds is None else seconds)
        if self.lock._is_owned():  # type: ignore[attr-defined]
            raise NotAllowed("Selectors, codecs and hooks must not wait for the broker.")
        if not self._join(waiter, deadline):
            with self.lock:
                self._waiters.pop(waiter, None)
                try:
                    self._wait(waiter, deadline)
                finally:
                    self._leave(waiter)
        if self.callbacks:
            self.callbacks.run()
        if self.closed and not waiter.done:
            raise Closed("The client was closed before that was done.")
        return waiter.done

    def _join(self, waiter: Waiter, deadline: float) -> bool:
        """Register `waiter`; where another thread leads, sleep the first time. True when that was all: the target was
        settled, which has forgotten the waiter, so that 64 woken threads need not queue for the lock.
        """
        try:
            with self.lock:
                for target in waiter.targets:
                    target.when_done(waiter.wake)
                if self._may_lead() or waiter.done or self.closed:
                    return False
                self._line_up(waiter)
            remaining = deadline - self.clock()
            woken = remaining > 0 and waiter.gate.acquire(timeout=min(remaining, FOREVER_SECONDS))
        except BaseException:
            with self.lock:
                self._leave(waiter)
            raise
        forgotten = len(waiter.targets) == 1 and waiter.targets[0].done
        orphaned = self._leader is None and bool(self._waiters)  # it may be the heir: somebody has to lead
        return woken and forgotten and not orphaned

    def call_later(self, seconds: float, function: Callable[[], None]) -> Timer:
        """Run `function` once, under the lock, in whichever thread leads or keeps. `timer.cancel()` takes it back."""
        with self.lock:
            timer = self.timers.add(seconds, function)
        self.attend()
        return timer

    def beside(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """A `Run` (see `work`) in a thread of its own."""
        in_a_thread(self)(work, done)

    def raise_flag(self, flag: Flag) -> None:
        """Settle `flag` from any thread, or from a signal handler."""
        if self.lock.acquire(blocking=False):
            try:
                flag.settle()
            finally:
                self.lock.release()
        else:
            flag.done = True  # the leader, woken, looks at what its followers wait for
        self._interrupt()

    def attend(self, at_once: bool = False) -> None:
        """Something is due later, or `at_once`, although nobody may be waiting then."""
        self.keeper.attend(at_once)

    def flush(self) -> None:
        """Under the lock: write what the link has to say, as far as that needs no waiting."""
        if self.link.has_output:
            self.channel.flush()
            if self.link.has_output:
                self._interrupt()  # the leader polls without asking whether the socket takes more

    def glance(self) -> None:
        """Under the lock: write and read what is possible at once, if no other thread reads."""
        if self._leader is None:
            self._lead(lambda: False, self.clock(), once=True)
            self._hand_over()
        else:
            self.flush()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Drop the connection; open calls fail. Bounded: nothing here waits for the other end."""
        with self.lock:
            self.closed = True
            self.link.close()
            if not self._polling:
                self.channel.close()
            self._interrupt()
            for waiter in self._waiters:
                waiter.wake()
        self.keeper.stop(seconds)
        with self.lock:
            if self._leader is None:
                self.channel.close()
                self._wake.close()
        self.callbacks.run()

    def renew(self) -> None:
        """In a forked child: a fresh connection, fresh locks, nothing of the parent's."""
        self.channel.close()
        self._wake.close()
        self.callbacks.clear()
        self.timers.clear()
        was_closed = self.closed
        self.link.renew()
        self._begin()
        if was_closed:
            self.closed = True
            self.link.close()
        for forget in self.on_fork:
            forget()

    # Leading and following

    def _wait(self, waiter: Waiter, deadline: float) -> None:
        while not waiter.done and not self.closed:
            if self._may_lead():
                if not self._lead(lambda: waiter.done, deadline):
                    return
            elif not self._follow(waiter, deadline):
                return

    def _may_lead(self) -> bool:
        """Nobody leads; or this thread does, and a signal handler waits inside of its `poll`."""
        return self._leader is None or self._leader == threading.get_ident()

    def _follow(self, waiter: Waiter, deadline: float) -> bool:
        """Sleep until woken: by a target, or as the heir. False when the time is over."""
        self._line_up(waiter)
        remaining = deadline - self.clock()
        self.lock.release()
        try:
            woken = remaining > 0 and waiter.gate.acquire(timeout=min(remaining, FOREVER_SECONDS))
        finally:
            self.lock.acquire()
            self._waiters.pop(waiter, None)
        return woken or self.clock() < deadline

    def _line_up(self, waiter: Waiter) -> None:
        self._waiters[waiter] = None
        if self.keeper.leads:
            self._interrupt()  # it makes room for a thread that waits for itself
        self.flush()

    def _leave(self, waiter: Waiter) -> None:
        """However a wait ended: forget it, and see to it that somebody leads."""
        self._waiters.pop(waiter, None)
        for target in waiter.targets:
            target.forget(waiter.wake)
        self._hand_over()

    def _hand_over(self) -> None:
        """Exactly one heir, if nobody leads and somebody waits."""
        if self._leader is None:
            for waiter in self._waiters:
                if not waiter.done:
                    waiter.wake()
                    return
            if self.link.unattended or self.link.has_output:
                self.keeper.attend()

    def _lead(self, done: Callable[[], bool], deadline: float, once: bool = False) -> bool:
        """Read for all until `done()`. False when the time is over. Called and left under the lock."""
        outer, self._leader = self._leader, threading.get_ident()
        try:
            while True:
                self._turn(done, deadline)
                if done() or self.closed:
                    return True
                if once or self.clock() >= deadline:
                    return False
        finally:
            self._leader = outer
            if outer is not None:
                self._interrupt()  # what the interrupted `poll` waits for may have been read in here

    def _turn(self, done: Callable[[], bool], deadline: float) -> None:
        """Everything that is due, one `poll`, and what it found. It does not sleep once it is `done()`: a call whose
        time was over, or a connection that cannot be made, may have settled that already.
        """
        for ticker in self.tickers:
            ticker.tick()
        self.channel.tick()
        self._connect()
        self.channel.flush()
        self._wake_done()
        due = self.clock() if done() else min(deadline, self.next_time())
        events = self._poll(max(0.0, min(due - self.clock(), FOREVER_SECONDS)))
        if events & select.POLLOUT or (events and self.channel.connecting):
            self.channel.writable()
        self._wake_done()
        if self.callbacks:
            self._run_callbacks()

    def _wake_done(self) -> None:
        for waiter in [each for each in self._waiters if each.done]:
            waiter.wake()

    def next_time(self) -> float:
        """When the next thing is due, in the clock's seconds. Under the lock."""
        return min(self.link.next_time(), *(ticker.next_time() for ticker in self.tickers))

    def _poll(self, seconds: float) -> int:
        """Wait without the lock for the socket or a wake-up, and read; what `poll` said of the socket."""
        channel, nested = self.channel, self._polling  # nested: a signal handler waits inside of a `poll`
        if self._reading:  # ... or between reading and taking: what is read now would be taken out of place
            channel.broke(ConnectionResetError("a signal came while an answer was read"))
        source = channel.socket
        polled = (channel.fileno(), READ_WRITE if channel.wants_write else select.POLLIN)
        if polled != self._polled or nested:
            self._poller, self._polled = self._new_poller(*polled), polled
        poll = self._poller
        events, data, received = 0, None, False
        self._polling, self._reading = True, False
        self.lock.release()
        try:
            for descriptor, event in poll.poll(-(-seconds * 1000 // 1)):
                if descriptor != polled[0]:
                    self._wake.drain()
                else:
                    events = event
                    if event & ~select.POLLOUT:
                        self._reading = True
                        data = channel.receive()
                        received = True
        finally:
            self.lock.acquire()
            self._polling = nested
            if self.closed:
                channel.close()
            elif (
                self._reading and not received
            ):  # Ctrl-C: what was read is lost, so the stream makes no sense
                channel.broke(ConnectionResetError("reading was interrupted"))
            elif channel.socket is source:  # else that connection is gone, and what it brought is void
                channel.take(data)
            self._reading = False
        return events

    def _new_poller(self, descriptor: int, events: int) -> select.poll:
        """Waits for `events` of the socket, if there is one, and for a wake-up. Kept while both stay the same."""
        poller = select.poll()
        if descriptor >= 0:
            poller.register(descriptor, events)
        poller.register(self._wake.descriptor, select.POLLIN)
        return poller

    def _run_callbacks(self) -> None:
        self.lock.release()
        try:
            self.callbacks.run()
        finally:
            self.lock.acquire()

    def _connect(self) -> None:
        """Begin to connect where the link wants it. Names are looked up without the lock."""
        if self.closed or self.channel.socket is not None or not self.link.wants_connection():
            return
        server = self.link.server
        self.lock.release()
        try:
            found = look_up(server)
        finally:
            self.lock.acquire()
        if not isinstance(found, list):
            self.channel.broke(found)
        elif not self.closed:
            self.channel.open(choose(found))

    # Waking the leader

    def _interrupt(self) -> None:
        """Let the leader leave its `poll` and look around."""
        if self._polling:
            self._wake.ring()


# The thread that acts while nobody waits: sends lingering batches, reads their answers, beats hearts.
#
# It is started when it is first needed, sleeps until the next thing is due, and reads only while calls are open that
# nobody waits for; a thread that waits for something itself takes over.

IDLE_SECONDS = 1.0
"""So long it goes on looking by itself before it sleeps until it is called: waking it costs more than a look."""
LOOK_SECONDS = 0.005
"""The pause between two looks: the default linger, so that a batch opened in between waits at most twice that."""
LOOK_SECONDS_MIN = 0.0005
LEAD_SECONDS = 60.0


class Keeper:
    """One driver's keeper. It holds its driver weakly: a client that nobody holds ends it."""

    def __init__(self, driver: BlockingDriver) -> None:
        gate = self._gate = threading.Event()
        self._driver = weakref.ref(driver, lambda _: gate.set())
        self._thread: threading.Thread | None = None
        self._parked = True
        self._stopping = False
        self._used_at = 0.0
        self.leads = False

    def attend(self, at_once: bool = False) -> None:
        """There is, or will be, something to do; `at_once`: not only at the next look."""
        if self._stopping or not (self._parked or at_once):
            return
        self._parked = False
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tfmq-keeper", daemon=True)
            self._thread.start()
        self._gate.set()

    def stop(self, seconds: float) -> None:
        """End it; wait for that at most `seconds`."""
        self._stopping = True
        self._gate.set()
        thread = self._thread
        started = thread is not None and thread.ident is not None  # another thread may be about to start it
        if thread is not None and started and thread is not threading.current_thread():
            thread.join(seconds)

    def _run(self) -> None:
        pause: float | None = 0.0
        while not self._stopping:
            self._gate.wait(pause)
            self._gate.clear()
            self._parked = False
            driver = self._driver()
            if driver is None or driver.keeper is not self:
                return
            pause = self._look(driver) if not self._stopping else 0.0
            del driver

    def _look(self, driver: BlockingDriver) -> float | None:
        """Do what is due; how long to sleep then (None: until called)."""
        with driver.lock:
            link = driver.link
            busy = bool(link.unattended)
            if driver._leader is None and not driver.closed:
                driver.glance()
                if link.unattended and not driver._waiters:
                    self._lead(driver)
                driver._hand_over()
            now = driver.clock()
            due = driver.next_time()
            if busy or link.unattended or due < now + LOOK_SECONDS:
                self._used_at = now
            self._parked = now - self._used_at >= IDLE_SECONDS
        if driver.callbacks:
            driver.callbacks.run()
        if self._parked:
            return None if due == float("inf") else max(LOOK_SECONDS, due - now)
        return min(LOOK_SECONDS, max(LOOK_SECONDS_MIN, due - now))

    def _lead(self, driver: BlockingDriver) -> None:
        """Read until nothing unattended is open, or a thread waits for itself."""
        link = driver.link
        self.leads = True
        try:
            driver._lead(
                lambda: self._stopping or not link.unattended or bool(driver._waiters),
                driver.clock() + LEAD_SECONDS,
            )
        finally:
            self.leads = False


# A pipe that lets a thread leave its `poll`; made when it is first polled.

_DRAIN_BYTES = 4096


class WakePipe:
    """`descriptor` is what to poll; `ring` makes it readable, `drain` quiet again."""

    def __init__(self) -> None:
        self._read = self._write = -1

    @property
    def descriptor(self) -> int:
        """The end to poll for reading."""
        if self._read < 0:
            self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        return self._read

    def ring(self) -> None:
        """From any thread or signal handler. Nothing happens where nobody ever polled."""
        if self._write >= 0:
            with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
                os.write(self._write, b"w")

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._read, _DRAIN_BYTES)) == _DRAIN_BYTES:
                pass

    def close(self) -> None:
        """Twice is harmless; `descriptor` makes a new one."""
        ends = (self._read, self._write)
        self._read = self._write = -1
        for descriptor in ends:
            if descriptor >= 0:
                os.close(descriptor)
