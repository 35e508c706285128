"""Requests that read much, one after the other: each may take the columns of a whole bucket into memory."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from tfmq.delay.requests import Run


class Asking:
    """See the module. One owner's thread."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._waiting: deque[Callable[[], None]] = deque()
        """The first is under way."""

    def put(
        self, work: Callable[[], Callable[[], Any]], done: Callable[[Any, BaseException | None], None]
    ) -> None:
        """`work()` when it is its turn; what that answers runs in a worker, then `done`."""
        self._waiting.append(partial(self._begin, work, done))
        if len(self._waiting) == 1:
            self._waiting[0]()

    def after(
        self,
        first: Callable[[Callable[[BaseException | None], None]], None],
        work: Callable[[], Callable[[], Any]],
        done: Callable[[Any, BaseException | None], None],
    ) -> None:
        """The same once `first` tells that it is done; an error of it is the answer."""
        first(lambda error: self.put(work, done) if error is None else done(None, error))

    def _begin(
        self, work: Callable[[], Callable[[], Any]], done: Callable[[Any, BaseException | None], None]
    ) -> None:
        def ended(result: Any, error: BaseException | None) -> None:
            self._waiting.popleft()
            if self._waiting:
                self._waiting[0]()
            done(result, error)

        self._run(work(), ended)
