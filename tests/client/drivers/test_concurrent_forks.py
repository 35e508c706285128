"""Two threads that forked at the same time shared the list of locks that were taken for it: one gave back the
other's, and a client stayed locked.
"""

import os
import threading
import time

import pytest

from tfmq.client.drivers.driver import drivers


class Slow:
    """Something to be renewed, whose lock gives other threads a chance wherever it is touched."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    @property
    def lock(self) -> "Slow":
        return self

    def acquire(self, blocking: bool = True) -> bool:
        time.sleep(0.01)
        return self._lock.acquire(blocking)

    def release(self) -> None:
        self._lock.release()
        time.sleep(0.01)

    def renew(self) -> None:
        """Nothing is left of it in a child."""

    def free(self) -> bool:
        """Whether another thread gets the lock."""
        got: list[bool] = []
        thread = threading.Thread(target=lambda: got.append(self._lock.acquire(timeout=1)))
        thread.start()
        thread.join()
        return got == [True]


@pytest.mark.long
def test_threads_that_fork_at_once_give_every_lock_back() -> None:
    slow = [Slow(), Slow()]
    for driver in slow:
        drivers.add(driver)  # type: ignore[arg-type]

    def fork() -> None:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)

    threads = [threading.Thread(target=fork, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert all(driver.free() for driver in slow)
