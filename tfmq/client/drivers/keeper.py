"""The thread that acts while nobody waits: sends lingering batches, reads their answers, beats hearts.

It is started when it is first needed, sleeps until the next thing is due, and reads only while calls are open that
nobody waits for; a thread that waits for something itself takes over.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfmq.client.drivers.blocking import BlockingDriver

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
