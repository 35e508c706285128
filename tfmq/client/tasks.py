"""Operations that nobody waits for: stepped whenever what they wait for is done, or their time has come.

A `Tasks` is one of a driver's tickers, so its operations run in whichever thread leads or keeps, under the driver's
lock; they must not block. What an operation raises goes to its `failed`, and nowhere else.
"""

from collections.abc import Callable
from typing import Any

from tfmq.client.waiting import Operation, Waitable

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
