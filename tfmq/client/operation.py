"""Operations: multi-step client work as generators, and what an operation can wait for.

An operation yields a `Wait`: the driver sends and receives until one of the awaited futures is done or the time limit
has passed, then resumes the operation. Or it yields `CallUserCode`, which the driver calls outside of its lock. No
value is sent into the generator: the operation inspects the futures itself.
Operations run in the driver's thread, under the driver's lock, so they may use the connection without further locking.

    def round_trip(connection):
        request = connection.send_request(commands.PING)
        yield Wait((request,), seconds=5.0)
        if not request.done: ...
        return request.result()

`BackgroundTasks` runs operations that have no caller. `run_work` runs blocking work in an executor.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

NEVER = float("inf")


class Task:
    """An operation without a caller. `done` is true after it ended for any reason."""

    def __init__(self, operation: Operation[Any], failed: Callable[[Exception], None], clock: Callable[[], float]):
        self.done = False
        self.wake_at = NEVER
        self._operation = operation
        self._on_error = failed
        self._clock = clock
        self._futures: tuple[Future, ...] = ()
        self._stepping = False

    def step(self, _: object = None) -> None:
        """Run the operation until it has to wait for a future that is not done."""
        thrown_away = getattr(self._operation, "gi_running", False)
        if self._stepping or self.done or thrown_away:
            return
        self._stepping = True
        try:
            while True:
                self._unsubscribe()
                wait = next(self._operation)
                if self.done:  # cancelled by the operation itself
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
            self.done = True  # For example Ctrl-C in the thread that drives the client. The task can be started again.
            raise
        finally:
            self._stepping = False

    def cancel(self) -> None:
        """End the operation where it waits; at its next `Wait` if it calls this itself."""
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
    """All background tasks of one client. Append it to `driver.tickers`.

    The operations run under the driver's lock, in the thread that currently runs the driver. They must not block.
    Errors are passed only to the `failed` callback of the task.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tasks: list[Task] = []

    def start(self, operation: Operation[Any], failed: Callable[[Exception], None]) -> Task:
        """Start `operation` at once and step it until it ends. `failed` gets what it raises."""
        task = Task(operation, failed, self._clock)
        self._tasks.append(task)
        task.step()
        return task

    def next_time(self) -> float:
        """Return when the next task must be resumed; infinity if none waits for a time."""
        return min([task.wake_at for task in self._tasks], default=NEVER)

    def tick(self) -> None:
        """Step the tasks whose time limit has passed, and remove those that ended."""
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
    """A one-shot completion: `done` becomes true once and stays true.

    `callbacks` run at that moment, in the driver's thread and under its lock. They must not block and must not run user
    code.
    """

    done: bool = field(default=False, init=False)
    callbacks: list[Callable[[Any], None]] = field(default_factory=list, init=False)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call `callback(self)` on completion, or at once if already done."""
        if self.done:
            callback(self)
        else:
            self.callbacks.append(callback)

    def remove_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Remove a callback registered with `add_done_callback`; ignored if it is not registered."""
        if callback in self.callbacks:
            self.callbacks.remove(callback)

    def complete(self) -> None:
        """Mark as done and run the callbacks. Does nothing if already done."""
        if self.done:
            return
        self.done = True
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback(self)


class Event(Future):
    """A `Future` without a result: a stop request, free buffer space, new data."""

    __slots__ = ()


class Wait(NamedTuple):
    """Resume when any of `futures` is done, or after `seconds` (None: no limit). () only sleeps."""

    futures: Iterable[Future]
    seconds: float | None = None


class CallUserCode(NamedTuple):
    """Call user code in the driver's thread, without its lock. An error ends the operation."""

    function: Callable[[], object]


Operation = Generator[Wait | CallUserCode, None, Result]


Executor = Callable[[Callable[[], Any], Callable[[Any, BaseException | None], None]], None]
"""run(work, done) calls `work()` somewhere, then `done(result, error)` under the driver's lock."""


@dataclass(slots=True, eq=False, repr=False)
class ResultFuture(Future):
    """A result or an error. `set_outcome` can be the callback `done` of an executor."""

    result: Any = None
    error: BaseException | None = None

    def set_outcome(self, result: Any, error: BaseException | None) -> None:
        self.result, self.error = result, error
        self.complete()


def run_inline(work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
    """Run the work at once in the calling thread. An `Executor`."""
    try:
        result = work()
    except Exception as error:
        done(None, error)
    else:
        done(result, None)


def run_work(run: Executor, call: Callable[[], Result]) -> Operation[Result]:
    """Run `call` in the executor `run`. Return its result or raise its error."""
    doing = ResultFuture()
    run(call, doing.set_outcome)
    while not doing.done:
        yield Wait((doing,))
    if doing.error is not None:
        raise doing.error
    result: Result = doing.result
    return result
