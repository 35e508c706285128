"""Work that peers ask for and that may take long: only so much of it runs at once, so that forces, rolls and what
others ask for never wait behind all of it.

What must wait does so here, and whoever asked for much is served in turn with those who asked for little.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from tfmq.broker.caller import Run
from tfmq.errors import Busy

WAITING_MAX: Final = 100_000
"""Each is an object of a few hundred bytes; whoever asked may be gone long since."""

Waiting = tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]]


class Lane:
    """A `Run` over another one, of which it takes `at_once` workers at most.

    What would be more than `waiting_max` pieces of waiting work ends at once, as `Busy`.
    """

    def __init__(self, run: Run, at_once: int, waiting_max: int = WAITING_MAX) -> None:
        self._run = run
        self._free = at_once
        self._waiting_max = waiting_max
        self._waiting: dict[object, deque[Waiting]] = {}
        self._count = 0

    def run(
        self,
        work: Callable[[], Any],
        done: Callable[[Any, BaseException | None], None],
        who: object = None,
    ) -> None:
        """As `Run`; `who` asks for it."""
        if self._free:
            self._begin(work, done)
        elif self._count >= self._waiting_max:
            done(None, Busy())
        else:
            self._count += 1
            self._waiting.setdefault(who, deque()).append((work, done))

    def _begin(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        self._free -= 1
        self._run(work, partial(self._ended, done))

    def _ended(
        self, done: Callable[[Any, BaseException | None], None], result: Any, error: BaseException | None
    ) -> None:
        self._free += 1
        while self._free and self._waiting:
            who = next(iter(self._waiting))
            line = self._waiting.pop(who)
            first = line.popleft()
            self._count -= 1
            if line:
                self._waiting[who] = line
            self._begin(*first)
        done(result, error)
