"""Work that may wait for a disk or another network, done where the driver wants it: inline or in a worker thread."""

from collections.abc import Callable
from typing import Any, TypeVar

from tfmq.client.waiting import Operation, Wait, Waitable

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
