"""Sequential work of one thread in several steps that wait: for a job in a worker, or for time to pass."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeAlias

Done = Callable[[Any, BaseException | None], None]
Run = Callable[[Callable[[], Any], Done], None]
"""Runs a function in a worker; `done(result, error)` is called in the owner's thread."""
CallLater = Callable[[float, Callable[[], None]], Any]


class Pause(NamedTuple):
    """Yielded by a task that waits until the time has passed."""

    seconds: float


class Wait:
    """Yielded by a task that waits until `wake` is called, which may have been called already."""

    def __init__(self) -> None:
        self._is_set = False
        self._resume: Callable[[], None] | None = None

    def wake(self) -> None:
        """Let the task go on. Called in the owner's thread; repeated calls do nothing."""
        self._is_set = True
        resume, self._resume = self._resume, None
        if resume is not None:
            resume()

    def when_set(self, resume: Callable[[], None]) -> None:
        if self._is_set:
            resume()
        else:
            self._resume = resume


Steps: TypeAlias = Generator[Callable[[], Any] | Pause | Wait, Any, Any]
"""The steps of a task: it yields a job, and gets its result sent or its exception thrown in; or what it waits for."""


class Task:
    """Runs steps in the owner's thread. `failed(error)` is called for an exception that the steps do not handle."""

    def __init__(self, steps: Steps, run: Run, call_later: CallLater, failed: Callable[[BaseException], None]) -> None:
        self._steps, self._run, self._call_later, self._failed = steps, run, call_later, failed
        self._is_cancelled = False

    def start(self) -> None:
        self._advance(None, None)

    def cancel(self) -> None:
        """Make no further step. A job that is running ends, and its result is ignored."""
        self._is_cancelled = True

    def _advance(self, result: Any, error: BaseException | None) -> None:
        if self._is_cancelled:
            return
        try:
            step = self._steps.send(result) if error is None else self._steps.throw(error)
        except StopIteration:
            return
        except BaseException as failure:
            self._is_cancelled = True
            self._failed(failure)
            return
        if isinstance(step, Pause):
            self._call_later(step.seconds, self._resume)
        elif isinstance(step, Wait):
            step.when_set(self._resume)
        else:
            self._run(step, self._advance)

    def _resume(self) -> None:
        self._advance(None, None)
