"""Methods that are derived from operations, and one description for all API variants."""

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from tfmq.client.api_variants import awaitable, blocking, copy_docs_from, name_methods
from tfmq.client.drivers.twisted import deferred
from tfmq.client.operation import Operation, Wait


class Core:
    def join(self, first: str, second: int = 2, *, third: bool = False) -> Operation[list[Any]]:
        """Join them."""
        yield Wait(())
        return [first, second, third]


class Driver:
    """Runs an operation to its end at once."""

    def run(self, operation: Operation[Any]) -> Any:
        try:
            while True:
                next(operation)
        except StopIteration as end:
            return end.value


class AsyncDriver(Driver):
    async def run(self, operation: Operation[Any]) -> Any:
        return super().run(operation)


def count(found: list[Any]) -> int:
    return len(found)


class Face:
    _core, _driver = Core(), Driver()


@name_methods
class Blocking(Face):
    join = blocking(Core.join)
    length = blocking(Core.join, count)


@name_methods
class Awaitable(Face):
    _driver = AsyncDriver()
    join = awaitable(Core.join)
    length = awaitable(Core.join, count)


@name_methods
class Later(Awaitable):
    join = deferred(awaitable(Core.join))
    length = deferred(awaitable(Core.join, count))


def results(call: Any) -> Iterator[Any]:
    """What a method gives in each variant; a coroutine and a Deferred that need no loop end at once."""
    yield call(Blocking())
    yield asyncio.run(call(Awaitable()))
    found: list[Any] = []
    call(Later()).addBoth(found.append)
    yield found[0]


def test_a_derived_method_passes_its_arguments_on_and_gives_the_result() -> None:
    assert list(results(lambda variant: variant.join("a"))) == [["a", 2, False]] * 3
    assert list(results(lambda variant: variant.join("a", 3, third=True))) == [["a", 3, True]] * 3
    assert list(results(lambda variant: variant.join(second=4, first="b"))) == [["b", 4, False]] * 3
    assert list(results(lambda variant: variant.length("a"))) == [3] * 3


@pytest.mark.parametrize(
    ("variant", "shown"), [(Blocking, "{}"), (Awaitable, "{}"), (Later, "Deferred[{}]")], ids=lambda each: str(each)
)
def test_a_derived_method_is_shown_as_a_written_one(variant: type, shown: str) -> None:
    for name, result in {"join": "list[Any]", "length": "int"}.items():
        method: Any = getattr(variant, name)
        assert (method.__name__, method.__qualname__) == (name, f"{variant.__name__}.{name}")
        assert (method.__module__, method.__doc__) == (__name__, "Join them.")
        parameters = inspect.signature(method).parameters
        assert parameters == inspect.signature(Core.join).parameters
        reported = inspect.signature(method).return_annotation
        assert str(reported).replace("typing.", "") == shown.format(result)
        assert inspect.iscoroutinefunction(method) == (variant is Awaitable)


class First:
    """The first."""

    def both(self) -> None:
        """What it does."""

    def only(self) -> None:
        """Here only."""


def test_methods_take_the_docs_and_append_their_own() -> None:
    @copy_docs_from(First)
    class Second:
        """The second."""

        def both(self) -> None:
            """And here."""

        def other(self) -> None:
            """Mine."""

    assert Second.both.__doc__ == "What it does.\n\nAnd here."
    assert Second.other.__doc__ == "Mine."
    assert Second.__doc__ == "The second.\n\nThe first."
