"""Work inside an operation: its result and its error come out, whoever does it and whenever."""

from collections.abc import Callable
from typing import Any

import pytest

from tfmq.client.work import inline, work


def test_inline_work_needs_no_waiting() -> None:
    operation = work(inline, lambda: 42)
    with pytest.raises(StopIteration) as end:
        next(operation)
    assert end.value.value == 42


def test_what_the_work_raises_is_raised() -> None:
    def fail() -> None:
        raise OSError("planted")

    with pytest.raises(OSError, match="planted"):
        next(work(inline, fail))


def test_work_elsewhere_is_waited_for() -> None:
    kept: list[Callable[[Any, BaseException | None], None]] = []
    operation = work(lambda _, done: kept.append(done), lambda: 0)
    wait = next(operation)
    assert not any(target.done for target in wait.targets)
    kept[0](7, None)
    with pytest.raises(StopIteration) as end:
        next(operation)
    assert end.value.value == 7
