"""Operations: multi-step client work as generators, and what an operation can wait for.

When an operation yields a `Wait`, the driver sends and receives until one of the awaited futures is done or the time
limit has passed, then resumes the operation. When it yields `CallUserCode`, the driver calls the function without the
driver's lock. The driver sends no value into the generator: the resumed operation itself checks which futures are done.
Operations run under the driver's lock, so they may use the connection without further locking.

    def round_trip(connection):
        request = connection.send_request(commands.Ping())
        yield Wait((request,), seconds=5.0)
        if not request.done: ...
        return request.result()

`BackgroundTasks` runs operations for which no caller waits. `run_work` runs blocking work in an executor.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

NEVER = float("inf")


class Task:
    """An operation for which no caller waits. `done` is true after the operation has ended for any reason."""

    def __init__(self, operation: Operation[Any], failed: Callable[[Exception], None], clock: Callable[[], float]):
        self.done = False
        self.wake_at = NEVER
        self._operation = operation
        self._on_error = failed
        self._clock = clock
        self._futures: tuple[Future, ...] = ()
        self._stepping = False

    def step(self, _: object = None) -> None:
        """Resume the operation. Return when the operation has ended, or when it waits for futures that are not done."""
        thrown_away = getattr(self._operation, "gi_running", False)
        if self._stepping or self.done or thrown_away:
            return
        self._stepping = True
        try:
            while True:
                self._unsubscribe()
                wait = next(self._operation)
                if self.done:  # The operation itself has called `cancel`.
                    self._operation.close()
                    break
                if isinstance(wait, CallUserCode):
                    wait.function()
                    continue
                targets = tuple(wait.futures)
                if not any(target.done for target in targets):
                    break
            if self.done:
                return
            self._futures = targets
            self.wake_at = NEVER if wait.seconds is None else self._clock() + wait.seconds
            for target in targets:
                target.add_done_callback(self.step)
        except StopIteration:
            self.done = True
        except Exception as error:
            self.done = True
            self._on_error(error)
        except BaseException:
            self.done = True  # For example Ctrl-C in the thread that drives the client.
            raise
        finally:
            self._stepping = False

    def cancel(self) -> None:
        """End the operation where it is suspended. If it calls `cancel` itself, it ends at its next `yield`."""
        self._unsubscribe()
        self.done = True
        if not getattr(self._operation, "gi_running", False):
            self._operation.close()

    def _unsubscribe(self) -> None:
        for target in self._futures:
            target.remove_done_callback(self.step)
        self._futures = ()
        self.wake_at = NEVER


class BackgroundTasks:
    """All background tasks of one client. The creator appends this object to `driver.tickers`; the driver calls `tick`.

    The operations run under the driver's lock, in the thread that currently runs the driver, and must not block. If an
    operation raises, the error is passed only to the callback `failed` of that task.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tasks: list[Task] = []

    def start(self, operation: Operation[Any], failed: Callable[[Exception], None]) -> Task:
        """Start `operation` at once, and run it in the background until it ends. If it raises, call `failed(error)`."""
        task = Task(operation, failed, self._clock)
        # `tick` alone would remove ended tasks too late: a driver calls it only when a time limit has passed.
        self._tasks = [each for each in self._tasks if not each.done]
        self._tasks.append(task)
        task.step()
        return task

    def next_time(self) -> float:
        """Return the time of the earliest time limit of a task; infinity if no task waits with a time limit."""
        return min([task.wake_at for task in self._tasks], default=NEVER)

    def tick(self) -> None:
        """Resume the tasks whose time limit has passed, and remove the tasks that have ended."""
        now = self._clock()
        for task in list(self._tasks):
            if task.wake_at <= now:
                task.step()
        self._tasks = [task for task in self._tasks if not task.done]

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks = []


Result = TypeVar("Result")


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Future:
    """A result or event that an operation can wait for: `done` becomes true once and stays true.

    The `callbacks` run when `done` becomes true, in the driver's thread and under the driver's lock. So they must not
    block and must not run user code.
    """

    done: bool = field(default=False, init=False)
    callbacks: list[Callable[[Any], None]] = field(default_factory=list, init=False)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call `callback(self)` when this future becomes done, or at once if it is done already."""
        if self.done:
            callback(self)
        else:
            self.callbacks.append(callback)

    def remove_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Remove a callback. Does nothing if the callback is not registered."""
        if callback in self.callbacks:
            self.callbacks.remove(callback)

    def complete(self) -> None:
        """Set `done` and run the callbacks. A second call does nothing."""
        if self.done:
            return
        self.done = True
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback(self)


class Event(Future):
    """A `Future` without a result, for example a stop request, free buffer space, or new data."""

    __slots__ = ()


class Wait(NamedTuple):
    """An operation yields this to be resumed when any of `futures` is done, or after `seconds` (None: no limit)."""

    futures: Iterable[Future]
    seconds: float | None = None


class CallUserCode(NamedTuple):
    """An operation yields this to call user code without the driver's lock. If the code raises, the operation ends."""

    function: Callable[[], object]


Operation = Generator[Wait | CallUserCode, None, Result]


Executor = Callable[[Callable[[], Any], Callable[[Any, BaseException | None], None]], None]
"""A function (work, done): calls `work()`, often in a thread, then `done(result, None)` or `done(None, error)`."""


@dataclass(slots=True, eq=False, repr=False)
class ResultFuture(Future):
    """A future with a result or an error. `set_outcome` can be passed as the argument `done` of an `Executor`."""

    result: Any = None
    error: BaseException | None = None

    def set_outcome(self, result: Any, error: BaseException | None) -> None:
        self.result, self.error = result, error
        self.complete()


def run_inline(work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
    """Run `work` at once in the calling thread, then call `done`, as the type `Executor` requires."""
    try:
        result = work()
    except Exception as error:
        done(None, error)
    else:
        done(result, None)


def run_work(run: Executor, call: Callable[[], Result]) -> Operation[Result]:
    """Let `run` execute `call`, and wait for the end. Return the result of `call`, or raise its error."""
    doing = ResultFuture()
    run(call, doing.set_outcome)
    while not doing.done:
        yield Wait((doing,))
    if doing.error is not None:
        raise doing.error
    result: Result = doing.result
    return result
