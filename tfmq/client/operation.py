"""Operations that nobody waits for: stepped whenever what they wait for is done, or their time has come.

A `Tasks` is one of a driver's tickers, so its operations run in whichever thread leads or keeps, under the driver's
lock; they must not block. What an operation raises goes to its `failed`, and nowhere else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple, Protocol, TypeVar

NEVER = float("inf")


class Task:
    """One operation on its way; `done` is true once it ended, however it did."""

    def __init__(
        self, operation: Operation[Any], failed: Callable[[Exception], None], clock: Callable[[], float]
    ):
        self.done = False
        self.due = NEVER
        self._operation = operation
        self._failed = failed
        self._clock = clock
        self._targets: tuple[Waitable, ...] = ()
        self._stepping = False

    def step(self, _: object = None) -> None:
        """Goes on until it has to wait. A target that becomes done meanwhile is seen in the same loop."""
        thrown_away = getattr(self._operation, "gi_running", False)
        if self._stepping or self.done or thrown_away:
            return
        self._stepping = True
        try:
            while True:
                self._forget()
                wait = next(self._operation)
                if self.done:  # cancelled from inside
                    self._operation.close()
                    break
                targets = tuple(wait.targets)
                if not any(target.done for target in targets):
                    break
            if self.done:
                return
            self._targets = targets
            self.due = NEVER if wait.seconds is None else self._clock() + wait.seconds
            for target in targets:
                target.when_done(self.step)
        except StopIteration:
            self.done = True
        except Exception as error:
            self.done = True
            self._failed(error)
        except BaseException:
            self.done = True  # Ctrl-C in the thread that leads: whoever wants it begins it anew
            raise
        finally:
            self._stepping = False

    def cancel(self) -> None:
        """Ends it where it waits; one that goes on right now, and calls this: at its next wait."""
        self._forget()
        self.done = True
        if not getattr(self._operation, "gi_running", False):
            self._operation.close()

    def _forget(self) -> None:
        for target in self._targets:
            target.forget(self.step)
        self._targets = ()
        self.due = NEVER


class Tasks:
    """All tasks of one client; give it to `driver.tickers`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tasks: list[Task] = []

    def start(self, operation: Operation[Any], failed: Callable[[Exception], None]) -> Task:
        """Begin `operation` at once; it is stepped from now on until it ends."""
        task = Task(operation, failed, self._clock)
        self._tasks.append(task)
        task.step()
        return task

    def next_time(self) -> float:
        """When the next task has waited long enough; infinity if none waits for a time."""
        return min((task.due for task in self._tasks), default=NEVER)

    def tick(self) -> None:
        """Steps the tasks whose time has come, forgets those that ended."""
        now = self._clock()
        for task in list(self._tasks):
            if task.due <= now:
                task.step()
        self._tasks = [task for task in self._tasks if not task.done]

    def cancel(self) -> None:
        """Ends all of them."""
        for task in self._tasks:
            task.cancel()
        self._tasks = []


# What an operation can wait for, apart from who waits and how.
#
# An *operation* is a generator that does something of several steps. It runs in its driver's thread (under the
# driver's lock), so it may touch the link and everything built on it without further care. It yields a `Wait`; the
# driver sends and receives until one of the things waited for is done or the time is over, and resumes it. Nothing
# is sent into it: it looks at what it waits for.
#
#     def round_trip(link):
#         call = link.call(commands.PING)
#         yield Wait((call,), seconds=5.0)
#         if not call.done: ...
#         return call.result()

Result = TypeVar("Result")


class Waitable:
    """Something that becomes done once, and stays so. `callbacks` run at that moment, in the thread and under the
    lock of the driver; they must not block and must not run user code.
    """

    __slots__ = ("__weakref__", "callbacks", "done")

    def __init__(self) -> None:
        self.done = False
        self.callbacks: list[Callable[[Any], None]] = []

    def when_done(self, callback: Callable[[Any], None]) -> None:
        """Call `callback(self)` once it is done: at once if it is already."""
        if self.done:
            callback(self)
        else:
            self.callbacks.append(callback)

    def forget(self, callback: Callable[[Any], None]) -> None:
        """Take back what `when_done` registered; nothing happens if it is gone."""
        if callback in self.callbacks:
            self.callbacks.remove(callback)

    def settle(self) -> None:
        """Make it done. A second time does nothing."""
        if self.done:
            return
        self.done = True
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback(self)


class Flag(Waitable):
    """A `Waitable` for one side to raise and another to wait for: a stop, room in a buffer, an arrival."""

    __slots__ = ()


class Wait(NamedTuple):
    """Resume when any of `targets` is done, or after `seconds` (None: no limit). No targets: a plain sleep. A driver
    goes through `targets` once, outside of its lock.
    """

    targets: Iterable[Waitable]
    seconds: float | None = None


Operation = Generator[Wait, None, Result]


# Work that may wait for a disk or another network, done where the driver wants it: inline or in a worker thread.

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
