"""Make calls in an executor a few items ahead of their use, in order and with bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, wait
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def call_ahead(
    executor: Executor, call: Callable[[Item], Result], items: Iterable[Item], limit: int
) -> Iterator[tuple[Item, Result]]:
    """Yield each item with the result of `call`, in order. At most `limit` calls have begun and are not yielded.

    If a call raises, or the generator is closed, no further call begins, and those that have begun are waited for.
    """
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    try:
        for item in items:
            if len(waiting) >= limit:
                before, future = waiting.popleft()
                yield before, future.result()
            waiting.append((item, executor.submit(call, item)))
        while waiting:
            before, future = waiting.popleft()
            yield before, future.result()
    finally:
        for _, future in waiting:
            future.cancel()
        wait([future for _, future in waiting])
