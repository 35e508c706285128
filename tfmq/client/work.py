"""Work that may wait for a disk or another network, done where the driver wants it: inline or in a worker thread."""

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from tfmq.client.waiting import Flag, Operation, Wait, Waitable

Result = TypeVar("Result")
Run = Callable[[Callable[[], Any], Callable[[Any, BaseException | None], None]], None]
"""run(work, done): calls `work()` somewhere, then `done(result, error)` in the driver's thread and under its lock."""


class _Work(Waitable):
    """One piece of work."""

    __slots__ = ("error", "result")

    def __init__(self) -> None:
        super().__init__()
        self.result: Any = None
        self.error: BaseException | None = None

    def finished(self, result: Any, error: BaseException | None) -> None:
        self.result, self.error = result, error
        self.settle()


def inline(work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
    """A `Run` that does the work at once, in the calling thread."""
    try:
        result = work()
    except Exception as error:
        done(None, error)
    else:
        done(result, None)


class Lively(Protocol):
    """What a thread needs of a driver to bring a result."""

    closed: bool

    @property
    def lock(self) -> Any: ...

    def glance(self) -> None: ...

    def attend(self) -> None: ...

    def raise_flag(self, flag: Flag) -> None: ...


def in_a_thread(driver: Lively) -> Run:
    """A `Run` that has each work done in a thread of its own: it may take its time, and use the driver's client too."""

    def run(work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        def finished(result: Any, error: BaseException | None) -> None:
            with driver.lock:
                done(result, error)
                if not driver.closed:
                    driver.glance()
            driver.attend()
            driver.raise_flag(Flag())  # who leads, and waits for this very work, sleeps on the socket

        threading.Thread(target=inline, args=(work, finished), name="tfmq-work", daemon=True).start()

    return run


def work(run: Run, call: Callable[[], Result]) -> Operation[Result]:
    """What `call()` returns or raises, wherever `run` has it done."""
    doing = _Work()
    run(call, doing.finished)
    while not doing.done:
        yield Wait((doing,))
    if doing.error is not None:
        raise doing.error
    result: Result = doing.result
    return result
